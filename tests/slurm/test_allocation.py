"""Calls inside an allocation of a real Slurm: runs take turns in it, and stopping them leaves it alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from clusters import until
from submitting import HERE, config, environ, states, wait_for_state

from europa_exp.config import io
from europa_exp.runs.folder import RunFolder

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(300)]

INSIDE = ("cluster.inside_allocation=true", "cluster.requeue=false")


@pytest.fixture
def allocation(slurm):
    return salloc(slurm)


def salloc(slurm) -> str:
    """An allocation of two nodes, two tasks each; its id."""
    done = subprocess.run(
        ["salloc", "--no-shell", "--nodes=2", "--ntasks-per-node=2"],
        env=slurm.environ(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    said = done.stderr
    return next(word for word in said.split() if word.isdigit())


def start(slurm, job, runs_dir: Path, entry: str, configs) -> subprocess.Popen[str]:
    paths = []
    for i, cfg in enumerate(configs):
        path = runs_dir.parent / f"{i}.yaml"
        path.write_text(io.to_yaml(cfg))
        paths.append(str(path))
    return subprocess.Popen(
        [sys.executable, str(HERE / "submitting.py"), str(runs_dir), f"slurm_targets:{entry}", *paths],
        env=environ(slurm, SLURM_JOB_ID=job, SLURM_JOB_NUM_NODES="2", SLURM_NTASKS="1", SLURM_NTASKS_PER_NODE="7"),
        cwd=runs_dir.parent,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip


def finish(process) -> tuple[int, str]:
    out = process.communicate(timeout=200)[0]
    return process.returncode, out


def test_runs_take_turns(slurm, allocation, tmp_path):
    configs = [
        config(2, 2, *INSIDE, "training.seed=1"),
        config(2, 2, *INSIDE, "training.seed=13"),
        config(1, 2, *INSIDE, "training.seed=3"),
    ]
    code, out = finish(start(slurm, allocation, tmp_path / "runs", "fail_when_marked", configs))
    assert code == 1, out
    assert states(tmp_path / "runs") == {"run0": "completed", "run1": "failed", "run2": "completed"}, out
    assert "unlucky seed 13" in out
    assert RunFolder(tmp_path / "runs/run1").status().error["rank"] == 1
    assert slurm.queue() == {allocation: "RUNNING"}


def pids_of(run: Path) -> list[str]:
    """Process ids of the ranks that are up."""
    return list(filter(None, (file.read_text() for file in run.glob("up_*"))))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopping_ends_the_ranks_and_not_the_allocation(slurm, allocation, tmp_path, number):
    configs = [config(2, 2, *INSIDE, f"training.seed={seed}") for seed in (1, 2)]
    process = start(slurm, allocation, tmp_path / "runs", "stay", configs)
    run = tmp_path / "runs/run0"
    pids = until(lambda: len(found := pids_of(run)) == 4 and found, 60)
    os.kill(process.pid, number)
    code, out = finish(process)
    assert code == 130, out
    assert states(tmp_path / "runs") == {"run0": "cancelled", "run1": "cancelled"}
    status = RunFolder(run).status()
    assert status.error is None
    assert [a["reason"] for a in status.extra["attempts"]] == ["cancelled"]
    until(lambda: not [p for p in pids if Path(f"/proc/{p}").exists()], 30)
    assert slurm.queue() == {allocation: "RUNNING"}


def test_europa_cancel_stops_one_run_and_the_next_gets_its_turn(slurm, allocation, tmp_path):
    from submitting import europa

    configs = [config(1, 2, *INSIDE, "training.seed=1"), config(1, 2, *INSIDE, "training.seed=2")]
    process = start(slurm, allocation, tmp_path / "runs", "stay", configs)
    until(lambda: len(list((tmp_path / "runs/run0").glob("up_*"))) == 2, 60)
    done = europa(slurm, tmp_path, "cancel", "run0")
    assert done.returncode == 0, done.stdout
    assert wait_for_state(tmp_path / "runs/run0", "cancelled") == "cancelled"
    wait_for_state(tmp_path / "runs/run1", "running")
    assert slurm.queue() == {allocation: "RUNNING"}
    process.send_signal(signal.SIGINT)
    assert finish(process)[0] == 130


def test_the_end_of_the_allocation_is_the_end_of_the_runs(slurm, allocation, tmp_path):
    """The one that runs and those that wait are cancelled, for that reason; another allocation runs them all."""
    from submitting import europa

    configs = [config(1, 2, *INSIDE, f"training.seed={seed}") for seed in (1, 2, 3)]
    process = start(slurm, allocation, tmp_path / "runs", "stay", configs)
    until(lambda: len(list((tmp_path / "runs/run0").glob("up_*"))) == 2, 60)
    slurm.run("scancel", allocation)
    code, out = finish(process)
    assert code == 1, out
    assert set(states(tmp_path / "runs").values()) == {"cancelled"}, out
    found = {p.name: RunFolder(p).status() for p in (tmp_path / "runs").glob("run*")}
    for name, status in found.items():
        assert status.error["message"].startswith(f"the allocation has ended: job {allocation}"), name
        assert "attempts" not in status.extra or name == "run0", "no step was tried in vain"
    told = europa(slurm, tmp_path, "why", "run1").stdout
    assert "cancelled: the allocation has ended" in told

    code, out = finish(start(slurm, salloc(slurm), tmp_path / "runs", "write_steps", configs))
    assert code == 0, out
    assert sorted(states(tmp_path / "runs").values()) == ["cancelled"] * 3 + ["completed"] * 3, out


def test_a_step_that_cannot_start_says_why(slurm, allocation, tmp_path):
    cfg = config(1, 2, *INSIDE, "cluster.gres='gpu:99'")
    code, out = finish(start(slurm, allocation, tmp_path / "runs", "write_steps", [cfg]))
    assert code == 1, out
    assert states(tmp_path / "runs") == {"run0": "failed"}
    error = RunFolder(tmp_path / "runs/run0").status().error
    assert "the ranks did not start: srun ended with exit code" in error["message"]
    assert "srun: error" in error["traceback"]
