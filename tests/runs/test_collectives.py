"""The record of collectives: what is written comes back, and what is missing is told with a way out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from making import config, make_run

from europa_exp.runs.collectives import CollectivesWriter, Row, collectives_file, table
from europa_exp.runs.lookup import LookupFailed

GATHER = Row("all_gather", "expert", "efsdp", 2, "uint8", 8, 4096, 4096, 4096)
TOKENS = Row("all_to_all", "tokens", "ep", 2, "bfloat16", 16.5, 100.5, 50.25, 120, 0.25, 0.5)


def test_tables_come_back_and_unmeasured_times_are_absent(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    with CollectivesWriter(collectives_file(run)) as writer:
        assert writer.write(10, 10, 4, [GATHER, TOKENS])
        assert writer.write(20, 10, 4, [GATHER])
    newest = table(run)
    assert (newest.step, newest.steps, newest.world, newest.rows) == (20, 10, 4, (GATHER,))
    assert newest.time.endswith("+00:00")
    assert table(run, 10).rows == (GATHER, TOKENS)
    first = json.loads(collectives_file(run).read_text().splitlines()[0])
    assert "seconds" not in first["rows"][0]
    assert "max_seconds" not in first["rows"][0]
    assert first["rows"][1]["max_seconds"] == 0.5


def test_what_a_lost_attempt_recorded_gives_way_to_the_next_one(tmp_path: Path) -> None:
    """The first attempt came to step 4; the second went on from step 1 and has come to step 3."""
    run = make_run(tmp_path)
    with CollectivesWriter(collectives_file(run)) as writer:
        for calls, step in enumerate((1, 2, 3, 4, 2, 3)):
            writer.write(step, 1, 4, [replace(GATHER, calls=calls)])
    assert table(run).step == 3
    assert [table(run, step).rows[0].calls for step in (1, 2, 3)] == [0, 4, 5]
    with pytest.raises(LookupFailed, match="3 steps from 1 to 3"):
        table(run, 4)


def test_broken_lines_are_left_out_and_fields_of_a_later_version_too(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    later = {"step": 1, "steps": 1, "world": 2, "rows": [{**GATHER.as_data(), "colour": "green"}]}
    broken = ["{", '{"step": 2, "steps": 1, "world": 2}', '{"step": 3, "steps": 1, "world": 2, "rows": [{}]}']
    collectives_file(run).write_text("\n".join([json.dumps(later), *broken, '{"step": 4, "ro']))
    assert table(run).step == 1
    assert table(run).rows == (GATHER,)


def test_a_run_without_tables_is_told_how_to_record_them(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    with pytest.raises(
        LookupFailed, match=rf"launch\.py rerun={run.name} .*profiling\.collectives=true"
    ) as error:
        table(run)
    assert "profiling.collectives was false" in str(error.value)
    asked = make_run(tmp_path, config("profiling.collectives=true"), name="profiled")
    CollectivesWriter(collectives_file(asked)).close()
    with pytest.raises(LookupFailed, match="no step is logged"):
        table(asked)
    (run.path / "config.yaml").write_text("{")
    with pytest.raises(LookupFailed, match="rerun="):
        table(run)


@pytest.mark.parametrize(
    ("content", "told"),
    [(None, "is missing"), (b"", "is empty"), (b"\xff\x00 no table\n{}\n", "is unreadable")],
)
def test_an_ended_run_is_told_what_is_wrong_with_its_record(
    tmp_path: Path, content: bytes | None, told: str
) -> None:
    run = make_run(tmp_path, config("profiling.collectives=true"))
    run.set_state("running")
    if content is not None:
        collectives_file(run).write_bytes(content)
    with pytest.raises(LookupFailed, match="no step is logged"):
        table(run)
    run.set_state("completed", exit_codes={"0": 0})
    with pytest.raises(LookupFailed, match=rf"collectives\.jsonl {told}") as error:
        table(run)
    assert "europa status" not in str(error.value)


def test_a_step_without_a_table_is_told_from_which_there_are(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    with CollectivesWriter(collectives_file(run)) as writer:
        writer.write(5, 5, 4, [GATHER])
        with pytest.raises(LookupFailed, match=r"step=4: .* of step 5, and"):
            table(run, 4)
        writer.write(10, 5, 4, [GATHER])
    with pytest.raises(LookupFailed, match=r"step=4: .* of 2 steps from 5 to 10"):
        table(run, 4)


def test_lines_that_could_not_be_written_are_noted_beside_those_of_the_metrics(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.note(metrics={"incomplete": True})
    writer = CollectivesWriter(collectives_file(run))
    writer.path = run.path / "absent" / "collectives.jsonl"
    writer.close()
    assert not writer.write(1, 1, 4, [GATHER])
    writer.path = collectives_file(run)
    writer.close()
    extra = run.status().extra
    assert extra["metrics"] == {"incomplete": True}
    assert extra["collectives"]["lost_lines"] == 1
