"""Tables of collectives from real runs, and how the counts of the ranks become one table."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import run_ranks
from recorded import record

from europa_exp.comm.traffic import Collective, Kind, Traffic
from europa_exp.runs.collectives import COLLECTIVES_FILE, Table, table
from europa_exp.runs.folder import RunFolder
from europa_exp.training.collectives import rows

GIB = 2**30
GATHER = Kind(Collective.all_gather, "dense", "bfloat16", 2, "0-1")
OTHER_GATHER = Kind(Collective.all_gather, "dense", "bfloat16", 2, "2-3")
TOKENS = Kind(Collective.all_to_all, "tokens", "bfloat16", 2, "ep")


def test_values_are_per_step_of_the_first_rank_with_the_largest_of_all() -> None:
    first = {TOKENS: Traffic(6, 600, 0.5), GATHER: Traffic(4, 400)}
    second = {TOKENS: Traffic(6, 900, 0.25), OTHER_GATHER: Traffic(4, 400, 3.0)}
    mine, theirs, tokens = rows([first, second], 4)
    assert (mine.group, mine.calls, mine.bytes, mine.sent_bytes, mine.max_bytes) == ("0-1", 1, 100, 100, 100)
    assert mine.seconds is mine.max_seconds is None
    # Rank 0 is in no such group, so it made no call and has no time.
    assert (theirs.group, theirs.calls, theirs.bytes, theirs.max_bytes) == ("2-3", 0, 0, 100)
    assert (theirs.seconds, theirs.max_seconds) == (None, 0.75)
    assert (tokens.calls, tokens.bytes, tokens.sent_bytes, tokens.max_bytes) == (1.5, 150, 75, 225)
    assert (tokens.seconds, tokens.max_seconds) == (0.125, 0.125)


def train(folder: str) -> None:
    from europa_exp.training import train

    run = RunFolder(folder)
    train(run.config(), run, {})


def trained(place: Path, *overrides: str) -> RunFolder:
    run = record(place, "training.steps=5", "tracking=disabled", *overrides, state="running")
    run_ranks(4, train, str(run.path))
    return run


def gib(found: Table, *collectives: str, tokens: bool = False) -> float:
    # The metrics take the largest sum of a rank; without tokens all ranks send the same.
    return (
        sum(
            row.max_bytes * (row.ranks - 1) / row.ranks if tokens else row.sent_bytes
            for row in found.rows
            if row.collective in collectives and (row.role == "tokens") == tokens
        )
        / GIB
    )


@pytest.mark.slow
def test_each_logged_step_has_a_table_that_adds_up_to_its_metrics(tmp_path: Path) -> None:
    run = trained(tmp_path, "profiling.collectives=true", "training.log_every=2", "comm=fp8_a2a")
    metrics = {row["step"]: row for row in run.metrics()}
    assert list(metrics) == [1, 2, 4]
    for step, measured in metrics.items():
        found = table(run, step)
        assert (found.world, found.steps) == (4, 2 if step == 4 else 1)
        assert {(row.collective, row.role, row.group, row.dtype, row.ranks) for row in found.rows} == {
            ("all_gather", "dense", "dp_shard", "bfloat16", 4),
            ("all_gather", "expert", "efsdp", "uint8", 2),
            ("all_to_all", "dense", "dp_shard", "bfloat16", 4),
            ("all_to_all", "expert", "efsdp", "bfloat16", 2),
            ("all_to_all", "tokens", "ep", "bfloat16", 2),
        }
        assert all(row.seconds is None for row in found.rows), "a CPU measures no times"
        assert measured["comm/all_gather_sent_gib"] == pytest.approx(gib(found, "all_gather"))
        assert measured["comm/reduce_sent_gib"] == pytest.approx(gib(found, "all_to_all"))
        assert measured["comm/all_to_all_sent_gib"] == pytest.approx(gib(found, "all_to_all", tokens=True))
    # Steps 3 and 4 alike: an average over two steps is what one step carries.
    sharded = [[row for row in table(run, step).rows if row.role != "tokens"] for step in (2, 4)]
    assert sharded[0] == sharded[1]


@pytest.mark.slow
def test_without_the_profile_there_are_sums_and_no_tables(tmp_path: Path) -> None:
    run = trained(tmp_path)
    assert all(row["comm/reduce_sent_gib"] > 0 for row in run.metrics())
    assert not (run.path / COLLECTIVES_FILE).exists()
