from __future__ import annotations

from pathlib import Path

import pytest
from making import CODE, config, make_run

from europa_exp.runs.code import CodeState
from europa_exp.runs.folder import RunFolder
from europa_exp.runs.skip import completed_twins, is_of

ID = "0123456789ab"


def done(runs: Path, **fields: object) -> RunFolder:
    run = make_run(runs, **fields)  # type: ignore[arg-type]
    run.set_state("completed")
    return run


def twins(runs: Path) -> list[RunFolder]:
    return completed_twins(runs, {ID: (CODE.fingerprint, "data-1", "local")})[ID]


def test_completed_runs_of_the_same_point_are_twins_the_oldest_first(tmp_path: Path) -> None:
    made = [done(tmp_path) for _ in range(3)]
    assert twins(tmp_path) == made


@pytest.mark.parametrize("state", ["created", "queued", "running", "failed", "cancelled"])
def test_only_completed_runs_count(tmp_path: Path, state: str) -> None:
    make_run(tmp_path).set_state(state)
    assert twins(tmp_path) == []


@pytest.mark.parametrize(
    "fields",
    [
        {"identity": "ba9876543210"},
        {"code": CodeState("1" * 40, "code-2")},
        {"data_fingerprint": "data-2"},
        {"data_fingerprint": None},
        {"cfg": config("cluster.name=elsewhere")},
    ],
)
def test_another_identity_code_data_or_cluster_is_no_twin(tmp_path: Path, fields: dict[str, object]) -> None:
    done(tmp_path, **fields)
    assert twins(tmp_path) == []


def test_broken_records_are_no_twins_and_no_errors(tmp_path: Path) -> None:
    whole = done(tmp_path)
    cut, lost, list_, foreign = (done(tmp_path) for _ in range(4))
    (cut.path / "provenance.json").write_bytes((cut.path / "provenance.json").read_bytes()[:-20])
    (lost.path / "status.json").unlink()
    (list_.path / "provenance.json").write_text(f'["{ID}"]')
    (foreign.path / "provenance.json").write_text(f'{{"identity": "{ID}", "code": "x"}}')
    (tmp_path / "a file").write_text("x")
    assert twins(tmp_path) == [whole]
    assert twins(tmp_path / "absent") == []


def test_an_identity_that_only_appears_in_the_record_is_no_twin(tmp_path: Path) -> None:
    done(tmp_path, identity="ba9876543210", parent=f"debug-{ID}")
    assert twins(tmp_path) == []


def test_an_identity_counts_only_where_it_is_recorded():
    text = b'{"identity": "0123456789ab", "command": ["rerun=ffffffffffff", "\\"identity\\": \\"eeeeeeeeeeee\\""]}'
    assert is_of(text, {b"0123456789ab"})
    assert not is_of(text, {b"ffffffffffff", b"eeeeeeeeeeee"})
    assert not is_of(b"", {b""})
