"""How runs on a real Slurm end, and which of them go on: ranks that die, cancelled, requeued, lost nodes, no time left."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from clusters import until
from submitting import config, europa, evidence, finish, logged, start, states, submit, wait_for_state

from europa_exp.runs.folder import RunFolder

TRAINING = ("training.steps=20", "training.checkpoint_every=4", "training.checkpoint_keep=2")

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(400)]


def job_of(run: Path) -> str:
    return RunFolder(run).status().extra["job_id"]


def up(run: Path, ranks: int) -> list[int]:
    """Process ids of the ranks, once all of them are in their training function."""

    def read() -> list[int]:
        texts = [p.read_text() for r in range(ranks) if (p := run / f"up_{r}").exists()]
        return [int(text) for text in texts if text]

    return until(lambda: len(found := read()) == ranks and found, 90, lambda: RunFolder(run).status())


def test_a_killed_rank_one_that_raises_and_a_cancelled_job(slurm, tmp_path):
    """Four runs in jobs of their own; each ends by itself and for good, whatever the others do."""
    runs = tmp_path / "runs"
    entries = {"killed": "stay", "raised": "raise_on_1", "late": "raise_late_on_1", "cancelled": "stay"}
    commands = {
        name: start(
            slurm, runs / name, f"slurm_targets:{entry}", [config(2, 2) if name == "killed" else config(1, 2)]
        )
        for name, entry in entries.items()
    }
    os.kill(up(runs / "killed" / "run0", 4)[3], signal.SIGKILL)
    up(runs / "cancelled" / "run0", 2)
    slurm.run("scancel", job_of(runs / "cancelled" / "run0"))

    outputs = {name: finish(process) for name, process in commands.items()}
    assert {name: process.returncode for name, process in commands.items()} == dict.fromkeys(entries, 1), (
        outputs
    )
    found = {name: states(runs / name)["run0"] for name in entries}
    expected = dict.fromkeys(entries, "failed") | {"cancelled": "cancelled"}
    assert found == expected, outputs
    jobs = {name: job_of(runs / name / "run0") for name in entries}
    in_slurm = slurm.wait_until_over(*jobs.values())
    assert {name: in_slurm[job] for name, job in jobs.items()} == {
        name: state.upper() for name, state in expected.items()
    }
    assert not slurm.queue(), "none is requeued"

    why = {name: europa(slurm, runs / name, "why", "--runs-dir", ".", "run0").stdout for name in entries}
    assert "rank 3" in why["killed"], why["killed"]
    assert "SIGKILL" in why["killed"], why["killed"]
    assert "rank 1" in why["raised"], why["raised"]
    assert "the third step is bad" in why["raised"], why["raised"]
    assert "too late" in why["late"], why["late"]
    assert "cancel" in why["cancelled"].lower(), why["cancelled"]


def test_requeued_lost_and_overdue_runs_go_on_where_they_were(slurm, tmp_path):
    """Losses after a requeue, a lost node and a time limit are those of a run that nobody disturbed, bit for bit."""
    runs = tmp_path / "runs"
    slow, real = "slurm_targets:slow_then_fast", "europa_exp.training:train"

    def begin(name: str, entry: str, node: int, *overrides: str) -> Path:
        where = f"cluster.nodelist=127.0.0.{node}"
        cfg = config(1, 2, "launch.detach=true", *TRAINING, where, *overrides)
        code, out = submit(slurm, runs / name, entry, [cfg])
        assert code == 0, out
        assert "europa status" in out, "it says what to type next"
        return runs / name / "run0"

    def going(run: Path, steps: int) -> None:
        until(lambda: len(RunFolder(run).metrics()) >= steps, 120, lambda: evidence(run.parent))

    # Slurm looks at time limits twice a minute, so its signal comes about a minute and a half after the start. The run waits
    # for it, and has as long again to end: this machine may be slow. Alone at first, for the same reason.
    minutes = ("cluster.time_limit='00:04:00'", "cluster.signal_margin_s=150", "cluster.max_attempts=9")
    overdue = begin("overdue", "slurm_targets:wait_to_be_asked", 1, *minutes)
    going(overdue, 1)
    requeued = begin("requeued", slow, 2)
    lost = begin("lost", slow, 3)
    undisturbed = begin("undisturbed", real, 4)
    nothing = ("training.checkpoint_every=0", "training.checkpoint_keep=0")
    hopeless = begin("hopeless", "surviving_targets:stop_when_asked", 4, *minutes, *nothing)
    going(requeued, 6)
    slurm.run("scontrol", "requeue", job_of(requeued))
    going(lost, 6)
    slurm.script("down", "127.0.0.3")
    slurm.script("up", "127.0.0.3")

    for run in (undisturbed, requeued, lost, overdue):
        ended = wait_for_state(run, "completed", "failed", "cancelled")
        assert ended == "completed", evidence(run.parent)
    assert wait_for_state(hopeless, "completed", "failed", "cancelled") == "failed", evidence(hopeless.parent)
    status = RunFolder(hopeless).status()
    assert [a["reason"] for a in status.extra["attempts"]] == ["time_limit"], (
        "what can't end is not begun again"
    )
    assert "training.checkpoint_every=0: it would begin again and end again" in status.error["message"]
    expected = losses(undisturbed)
    assert sorted(expected) == list(range(1, 21))
    # A node that is gone with its ranks can leave no reason; the next attempt finds that there was one before.
    reasons = {requeued: ("requeued",), lost: ("node_failure", "requeued"), overdue: ("time_limit",)}
    for run, reason in reasons.items():
        assert losses(run) == expected, run
        first, *others = RunFolder(run).status().extra["attempts"]
        assert first["reason"] in reason, evidence(run.parent)
        assert others, "there was a second attempt"
        assert others[-1]["reason"] == "completed"
        again = [row["step"] for row in logged(run) if row["time"] > others[0]["started_at"]]
        assert again[0] > 1, "it went on, it did not begin again"


def losses(run: Path) -> dict[int, float]:
    """The loss of each step; a step that ran twice had the same loss twice."""
    found: dict[int, float] = {}
    for row in logged(run):
        assert found.setdefault(row["step"], row["loss/global_avg"]) == row["loss/global_avg"], row["step"]
    return found
