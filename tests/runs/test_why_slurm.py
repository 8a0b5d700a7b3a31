"""Why runs ended, by what Slurm did and says: its record of jobs, and its words in their output."""

from __future__ import annotations

from pathlib import Path

import pytest
from why_cases import CUDA_OOM, failed, leave_error, proof

from europa_exp.runs.slurm_record import SlurmState, Step
from europa_exp.runs.why import explain


@pytest.mark.parametrize(
    ("reason", "cause", "words"),
    [
        (
            "time_limit",
            "time_limit",
            "*** STEP 7.0 ON n1 CANCELLED AT 2026-11-29T12:00:00 DUE TO TIME LIMIT ***",
        ),
        ("node_failure", "node_failure", "srun: error: Node failure on n2"),
        ("preemption", "preempted", "*** JOB 7 ON n1 CANCELLED AT 2026-11-29T12:00:00 DUE TO PREEMPTION ***"),
    ],
)
@pytest.mark.parametrize("known_by", ["record", "slurm", "output"])
def test_what_slurm_did(tmp_path: Path, reason: str, cause: str, words: str, known_by: str) -> None:
    """Whoever knows it: the run's own record, Slurm's, or only what its daemons wrote into the output of the job."""
    recorded = reason if known_by == "record" else None
    attempt = {"n": 1, "job_id": "7", "start": "7.0", "nodes": ["n1", "n2"], "reason": recorded, "step": 3}
    error = {
        "rank": None,
        "type": reason if recorded else "JobEnded",
        "message": "job 7 is over",
        "traceback": "",
    }
    run = failed(tmp_path, attempts=[attempt], error=error)
    states = {"time_limit": "TIMEOUT", "node_failure": "NODE_FAIL", "preemption": "PREEMPTED"}
    slurm = SlurmState("7", states[reason], "sacct", nodes="n[1-2]") if known_by == "slurm" else None
    output = tmp_path / "7_0_log.err"
    output.write_text(f"slurmstepd: error: {words}\n" if known_by == "output" else "")
    found = explain(run, slurm=slurm, job_logs=[output])
    assert found.cause == cause
    if known_by == "output":
        assert words in proof(found)
        assert found.node == ("n2" if cause == "node_failure" else None)
    if known_by == "slurm":
        assert states[reason] in proof(found)


@pytest.mark.parametrize("separated_by", ["requeue", "time"])
def test_what_slurm_did_to_an_earlier_attempt_explains_nothing(tmp_path: Path, separated_by: str) -> None:
    """The output of a requeued job is one file."""
    attempt = {"n": 1, "job_id": "7", "start": "7.0", "nodes": ["n1", "n2"], "step": 3}
    if separated_by == "time":
        attempt["started_at"] = "2026-11-29T12:00:00.000+14:00"  # later than `at` in every time zone
    run = failed(tmp_path, attempts=[attempt])
    at = "2026-11-27T12:00:00"
    output = tmp_path / "7_0_log.err"
    lines = [f"slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT {at} DUE TO TIME LIMIT ***"]
    if separated_by == "requeue":
        lines.append(f"slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT {at} DUE TO JOB REQUEUE ***")
    output.write_text("\n".join([*lines, "starts again", ""]))
    assert explain(run, job_logs=[output]).cause == "unknown"
    later = "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-12-01T12:00:00 DUE TO TIME LIMIT ***\n"
    output.write_text(output.read_text() + later)
    assert explain(run, job_logs=[output]).cause == "time_limit"


@pytest.mark.parametrize("known_by", ["steps", "output"])
def test_a_rank_that_the_kernel_killed_for_lack_of_memory(tmp_path: Path, known_by: str) -> None:
    run = failed(tmp_path)
    message = "rank 1 was killed by signal 9 (SIGKILL); somebody killed it, or the machine ran out of memory"
    run.note(error=leave_error(run, 1, "Killed", message, "step 3\n"), exit_codes={"1": -9})
    assert explain(run).cause == "killed"
    slurm = SlurmState("7", "FAILED", "sacct", steps=(Step("0", "OUT_OF_MEMORY", 0, 125, "n1"),))
    output = tmp_path / "7_0_log.err"
    output.write_text(
        "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0. Some of the step tasks have been OOM Killed.\n"
    )
    found = explain(run, slurm=slurm) if known_by == "steps" else explain(run, job_logs=[output])
    assert (found.cause, found.rank, found.node) == ("host_memory", 1, "n1")
    assert ("OUT_OF_MEMORY" if known_by == "steps" else "oom_kill event") in proof(found)


