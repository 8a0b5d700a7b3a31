"""Why runs stand where they stand, by what they recorded themselves, and by how their logs end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from making import make_run
from why_cases import CUDA_OOM, failed, leave_error, proof

from europa_exp.runs.slurm_record import SlurmState
from europa_exp.runs.status import State
from europa_exp.runs.why import explain


def test_an_accelerator_without_memory(tmp_path: Path) -> None:
    run = failed(tmp_path)
    leave_error(run, 0, "DistBackendError", "NCCL error: remote process exited", at=5)
    error = leave_error(run, 3, "OutOfMemoryError", CUDA_OOM, at=2)
    run.note(error=error)
    found = explain(run)
    assert (found.cause, found.rank, found.node, found.sure) == ("device_memory", 3, "n2", True)
    assert "Tried to allocate 20.00 GiB" in proof(found)
    # Without status.json's word the records of the ranks tell the same: the earliest that is nobody's echo.
    run.note(error=None)
    assert (explain(run).cause, explain(run).rank) == ("device_memory", 3)


def test_a_loss_that_is_not_finite(tmp_path: Path) -> None:
    run = failed(tmp_path)
    run.metrics_file.write_text('{"step": 2, "loss/global_avg": 9.5, "grad_norm": 4000.0}\n')
    message = (
        "Loss is not finite (global_avg_loss=nan) at step 3. Stopping training."  # torchtitan/trainer.py
    )
    for kind in ("RuntimeError", "NonFiniteLossError"):
        run.note(error=leave_error(run, 2, kind, message))
        found = explain(run)
        assert (found.cause, found.rank) == ("non_finite_loss", 2)
        assert "step 2: loss 9.5, grad_norm 4000.0" in proof(found)


def test_a_floor_of_memory_names_the_node_of_the_rank(tmp_path: Path) -> None:
    attempt = {"n": 1, "job_id": "7", "start": "7.0", "nodes": ["n1", "n2"], "reason": "memory_floor"}
    run = failed(tmp_path, attempts=[attempt])
    for rank, node in ((2, "n10"), (10, "n9"), (3, "n10")):
        record = leave_error(run, rank, "MemoryFloorError", f"node {node}, socket 0: 3.0 GiB are free")
        run.error_file(rank).write_text(json.dumps(record | {"node": node}))
    found = explain(run)
    assert (found.cause, found.rank, found.node) == ("memory_floor", 2, "n10")
    assert "on n10, n9" in found.title
    assert proof(found).splitlines()[0] == "node n10, socket 0: 3.0 GiB are free", "in the order of ranks"


def test_odd_lines_of_memory_reports_are_left_out(tmp_path: Path) -> None:
    run = failed(tmp_path)
    message = "rank 1 was killed by signal 11 (SIGSEGV); see logs/rank_1.log"
    run.note(error={"rank": 1, "type": "Killed", "message": message, "traceback": ""})
    line = {"start": "7.0", "rank": 1, "node": "n1", "free": 3.0, "reclaimable": 0.5}
    odd = ["7", "[1, 2]", '"x"', "null", '{"free": 1', json.dumps(line | {"free": None}), "\x00"]
    reports = run.path / "logs" / "host_memory.jsonl"
    reports.write_text("\n".join([*odd, json.dumps(line), ""]))
    assert "rank 1 on n1: 3.5 GiB free or reclaimable" in proof(explain(run))


def test_a_lost_rank_is_explained_by_its_exit_code(tmp_path: Path) -> None:
    run = failed(tmp_path)
    error = {"rank": None, "type": "LostRank", "message": "the rank left no record", "traceback": ""}
    run.note(error=error, exit_codes={"0": 1, "1": 1, "2": 1, "3": -9})
    for rank in (0, 1, 2):
        leave_error(run, rank, "RuntimeError", "Connection closed by peer [127.0.0.1]:12345")
    found = explain(run)
    assert (found.cause, found.rank, found.node) == ("killed", 3, "n2")
    assert "rank 3 was killed by signal 9 (SIGKILL)" in found.title
    # Nobody left a record, so which rank it was is told by the exit codes alone.
    for rank in (0, 1, 2):
        run.error_file(rank).unlink()
    run.note(exit_codes={"0": 0, "1": 0, "2": 0, "3": -9})
    found = explain(run)
    assert (found.cause, found.rank) == ("killed", 3)


def test_what_is_not_known_is_said(tmp_path: Path) -> None:
    run = failed(tmp_path, error=None, attempts=[])
    found = explain(run)
    assert (found.cause, found.sure) == ("unknown", False)
    assert any("sacct -j 7" in text for text in found.advice)
    assert any("europa logs" in text for text in found.advice)
    (run.path / "status.json").write_text("{")
    assert explain(run).cause == "unknown"
    for path in run.path.glob("logs/*"):
        path.unlink()
    (run.path / "config.yaml").unlink()
    assert explain(run).cause == "unknown"


@pytest.mark.parametrize("kind", ["StartError", "AgentKilled", "TooManyAttemptsError"])
def test_a_title_is_one_line_and_its_proof_has_the_others(tmp_path: Path, kind: str) -> None:
    error = {"rank": None, "type": kind, "message": "rank 0 can't be started:\n  no such file: python9"}
    found = explain(failed(tmp_path, attempts=[], error=error))
    assert "rank 0 can't be started" in found.title
    assert "\n" not in found.title
    assert all("\n" not in line for entry in found.evidence for line in entry.lines)
    assert "  no such file: python9" in proof(found).split("\n")


# ------------------------------------------------------------------------------------------------------------------ logs


def test_huge_and_binary_logs_are_bounded_and_numbered(tmp_path: Path) -> None:
    run = failed(tmp_path)
    lines = 30_000
    with open(run.log(1), "wb") as log:
        for i in range(lines):
            log.write(f"line {i}\n".encode())
        log.write(b"\xff\xfe" * 5000 + b"\n" + b"y" * 10_000 + b"\nValueError: bad\n")
    run.note(error={"rank": 1, "type": "ValueError", "message": "bad", "traceback": ""})
    found = explain(run)
    assert found.cause == "exception"
    assert found.evidence[0].lines[-1] == "ValueError: bad"
    assert found.evidence[0].place == f"logs/rank_1.log:{lines + 3 - 4}"
    assert all(len(line) <= 400 for line in found.evidence[0].lines)
    assert run.status().state is State.failed


def test_bytes_of_an_earlier_attempt_that_are_no_text_move_no_line_number(tmp_path: Path) -> None:
    run = failed(tmp_path)
    run.log(1).write_bytes(b"======== first\n" + b"\xff" * 3000 + b"\n======== second\nValueError: bad\n")
    run.note(error={"rank": 1, "type": "ValueError", "message": "bad", "traceback": ""})
    proved = explain(run).evidence[0]
    assert (proved.place, proved.lines) == ("logs/rank_1.log:3", ("======== second", "ValueError: bad"))


def test_the_last_line_of_a_log_is_shown_after_empty_ones(tmp_path: Path) -> None:
    run = failed(tmp_path)
    run.log(1).write_text(
        "======== start\nstep 3\n\nloading\n\n\n\n\n\n\n\nthe last that was heard of it\n\n"
    )
    run.note(error={"rank": 1, "type": "Exited", "message": "rank 1 ended", "traceback": ""})
    assert "the last that was heard of it" in proof(explain(run))


# ------------------------------------------------------------------------------------------------------ several attempts


def test_an_earlier_attempt_explains_nothing(tmp_path: Path) -> None:
    run = failed(tmp_path)
    leave_error(run, 0, "OutOfMemoryError", CUDA_OOM)
    attempts = [
        {"n": 1, "job_id": "7", "start": "7.0", "reason": "exception", "step": 3},
        {"n": 2, "job_id": "7", "start": "7.1", "nodes": ["n1", "n2"], "reason": "exception", "step": 5},
    ]
    run.note(attempts=attempts)
    with open(run.log(1), "w") as log:
        log.write(f"======== first\n{CUDA_OOM}\n======== second\nValueError: another\n")
    error = {
        "rank": 1,
        "type": "Exited",
        "message": "rank 1 ended with exit code 1 and left no record",
        "traceback": "",
    }
    run.note(error=error)
    found = explain(run)
    assert found.cause == "unknown"
    assert CUDA_OOM[:40] not in proof(found)
    assert "ValueError: another" in proof(found)
    run.note(error=None)
    assert explain(run).cause == "unknown", "what is left of the first attempt is no proof for the second"


@pytest.mark.parametrize(
    ("reason", "title"),
    [
        ("segmentation_fault, and this was attempt 2 of 2 (cluster.max_attempts)", "it had its 2 attempts"),
        (
            "segmentation_fault at step 3 again, with the same error as attempt 1",
            "ended twice in the same way",
        ),
    ],
)
def test_a_run_that_was_requeued_too_often(tmp_path: Path, reason: str, title: str) -> None:
    attempts = [
        {
            "n": n,
            "job_id": "7",
            "start": f"7.{n}",
            "nodes": ["n1", "n2"],
            "reason": "segmentation_fault",
            "step": 3,
        }
        for n in (1, 2)
    ]
    run = failed(tmp_path, attempts=attempts, reason=reason)
    message = "rank 1 was killed by signal 11 (SIGSEGV); see logs/rank_1.log"
    run.note(error={"rank": 1, "type": "Killed", "message": message, "traceback": ""})
    found = explain(run)
    assert found.cause == "too_many_attempts"
    assert title in found.title
    assert "SIGSEGV" in found.title
    assert "attempt 1, job 7: segmentation_fault at step 3" in proof(found)


# ----------------------------------------------------------------------------------------------------------- no failures


def test_completed_running_waiting_and_cancelled(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.set_state("queued", reason="time_limit: attempt 2 of 3 follows")
    found = explain(run)
    assert (found.cause, found.title) == ("going_on", "it waits")
    assert "attempt 2 of 3 follows" in proof(found)
    run.set_state("running")
    assert explain(run).title == "it is running"
    assert (
        explain(run, state="queued", slurm=SlurmState("7", "PENDING", "squeue", "Priority")).cause
        == "going_on"
    )
    run.note(cancel_asked={"by": "ada", "at": "2026-11-29"})
    run.set_state("cancelled")
    found = explain(run)
    assert (found.cause, found.title) == ("cancelled", "it was cancelled by ada (europa cancel)")
    run.set_state("completed")
    assert (explain(run).cause, explain(run).title) == ("completed", "it completed")


def test_a_run_that_waits_to_be_tried_again_tells_what_happened(tmp_path: Path) -> None:
    attempt = {
        "n": 1,
        "job_id": "7",
        "start": "7.0",
        "nodes": ["n1", "n2"],
        "reason": "collective_timeout",
        "step": 3,
    }
    run = failed(tmp_path, attempts=[attempt])
    leave_error(run, 0, "RuntimeError", "Timed out waiting 3000ms for recv operation to complete")
    run.set_state("queued", reason="collective_timeout: attempt 2 of 3 follows")
    run.log(1).write_text("======== start\nelsewhere\n")
    found = explain(run, slurm=SlurmState("7", "PENDING", "squeue", "BeginTime"))
    assert found.cause == "going_on"
    assert "it waits to be tried again; the last time: a collective timed out" in found.title
    assert "attempt 2 of 3 follows" in proof(found)
    assert found.behind == (1, 2, 3)
    # Once the next attempt runs, the earlier error is history.
    run.note(attempts=[attempt, {"n": 2, "job_id": "7", "start": "7.1", "nodes": ["n1", "n2"]}])
    run.set_state("running")
    assert explain(run).title == "it is running"


def test_scancel_by_somebody(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.set_state("running", job_id="7")
    found = explain(run, state="cancelled", slurm=SlurmState("7", "CANCELLED", "sacct", by="1234"))
    assert (found.cause, found.title) == ("cancelled", "it was cancelled by user id 1234 (scancel)")
