from __future__ import annotations

import errno
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest
from making import make_run

from europa_exp.runs.folder import RunFolder
from europa_exp.runs.status import State


def test_a_life_of_a_run(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert run.set_state("queued")
    assert run.set_state(State.running, pid=os.getpid())
    status = run.status()
    assert status.state is State.running
    assert status.started_at
    assert not status.ended
    assert not status.orphaned
    run.set_state("failed", error={"rank": 3, "type": "ValueError", "message": "no"}, exit_codes={"3": 1})
    status = run.status()
    assert status.ended
    assert status.ended_at
    assert status.error == {"rank": 3, "type": "ValueError", "message": "no"}
    assert status.exit_codes == {"3": 1}
    run.set_state("running")
    again = run.status()
    assert again.error is None
    assert again.ended_at is None
    assert again.created_at == status.created_at


def test_only_from_keeps_a_cancelled_run_cancelled(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.set_state("cancelled")
    assert not run.set_state("failed", only_from=["running"], error={"rank": 0})
    assert run.status().state is State.cancelled
    assert run.status().error is None
    assert run.set_state("queued", only_from=[State.cancelled])


def test_notes_keep_the_state(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.note(tracking={"mode": "offline"})
    assert run.status().state is State.created
    assert run.status().extra == {"tracking": {"mode": "offline"}}


@pytest.mark.parametrize(
    "content", [None, "", '{"state": "runn', "[1]", '{"state": "sleeping"}', "{}", "\xff"]
)
def test_a_record_that_can_not_be_read_is_unknown_with_a_reason(tmp_path: Path, content: str | None) -> None:
    run = RunFolder(tmp_path)
    if content is not None:
        (tmp_path / "status.json").write_bytes(content.encode("latin-1"))
    status = run.status()
    assert status.state is State.unknown
    assert "status.json" in str(status.reason)
    run.set_state("completed")  # and what comes next can be recorded all the same
    assert run.status().state is State.completed


def test_unknown_is_never_written(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    with pytest.raises(ValueError, match="never written"):
        run.set_state("unknown")
    with pytest.raises(ValueError):
        run.set_state("sleeping")
    assert run.status().state is State.created


def _count(path: str, name: str) -> None:
    for number in range(25):
        RunFolder(path).note(**{f"{name}_{number}": number})


def test_changes_of_several_processes_are_all_kept(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_count, args=(str(run.path), name)) for name in "abc"]
    for worker in workers:
        worker.start()
    while any(worker.is_alive() for worker in workers):
        assert run.status().state is State.created  # a reader meets no half-written file
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    assert len(run.status().extra) == 75
    assert not [path for path in run.path.iterdir() if path.name.startswith(".")]


def test_a_run_whose_process_is_gone_is_an_orphan(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    run.set_state("running", pid=process.pid)
    assert not run.status().orphaned
    process.kill()
    process.wait()
    assert run.status().orphaned
    run.set_state("running", pid=os.getpid(), pid_started="1")  # the id is in use again, by another process
    assert run.status().orphaned
    run.set_state("running", host="another-machine")
    assert not run.status().orphaned


def test_a_failed_write_keeps_the_old_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path)

    def broken(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="Input/output"):
        run.set_state("running")
    assert run.status().state is State.created
    assert not [path for path in run.path.iterdir() if path.name.startswith(".")]


def test_how_a_run_ended_is_recorded_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path)
    run.set_state(State.running)

    def full(*args: object, **kwargs: object) -> tuple[int, str]:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("europa_exp.runs.files.tempfile.mkstemp", full)
    for state, error in ((State.failed, {"message": "m" * 800}), (State.completed, None)):
        run.set_state(state, error=error)  # longer than before, then shorter
        assert run.status().state is state
        assert run.status().reason is None