def test_the_output_of_an_earlier_job_of_a_chain_explains_nothing(tmp_path: Path) -> None:
    first = {"n": 1, "job_id": "7", "start": "7.0", "nodes": ["n1", "n2"], "reason": "lost_rank", "step": 3}
    last = {"n": 2, "job_id": "8", "start": "8.0", "nodes": ["n3", "n4"], "reason": "killed", "step": 9}
    run = failed(tmp_path, attempts=[first, last], job_ids=["7", "8"])
    message = "rank 1 was killed by signal 9 (SIGKILL); somebody killed it, or the machine ran out of memory"
    run.note(error={"rank": 1, "type": "Killed", "message": message, "traceback": ""})
    output = [tmp_path / "7_0_log.err", tmp_path / "8_0_log.err"]
    words = "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0."
    output[0].write_text(f"{words}\n")
    output[1].write_text("srun: error: n3: task 1: Killed\n")
    found = explain(run, job_logs=output)
    assert (found.cause, found.node) == ("killed", "n3")
    assert words not in proof(found)
    output[1].write_text(f"{words}\n")
    assert explain(run, job_logs=output).cause == "host_memory"


@pytest.mark.parametrize("slurm_says", ["NODE_FAIL", "FAILED"])
def test_what_ended_an_earlier_attempt_does_not_explain_the_job_that_follows(
    tmp_path: Path, slurm_says: str
) -> None:
    """An attempt met the time limit, and the job that was to go on ended before its ranks began."""
    attempt = {
        "n": 1,
        "job_id": "7",
        "start": "7.0",
        "nodes": ["n1", "n2"],
        "reason": "time_limit",
        "step": 3,
    }
    run = failed(tmp_path, attempts=[attempt])
    leave_error(run, 1, "RuntimeError", "Timed out waiting 3000ms for recv operation to complete")
    run.set_state("queued", reason="time_limit: attempt 2 of 3 follows", job_id="8", job_ids=["7", "8"])
    found = explain(run, state="failed", slurm=SlurmState("8", slurm_says, "sacct", nodes="n[7-8]"))
    assert found.cause == ("node_failure" if slurm_says == "NODE_FAIL" else "unknown")
    assert "attempt 1, job 7: time_limit at step 3" in proof(found)
    assert slurm_says in proof(found)
    lost = explain(run, state="lost")
    assert (lost.cause, lost.title) == (
        "unknown",
        "job 8 is gone, and neither the run nor Slurm says how it ended",
    )


def test_a_step_that_failed_is_explained_by_the_records_of_its_ranks(tmp_path: Path) -> None:
    """Inside an allocation the driver records the end of srun where rank 0 had no time to record its own."""
    run = failed(tmp_path)
    leave_error(run, 3, "OutOfMemoryError", CUDA_OOM)
    message = "srun ended with exit code 1; see runs/.submitit/1"
    run.note(error={"rank": None, "type": "StepEnded", "message": message, "traceback": ""})
    found = explain(run)
    assert (found.cause, found.rank, found.node) == ("device_memory", 3, "n2")


def test_a_step_whose_ranks_did_not_start_shows_the_words_of_srun(tmp_path: Path) -> None:
    message = "the ranks did not start: srun ended with exit code 1; see runs/.submitit/1"
    words = "srun: error: Unable to create step for job 7: Invalid generic resource (gres) specification"
    error = {"rank": None, "type": "StepEnded", "message": message, "traceback": words}
    found = explain(failed(tmp_path, attempts=[], error=error))
    assert (found.cause, found.title) == ("launcher", message)
    assert words in proof(found)
