"""Cancelling runs of this machine: the agent stops one and goes on with the next."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from console import europa
from launching import command, config, make_runs, until

from europa_exp.runs.folder import RunFolder
from europa_exp.runs.status import State


def states(output: str) -> dict[str, str]:
    """Run -> state, from the table."""
    rows = [line.split() for line in output.splitlines()[1:]]
    return {row[0]: row[1] for row in rows if len(row) > 8 and row[0] != "!"}


@pytest.fixture
def submitted(tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Launchers that a test started; none outlives it."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.communicate(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()


def test_cancel_one_run_of_a_call_that_goes_on(
    tmp_path: Path, submitted: list[subprocess.Popen[str]]
) -> None:
    """The running one is stopped, a waiting one does not begin, and the last has its turn."""
    runs = tmp_path / "runs"
    configs = [config(2, seed=13), config(2, seed=1), config(2, seed=2)]
    submitted.append(command(runs, "sleep_if_first", *configs))
    until(lambda: all((runs / "run0" / f"up_{rank}").exists() for rank in (0, 1)))
    waiting, last = RunFolder(runs / "run1"), RunFolder(runs / "run2")
    assert states(europa("status", runs=runs).stdout)["run0"] == "running"

    told = europa("cancel", "run1", runs=runs)
    assert told.returncode == 0, told.stdout
    assert "before it began" in told.stdout
    told = europa("cancel", str(runs / "run0"), runs=runs)
    assert told.returncode == 0, told.stdout
    assert "the ranks" in told.stdout
    assert "have ended" in told.stdout

    output, _ = submitted[0].communicate(timeout=60)
    assert submitted[0].returncode == 1, output
    ended = {run.name: run.status().state for run in (RunFolder(runs / "run0"), waiting, last)}
    assert ended == {"run0": State.cancelled, "run1": State.cancelled, "run2": State.completed}, output
    assert not waiting.log(0).exists()
    assert not list(runs.glob("*/.cancel"))


def test_cancel_what_nobody_works_on(tmp_path: Path) -> None:
    [queued, running] = make_runs(tmp_path, config(), config(seed=2))
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    running.set_state(State.running, pid=gone.pid)
    told = europa("cancel", "--sweep", "s", runs=tmp_path)
    assert told.returncode == 0
    assert f"{running.name}: its process is gone already; marked cancelled" in told.stdout
    assert {run.status().state for run in (queued, running)} == {State.cancelled}
