"""Nodes that go without a word: they lose power, or hang. Slurm gives them up after SlurmdTimeout, and the runs go on elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
from clusters import until
from submitting import config, evidence, logged, submit, wait_for_state

from europa_exp.runs.attempts import attempts_of
from europa_exp.runs.folder import RunFolder

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(400)]

ENDED = ("completed", "failed", "cancelled")


def test_runs_of_dead_and_hanging_nodes_go_on_elsewhere(start_slurm, tmp_path):
    """The only node of a run dies, the first of two, the second of two; the only node of a run hangs, and comes back later."""
    slurm = start_slurm(nodes=9, SLURMD_TIMEOUT=15)
    alone = ("cluster.requeue=true", "+cluster.sbatch_args.exclusive=true", "launch.detach=true")
    training = ("training.steps=20", "training.checkpoint_every=4", "training.checkpoint_keep=2")
    wanted = {
        "only": (1, 2, "slurm_targets:slow_then_fast", *training),
        "first": (2, 1, "surviving_targets:stay_once"),
        "second": (2, 1, "surviving_targets:stay_once"),
        "hangs": (1, 2, "surviving_targets:stay_once"),
    }
    runs = {}
    for name, (nodes, tasks, entry, *more) in wanted.items():
        cfg = config(nodes, tasks, *alone, *more)
        code, out = submit(slurm, tmp_path / name, entry, [cfg])
        assert code == 0, out
        runs[name] = RunFolder(tmp_path / name / "run0")
    for name in ("first", "second", "hangs"):
        files = [runs[name].path / f"up_{rank}" for rank in range(2)]
        until(lambda files=files: all(f.exists() and f.read_text() for f in files), 90)
    until(lambda: len(runs["only"].metrics()) >= 6, 120, lambda: evidence(tmp_path / "only"))
    lost = {
        name: attempts_of(run.status())[0]["nodes"][1 if name == "second" else 0]
        for name, run in runs.items()
    }
    assert len(set(lost.values())) == 4
    for name, node in lost.items():
        slurm.script("freeze" if name == "hangs" else "crash", node)

    for name, run in runs.items():
        assert wait_for_state(run.path, *ENDED) == "completed", evidence(run.path.parent)
        first, second = attempts_of(run.status())
        assert (first["reason"], second["reason"]) == ("node_failure", "completed"), evidence(run.path.parent)
        assert lost[name] not in second["nodes"]
    begun = attempts_of(runs["only"].status())[1]["started_at"]
    rows = logged(runs["only"].path)
    assert next(row["step"] for row in rows if row["time"] > begun) in (5, 9), "from its last checkpoint"
    losses = {(row["step"], row["loss/global_avg"]) for row in rows}
    assert sorted(step for step, _ in losses) == list(range(1, 21)), "a step that ran twice had the same loss"

    # The ranks that hung wake up, and must not speak for a run that went on without them.
    slurm.script("up", lost["hangs"])
    woken = [
        Path("/proc", pid) for r in range(2) for pid in (runs["hangs"].path / f"up_{r}").read_text().split()
    ]
    until(lambda: not any(place.exists() for place in woken), 60, slurm.logs)
    assert runs["hangs"].status().state == "completed", evidence(tmp_path / "hangs")
    assert [a["reason"] for a in attempts_of(runs["hangs"].status())] == ["node_failure", "completed"]
