"""status, logs and cancel as people call them, on runs of this machine; Slurm's side is tested on a real one."""

from __future__ import annotations

import os
import pty
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from console import europa
from recorded import log_steps, record

from europa_exp.runs import checkpoints
from europa_exp.runs.folder import RunFolder
from europa_exp.runs.status import State


def states(output: str) -> dict[str, str]:
    """Run -> state, from the table."""
    rows = [line.split() for line in output.splitlines()[1:]]
    return {row[0]: row[1] for row in rows if len(row) > 8 and row[0] != "!" and "older" not in row}


def until(condition: Callable[[], object], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


# -------------------------------------------------------------------------------------------------------------- status


def test_status_of_recorded_runs(tmp_path: Path) -> None:
    log_steps(record(tmp_path, "comm=bf16", sweep="old"), steps=2)
    done = record(tmp_path, "comm=fp8", sweep="new")
    log_steps(done, steps=7)
    failed = record(tmp_path, "nccl.max_ctas=16", sweep="new", state="failed")
    told = europa("status", runs=tmp_path)
    assert told.returncode == 1, "something failed"
    assert states(told.stdout) == {done.name: "completed", failed.name: "failed"}
    assert "7/16" in told.stdout
    assert f"! {failed.name}: rank 3: RuntimeError: loss is not finite" in told.stdout
    assert "1 older runs that have ended are left out" in told.stdout
    assert f"europa why {failed.name}" in told.stdout
    old = europa("status", "--sweep", "old", runs=tmp_path)
    assert old.returncode == 0
    assert list(states(old.stdout).values()) == ["completed"]
    assert europa("status", done.name, runs=tmp_path).returncode == 0
    nothing = europa("status", runs=tmp_path / "nothing")
    assert (nothing.returncode, nothing.stdout) == (0, "")


def test_what_is_next_is_found_where_the_runs_are(tmp_path: Path) -> None:
    """Of runs that are not where the console script looks by itself, each command that is suggested names their folder."""
    place = tmp_path / "o'there runs"
    failed = record(place, "comm=fp8", state="failed")
    done, cancelled = record(place, "comm=bf16"), record(place, state="cancelled")
    calls = [("status",), ("why", done.name), ("why", failed.name), ("why", cancelled.name)]
    for call in calls:
        told = europa(*call, "--runs-dir", str(place), runs=tmp_path / "runs").stdout
        suggested = [line for line in told.splitlines() if line.startswith("Next: ")]
        assert suggested
        for line in suggested:
            if "python launch.py" in line:
                words = shlex.split(line[line.index("python launch.py") :])
                assert f'launch.runs_dir="{place}"' in words, line
            else:
                command = re.split(" has |: when ", line[line.index("europa ") :])[0]
                words = shlex.split(command)
                assert words[-2:] == ["--runs-dir", str(place)], line
    assert "--runs-dir" not in europa("status", runs=place).stdout


def test_where_checkpoints_lie_is_told(tmp_path: Path) -> None:
    run = record(tmp_path / "runs", "training.checkpoint_every=5")
    place = checkpoints.place(run, str(tmp_path / "scratch"))
    checkpoints.make_place(run, place)
    (place / "step-5").mkdir()
    (place / "step-5" / ".metadata").touch()
    checkpoints.note_saved(run, 5)
    told = f"1, the newest of step 5, in {place}"
    assert f"checkpoints of {run.name}: {told}" in europa("status", run.name, runs=tmp_path / "runs").stdout
    assert f"  checkpoints  {told}\n" in europa("show", run.name, runs=tmp_path / "runs").stdout
    assert str(place) not in europa("status", runs=tmp_path / "runs").stdout, "the table of many stays one"
    shutil.rmtree(place)
    assert "gone: step 5 was saved in" in europa("status", run.name, runs=tmp_path / "runs").stdout


def test_a_run_whose_process_is_gone_is_lost(tmp_path: Path) -> None:
    run = record(tmp_path, state="running")
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    run.note(pid=gone.pid)
    told = europa("status", runs=tmp_path)
    assert told.returncode == 1
    assert states(told.stdout) == {run.name: "lost"}
    watched = europa("status", "--watch", runs=tmp_path)
    assert watched.returncode == 1
    assert f"{run.name}: lost" in watched.stdout


def test_broken_records_do_not_stop_the_view(tmp_path: Path) -> None:
    broken, fine = record(tmp_path, "comm=fp8"), record(tmp_path)
    (broken.path / "status.json").write_text("{")
    (broken.path / "config.yaml").write_text("training: [")
    told = europa("status", "--sweep", "ladder", runs=tmp_path)
    assert told.returncode == 1
    assert states(told.stdout) == {broken.name: "unknown", fine.name: "completed"}


@pytest.mark.parametrize("columns", [150, 60])
def test_watching_on_a_terminal_ends_with_the_runs(tmp_path: Path, columns: int) -> None:
    run = record(tmp_path, state="running")
    run.note(pid=os.getpid())
    ours, theirs = pty.openpty()
    env = {
        **os.environ,
        "TERM": "xterm",
        "EUROPA_RUNS_DIR": str(tmp_path),
        "COLUMNS": str(columns),
        "LINES": "30",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "europa_exp.cli", "status", "--watch"], env=env, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    seen = b""

    def read() -> bytes:
        nonlocal seen
        try:
            seen += os.read(ours, 65536)
        except OSError:  # the other end is closed
            return seen
        return seen

    until(lambda: b"running" in read(), 30)
    run.set_state(State.completed)
    until(lambda: b"completed" in read(), 30)
    assert process.wait(timeout=30) == 0
    os.close(ours)


def test_ctrl_c_ends_the_view_only(tmp_path: Path) -> None:
    run = record(tmp_path, state="running")
    run.note(pid=os.getpid())
    env = {**os.environ, "EUROPA_RUNS_DIR": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, "-m", "europa_exp.cli", "status", "--watch"],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert f"{run.name}: running" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, complaint = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "the runs go on" in complaint
    assert run.status().state is State.running


# ---------------------------------------------------------------------------------------------------------------- logs


@pytest.fixture
def logged(tmp_path: Path) -> RunFolder:
    run = record(tmp_path, "parallelism.gpus_per_node=4", "parallelism.nodes=2")
    for rank in range(3):
        run.log(rank).write_text(f"first of {rank}\nsecond of {rank}\n")
    run.launcher_log.write_text("launched\n")
    return run


def test_logs(logged: RunFolder) -> None:
    runs = logged.path.parent
    assert europa("logs", logged.name, runs=runs).stdout == "first of 0\nsecond of 0\n"
    assert europa("logs", logged.name, "--rank", "2", runs=runs).stdout == "first of 2\nsecond of 2\n"
    assert europa("logs", logged.name, "-r", "2", "-n", "1", runs=runs).stdout == "second of 2\n"
    assert europa("logs", logged.name, "--launcher", runs=runs).stdout == "launched\n"
    # A run that has ended is shown and left.
    assert europa("logs", logged.name, "-f", "-n", "1", runs=runs).stdout == "second of 0\n"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--rank", "3"), "rank 3 of .* has no log; ranks with one: 0-2"),
        (("--rank", "99"), "has no rank 99; it has the ranks 0-7"),
        (("--rank", "-1"), "has no rank -1"),
    ],
)
def test_logs_of_ranks_that_are_not_there(logged: RunFolder, args: tuple[str, ...], message: str) -> None:
    told = europa("logs", logged.name, *args, runs=logged.path.parent)
    assert told.returncode == 2
    assert told.stdout == ""
    assert re.search(message, told.stderr), told.stderr


