"""What a run survives on a real Slurm: preemption in the middle, ranks that crash, tasks that vanish, nodes without memory."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from clusters import Cluster, until
from submitting import config, submit, wait_for_state

from europa_exp.launch import slurm_exclude
from europa_exp.runs import checkpoints
from europa_exp.runs.attempts import attempts_of
from europa_exp.runs.folder import RunFolder
from europa_exp.runs.slurm_record import node_names

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(400)]

ENDED = ("completed", "failed", "cancelled")


def begin(slurm: Cluster, runs: Path, entry: str, nodes: int, tasks: int, *overrides: str) -> RunFolder:
    cfg = config(nodes, tasks, "launch.detach=true", "cluster.requeue=true", *overrides)
    code, out = submit(slurm, runs, entry, [cfg])
    assert code == 0, out
    return RunFolder(runs / "run0")


def attempts(run: RunFolder) -> list[dict[str, Any]]:
    return attempts_of(run.status())


def explain(run: RunFolder) -> str:
    logs = sorted((run.path / "logs").glob("*"))
    return f"{run.status()}\n" + "".join(f"== {p}\n{p.read_text(errors='replace')[-2000:]}\n" for p in logs)


def rows(run: RunFolder) -> list[tuple[Any, ...]]:
    keys = ("step", "loss/global_avg", "grad_norm", "tokens_seen")
    return [tuple(row[key] for key in keys) for row in run.metrics()]


def test_a_preempted_run_saves_and_goes_on_bitwise(slurm, tmp_path):
    """Two nodes with two ranks each, the real trainer. The step axis has no gap and no repeat, and no bit differs, also with
    checkpoints in a folder of their own of which not all are kept."""
    training = ("training.steps=24", "training.checkpoint_every=10", "cluster.nodelist='127.0.0.[1-2]'")
    unbroken = begin(slurm, tmp_path / "unbroken", "europa_exp.training:train", 2, 2, *training)
    assert wait_for_state(unbroken.path, *ENDED) == "completed", explain(unbroken)

    kept = (f"cluster.checkpoint_dir={tmp_path / 'scratch'}", "training.checkpoint_keep=2")
    run = begin(slurm, tmp_path / "runs", "slurm_targets:slow_then_fast", 2, 2, *training, *kept)
    until(lambda: len(run.metrics()) > 5, 120, lambda: explain(run))
    important = ("--partition=high", "--nodelist=127.0.0.[1-2]", "--nodes=2", "--ntasks-per-node=16")
    slurm.run("sbatch", *important, "--output=/dev/null", "--wrap=sleep 1")
    assert wait_for_state(run.path, *ENDED) == "completed", explain(run)

    assert rows(run) == rows(unbroken), explain(run)
    first, second = attempts(run)
    assert (first["reason"], second["reason"]) == ("preemption", "completed"), explain(run)
    assert 5 < first["step"] < 24
    assert first["step"] % 10, "saved because of the preemption, not because it was due"
    assert f"goes on from step {first['step']}" in run.launcher_log.read_text()
    assert run.checkpoints.resolve().parent == tmp_path / "scratch"
    assert [c.step for c in checkpoints.found(run.checkpoints)] == [20, 24]
    assert checkpoints.newest_saved(run) == 24
    assert run.log(3).read_text().count("======== ") == 2, "the log of a rank holds both attempts"


def test_crashed_vanished_and_asked_ranks(slurm, tmp_path):
    """A segmentation fault, a task that is killed without a word, and USR2 without time to see why: each starts again."""
    crashed = begin(slurm, tmp_path / "crashed", "surviving_targets:crash_once_on_1", 1, 2)
    vanished = begin(slurm, tmp_path / "vanished", "surviving_targets:stay_once", 2, 1)
    asked = begin(slurm, tmp_path / "asked", "surviving_targets:stop_when_asked", 1, 2)

    until(lambda: (vanished.path / "up_1").exists() and (vanished.path / "up_1").read_text(), 90)
    task = int((vanished.path / "up_1").read_text().split()[1])
    os.kill(task, signal.SIGKILL)
    until(lambda: all((asked.path / f"up_{rank}").exists() for rank in range(2)), 90)
    slurm.run("scancel", "--signal=USR2", asked.status().extra["job_id"])

    expected = {crashed: "segmentation_fault", vanished: "lost_rank", asked: "asked"}
    for run, reason in expected.items():
        assert wait_for_state(run.path, *ENDED) == "completed", explain(run)
        assert [a["reason"] for a in attempts(run)] == [reason, "completed"], explain(run)
        assert [a["n"] for a in attempts(run)] == [1, 2]
    assert attempts(crashed)[0]["error"]["rank"] == 1
    assert "starts anew: it keeps no checkpoints" in crashed.launcher_log.read_text()


def test_a_rank_that_crashes_while_the_controller_is_away(slurm, tmp_path):
    """srun, which ends the other ranks by way of the controller, does not, and no requeue is to be had before it is back."""
    run = begin(slurm, tmp_path / "runs", "surviving_targets:crash_when_told", 2, 1)
    until(lambda: all((run.path / f"up_{rank}").exists() for rank in range(2)), 90, lambda: explain(run))
    slurm.script("stop-controller")
    (run.path / "go").touch()
    until(lambda: "it is asked again" in run.launcher_log.read_text(), 180, lambda: explain(run))
    assert run.status().state == "queued"
    slurm.script("start-controller")
    assert wait_for_state(run.path, *ENDED) == "completed", explain(run)
    assert [a["reason"] for a in attempts(run)] == ["segmentation_fault", "completed"], explain(run)


SLOW_START = """#!/bin/bash
# In Python's place: in the first attempt it takes until told, as on a file system that hundreds of ranks load from.
if [ "${SLURM_RESTART_COUNT:-0}" = 0 ]; then
    echo $$ >"${0%/*}/begun_$SLURM_PROCID"
    until [ -e "${0%/*}/go" ]; do sleep 0.1; done
