"""A run that Slurm took back to its queue: what its attempt says of its end is believed, and a held job is released."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from making import make_run

from europa_exp.runs.folder import RunFolder
from europa_exp.runs.slurm_record import SlurmState
from europa_exp.runs.why import explain


def requeued(runs: Path) -> RunFolder:
    """Its ranks saw each other go while Slurm ended them."""
    run = make_run(runs)
    start = {"start": "7_1.0", "node": "n1", "time": "2026-11-29T12:00:00.000+00:00"}
    error = {
        "rank": 1,
        "type": "RuntimeError",
        "message": "[n1]:4711: Connection closed by peer",
        "traceback": "",
    }
    attempt = {"n": 1, "job_id": "7_1", "start": "7_1.0", "nodes": ["n1"], "reason": "requeued", "step": 3}
    run.set_state("running", attempts=[attempt], job_id="7_1")
    run.error_file(1).parent.mkdir(exist_ok=True)
    run.error_file(1).write_text(json.dumps(error | start))
    run.set_state("queued", reason="Slurm requeues the job")
    return run


@pytest.mark.parametrize(
    ("state", "reason", "held"),
    [
        ("PENDING", "JobHeldUser", True),
        ("PENDING", "job_requeued_in_held_state", True),
        ("REQUEUE_HOLD", "", True),
        ("PENDING", "Priority", False),
        ("RUNNING", "", False),
    ],
)
def test_the_end_is_slurms_work_and_a_held_job_is_released(
    tmp_path: Path, state: str, reason: str, held: bool
) -> None:
    found = explain(requeued(tmp_path), slurm=SlurmState("7_1", state, "squeue", reason))
    assert found.title == "it waits to be tried again; the last time: Slurm requeued the job"
    assert [text for text in found.advice if text.endswith("scontrol release 7_1")] == list(
        found.advice[:held]
    )
