from __future__ import annotations

from pathlib import Path

import pytest
from recorded import log_steps, record

from europa_exp.runs.lookup import (
    Entry,
    LookupFailed,
    entries,
    find,
    find_all,
    find_many,
    find_sweep,
    latest_group,
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three experiments; ``fp8`` was run three times, in two sweeps."""
    place = tmp_path_factory.mktemp("lookup") / "runs"
    record(place, "comm=bf16", sweep="a-1")
    record(place, "comm=fp8", sweep="a-1")
    record(place, "comm=fp8", sweep="a-2", state="failed")
    record(place, "comm=fp8", sweep="a-2")
    record(place, "nccl.max_ctas=16", sweep=None)
    return place


def fp8(runs: Path) -> list[Entry]:
    return [e for e in entries(runs) if "fp8" in e.name]


def test_by_folder_name_prefix_and_hash(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = entries(runs)[0].run
    found = Entry(run).identity
    assert found is not None
    for text in (str(run.path), f"{run.path}/", run.name, run.name[:-4], found, found[:6], found.upper()):
        assert find(runs, text) == run
    monkeypatch.chdir(runs.parent)
    assert find("elsewhere", f"runs/{run.name}/") == run
    monkeypatch.chdir(runs)
    assert find("elsewhere", run.name) == run


def test_an_exact_name_wins_over_names_that_begin_with_it(runs: Path) -> None:
    first, *_ = fp8(runs)
    assert find(runs, first.name) == first.run
    assert find(runs, f"{first.name}-r3").name == f"{first.name}-r3"


def test_a_hash_stands_for_all_its_runs_where_several_will_do(runs: Path) -> None:
    repeats = fp8(runs)
    found = repeats[0].identity
    assert found is not None
    assert find_all(runs, found) == [e.run for e in repeats]
    assert find_many(runs, [found, repeats[1].name]) == [e.run for e in repeats]
    with pytest.raises(LookupFailed, match="3 runs, repeats of one experiment") as caught:
        find(runs, found)
    assert all(e.name in str(caught.value) for e in repeats)
    assert find(runs, found, newest=True) == repeats[2].run
    assert find(runs, repeats[1].name, newest=True) == repeats[1].run  # a name is still that run


def test_a_prefix_of_several_experiments_is_refused(tmp_path: Path) -> None:
    for ctas in (16, 17):
        record(tmp_path, f"nccl.max_ctas={ctas}")
    with pytest.raises(LookupFailed, match="fits 2 runs; type more of the name"):
        find_all(tmp_path, "max_ctas=1")
    with pytest.raises(LookupFailed, match="fits 2 runs"):
        find(tmp_path, "max_ctas=1", newest=True)


def test_nothing_found_says_where_and_what_is_close(runs: Path, tmp_path: Path) -> None:
    with pytest.raises(LookupFailed, match="which holds 5 runs") as caught:
        find(runs, "max_ctas=61")
    assert str(runs) in str(caught.value)
    with pytest.raises(LookupFailed, match="close:\n  expert_all_gather=fp8"):
        find(runs, "all_gather=fp8")
    with pytest.raises(LookupFailed, match="there is no folder"):
        find(tmp_path / "none", "x")
    with pytest.raises(LookupFailed, match="holds no runs"):
        find(tmp_path, "x")
    with pytest.raises(LookupFailed, match="no run folder"):
        find(runs, f"{tmp_path}/")
    with pytest.raises(LookupFailed, match="empty name"):
        find(runs, " ")
    with pytest.raises(LookupFailed, match=r"'x'.*\n.*'y'"):
        find_many(runs, ["x", "y"])


def test_runs_of_one_millisecond_keep_the_order_of_their_sweep(tmp_path: Path) -> None:
    made = [record(tmp_path, f"comm={comm}") for comm in ("fp8", "bf16")]
    for run in made:
        run.note(created_at="2026-01-01T00:00:00.000+00:00")
    assert [e.run for e in entries(tmp_path)] == made


def test_sweeps(runs: Path) -> None:
    name, latest = find_sweep(runs, None)
    assert name == "a-2"
    assert len(latest) == 2
    assert [run.name for run in find_sweep(runs, "a-1")[1]] == [e.name for e in entries(runs)[:2]]
    with pytest.raises(LookupFailed, match="fits 2 sweeps"):
        find_sweep(runs, "a-")
    with pytest.raises(LookupFailed, match=r"no sweep 'b'.*2 sweeps there"):
        find_sweep(runs, "b")


def test_runs_without_a_sweep(tmp_path: Path) -> None:
    record(tmp_path, sweep=None)
    with pytest.raises(LookupFailed, match=r"no sweep in .*name the runs"):
        find_sweep(tmp_path, None)


def test_the_latest_that_can_be_compared(tmp_path: Path) -> None:
    with pytest.raises(LookupFailed, match="0 runs, and no sweep or repeats"):
        latest_group(tmp_path)
    record(tmp_path, "comm=bf16", sweep=None)
    with pytest.raises(LookupFailed, match=r"1 runs, .*europa compare RUN RUN"):
        latest_group(tmp_path)
    repeats = [record(tmp_path, "comm=fp8", sweep=None, repeat=n) for n in range(2)]
    title, found = latest_group(tmp_path)
    assert (title, found) == (f"repeats of {Entry(repeats[0]).identity}", repeats)
    swept = record(tmp_path, "comm=fp8", sweep="a")
    assert latest_group(tmp_path) == ("sweep a", [swept])
    repeats.append(record(tmp_path, "comm=fp8", sweep=None, repeat=2))
    assert latest_group(tmp_path)[1] == repeats


def test_broken_folders_are_listed_with_what_is_wrong(tmp_path: Path) -> None:
    whole = record(tmp_path)
    log_steps(whole, steps=3)
    bare = record(tmp_path, "training.steps=11")
    (bare.path / "config.yaml").unlink()
    torn = record(tmp_path, "training.steps=12")
    (torn.path / "status.json").write_text('{"state": "comp')
    cut = record(tmp_path, "training.steps=13")
    log_steps(cut, steps=3)
    with open(cut.metrics_file, "a") as file:
        file.write('{"step": 4, "loss/glo')
    empty = record(tmp_path, "training.steps=14")
    (empty.path / "config.yaml").write_text("")
    (empty.path / "provenance.json").write_text("[")
    foreign = record(tmp_path, "training.steps=15")
    (foreign.path / "config.yaml").write_text("modle: {}\n")
    (tmp_path / "notes").mkdir()  # no run: not listed
    (tmp_path / "file").write_text("")

    found = {e.name: e for e in entries(tmp_path)}
    assert len(found) == 6
    wrong = {
        run.name: found[run.name].problems(deep=True) for run in (whole, bare, torn, cut, empty, foreign)
    }
    assert wrong[whole.name] == []
    assert wrong[bare.name] == ["config.yaml is missing"]
    assert "status.json can't be read" in wrong[torn.name][0]
    assert found[torn.name].state == "unknown"
    assert wrong[cut.name] == ["the last line of metrics.jsonl is cut off and left out"]
    assert found[cut.name].last[0]["step"] == 3
    assert wrong[empty.name] == ["config.yaml is empty", "provenance.json is missing or broken"]
    assert "modle" in wrong[foreign.name][0]
    assert "more problems" in wrong[foreign.name][0]
    assert found[empty.name].identity == empty.name[-12:]  # the name still tells
    assert find(tmp_path, bare.name) == bare


def test_a_run_whose_process_is_gone_is_lost(tmp_path: Path) -> None:
    run = record(tmp_path, state="running")
    run.note(pid=2**22 + 1)
    entry = Entry(run)
    assert entry.state == "lost"
    assert "process 4194305 on this machine is gone" in entry.problems()[0]