fi
exec $PYTHON "$@"
"""


def has_pending(pid: int, number: int) -> bool:
    """Whether a signal waits for the process; also when it is gone, for there is nothing to wait for."""
    try:
        fields = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    except OSError:
        return True
    return bool(int(fields["ShdPnd"], 16) >> (number - 1) & 1)


@pytest.mark.parametrize("why", ["asked", "preemption"])
def test_a_signal_before_the_ranks_can_take_it_waits_for_them(slurm, tmp_path, why):
    """Nothing of this project runs yet when it comes."""
    python = tmp_path / "python"
    python.write_text(SLOW_START.replace("$PYTHON", sys.executable))
    python.chmod(0o755)
    places = (f"cluster.python={python}", "cluster.nodelist='127.0.0.[1-2]'")
    run = begin(slurm, tmp_path / "runs", "surviving_targets:stop_when_asked", 2, 1, *places)
    begun = [tmp_path / f"begun_{rank}" for rank in range(2)]
    until(lambda: all(path.exists() and path.read_text() for path in begun), 90, lambda: explain(run))
    if why == "asked":
        slurm.run("scancel", "--signal=USR2", run.status().extra["job_id"])
    else:
        important = ("--partition=high", "--nodelist=127.0.0.[1-2]", "--nodes=2", "--ntasks-per-node=16")
        slurm.run("sbatch", *important, "--output=/dev/null", "--wrap=sleep 1")
    until(lambda: all(has_pending(int(path.read_text()), signal.SIGUSR2) for path in begun), 60)
    (tmp_path / "go").touch()
    assert wait_for_state(run.path, *ENDED) == "completed", explain(run)
    assert [a["reason"] for a in attempts(run)] == [why, "completed"], explain(run)


def test_nodes_below_the_memory_floor_are_left_out(slurm, tmp_path):
    floor = ("cluster.memory_floor_gib=100000", "cluster.memory_floor_scope=host")
    run = begin(slurm, tmp_path / "runs", "slurm_targets:write_steps", 2, 1, *floor)
    # The first two nodes are found bad, then the other two; no other is left.
    until(lambda: len(attempts(run)) == 2 and attempts(run)[1]["ended_at"], 120, lambda: explain(run))
    used = [set(attempt["nodes"]) for attempt in attempts(run)]
    assert not used[0] & used[1], "the nodes that were found bad are not used again"
    assert {attempt["reason"] for attempt in attempts(run)} == {"memory_floor"}
    entries = json.loads(slurm_exclude.place_of(run).read_text())
    assert {entry["node"] for entry in entries} == used[0] | used[1]
    assert all("memory_floor_gib=100000" in entry["reason"] and entry["date"] for entry in entries)
    job = run.status().extra["job_id"]
    until(lambda: slurm.job(job)["JobState"] == "PENDING", 60)
    assert set(slurm.job(job)["ExcNodeList"].split(",")) == used[0] | used[1]
    assert run.status().state == "queued"


def test_the_whole_sweep_leaves_bad_nodes_out(slurm, tmp_path):
    """Run 0 finds its nodes bad. A run that waits in the same array, one in another job, and one that is submitted later to
    the same sweep leave them out as well, and go on leaving out what each was told to."""
    runs = tmp_path / "runs"
    common = ("launch.detach=true", "launch.throttle=1", "cluster.requeue=true", "cluster.max_attempts=2")
    own = "cluster.exclude=127.0.0.4"
    picky = config(1, 1, "cluster.memory_floor_gib=100000", "cluster.memory_floor_scope=host", own, *common)
    patient = config(1, 1, "training.seed=2", own, *common)
    other = config(
        1, 2, "training.seed=3", "cluster.exclude=127.0.0.3", "+cluster.sbatch_args.hold=true", *common
    )
    code, out = submit(slurm, runs, "dispatch_targets:count_starts", [picky, patient, other])
    assert code == 0, out
    first, second, third = (RunFolder(runs / f"run{i}") for i in range(3))
    assert wait_for_state(first.path, *ENDED) == "failed", explain(first)
    assert [a["reason"] for a in attempts(first)] == ["memory_floor"] * 2
    assert [a["nodes"] for a in attempts(first)] == [["127.0.0.1"], ["127.0.0.2"]]
    assert wait_for_state(second.path, *ENDED) == "completed", explain(second)
    # It started when one node was known to be bad, or both.
    assert attempts(second)[0]["nodes"][0] in ("127.0.0.2", "127.0.0.3"), explain(second)
    held = slurm.job(third.status().extra["job_id"])
    assert held["JobState"] == "PENDING"
    assert set(node_names(held["ExcNodeList"])) == {"127.0.0.1", "127.0.0.2", "127.0.0.3"}, explain(first)
    assert "does not leave them out" not in first.launcher_log.read_text()

    later = config(1, 1, "training.seed=4", "cluster.exclude=127.0.0.4", *common[1:3], "launch.detach=true")
    later.launch.throttle = None
    code, out = submit(slurm, runs, "dispatch_targets:count_starts", [later])
    assert code == 0, out
    assert "note: 127.0.0.1 is left out since 20" in out
    assert "note: 127.0.0.2 is left out since 20" in out
    fourth = RunFolder(runs / "run0-r2")
    assert wait_for_state(fourth.path, *ENDED) == "completed", explain(fourth)
    assert attempts(fourth)[0]["nodes"] == ["127.0.0.3"]