def test_logs_are_passed_on_byte_by_byte(logged: RunFolder) -> None:
    odd = b"caf\xe9 \x1b[31m\r\nno end"
    logged.log(0).write_bytes(odd)
    told = subprocess.run(
        [sys.executable, "-m", "europa_exp.cli", "logs", str(logged.path)], capture_output=True, timeout=60
    )
    assert told.stdout == odd


def test_following_a_log_until_the_run_ends(tmp_path: Path) -> None:
    run = record(tmp_path, state="running")
    run.note(pid=os.getpid())
    process = subprocess.Popen(
        [sys.executable, "-m", "europa_exp.cli", "logs", "-f", str(run.path)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    time.sleep(0.5)
    assert process.poll() is None, "it waits for a log that is still to come"
    with open(run.log(0), "a") as log:
        print("one", file=log, flush=True)
        assert process.stdout.readline() == "one\n"
        print("two", file=log, flush=True)
        assert process.stdout.readline() == "two\n"
        print("last words", file=log, flush=True)
    run.set_state(State.failed)
    rest, _ = process.communicate(timeout=30)
    assert rest == "last words\n"
    assert process.returncode == 0


# -------------------------------------------------------------------------------------------------------------- cancel


def test_cancel_needs_to_be_told_what(tmp_path: Path) -> None:
    run = record(tmp_path, state="queued")
    told = europa("cancel", runs=tmp_path)
    assert told.returncode == 2
    assert "name the runs" in told.stderr
    assert run.status().state is State.queued


def test_nothing_to_cancel_is_no_error(tmp_path: Path) -> None:
    run = record(tmp_path)
    told = europa("cancel", run.name, runs=tmp_path)
    assert told.returncode == 0
    assert "nothing to cancel: it is completed already" in told.stdout
    assert run.status().state is State.completed
