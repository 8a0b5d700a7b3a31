"""Why runs failed. The failures are real ones, in ranks that the launcher started, wherever a CPU can fail that way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from making import config, make_run

from europa_exp.runs.folder import RunFolder
from europa_exp.runs.slurm_record import SlurmState, Step
from europa_exp.runs.status import State
from europa_exp.runs.why import Explanation, explain
from europa_exp.runs.why.explanation import MOST_LINES, MOST_PLACES

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def train(runs: Path, entry: str, **environ: str) -> RunFolder:
    """Two ranks of ``entry``, run by the launcher's agent in a process of its own, to their end."""
    cfg = config(
        "parallelism.nodes=1", "parallelism.gpus_per_node=2", "parallelism.data_parallel_shard_degree=2"
    )
    cfg.cluster.preload = False
    run = make_run(runs, cfg, "run")
    run.set_state("queued")
    folder = runs / ".submitit" / "job"
    folder.mkdir(parents=True)
    script = (
        "import sys\nfrom europa_exp.launch.job import Job\n"
        f"Job(({str(run.path)!r},), {str(folder)!r}, 'why_targets:{entry}', '')()"
    )
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{HERE}", "OMP_NUM_THREADS": "1", **environ}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.status().ended, done.stdout + done.stderr
    return run


def proof(found: Explanation) -> str:
    """All lines of evidence; within its bounds."""
    assert len(found.evidence) <= MOST_PLACES
    assert all(len(entry.lines) <= MOST_LINES for entry in found.evidence)
    return "\n".join(line for entry in found.evidence for line in entry.lines)


# ---------------------------------------------------------------------------------------------------- failures of a rank


@pytest.mark.parametrize(
    ("entry", "cause", "title", "line"),
    [
        ("raise_on_1", "exception", "ValueError: the third step is bad", "ValueError: the third step is bad"),
        ("bad_configuration_on_1", "bad_configuration", "model.layers", "must be at least 1"),
        ("memory_error_on_1", "host_memory", "the host's memory ran out", "MemoryError"),
        ("killed_on_1", "killed", r"rank 1 was killed by signal 9 \(SIGKILL\)", "SIGKILL"),
        ("exit_on_1", "exception", "it can't go on like this", "it can't go on like this"),
        (
            "vanish_on_1",
            "unknown",
            "rank 1 ended with exit code 3 and left no word",
            "the last that was heard of it",
        ),
    ],
)
def test_a_rank_that_fails(tmp_path: Path, entry: str, cause: str, title: str, line: str) -> None:
    found = explain(run := train(tmp_path, entry))
    import re

    assert found.cause == cause, found
    assert re.search(title, found.title), found.title
    assert found.rank == 1
    assert found.node == run.status().host, "the node is this machine"
    assert line in proof(found)
    assert found.advice
    assert found.sure == (cause != "unknown")


@pytest.mark.parametrize(
    ("entry", "name"), [("segmentation_fault_on_1", "SIGSEGV"), ("bus_error_on_1", "SIGBUS")]
)
def test_a_crash_in_native_code_is_a_lack_of_memory_on_a_grace(tmp_path: Path, entry: str, name: str) -> None:
    run = train(tmp_path, entry)
    run.write_runtime({"device_name": "x86_64"})
    found = explain(run)
    assert (found.cause, found.rank, found.sure) == ("killed", 1, True)
    assert name in found.title
    assert "Current thread" in proof(found) or "Fatal Python error" in proof(found), "the stack proves it"
    run.write_runtime({"device_name": "aarch64"})
    found = explain(run)
    assert (found.cause, found.rank, found.sure) == ("host_memory", 1, False)
    assert name in found.title
    memory = {"rank": 1, "node": "n1", "free": 3.0, "reclaimable": 0.5}
    (run.path / "logs" / "host_memory.jsonl").write_text(json.dumps(memory) + "\n")
    assert "rank 1 on n1: 3.5 GiB free or reclaimable" in proof(explain(run))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", place], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a small file system needs root")
    yield place
    subprocess.run(["umount", place], check=True)


def test_a_full_disk(tmp_path: Path, small_disk: Path) -> None:
    found = explain(train(tmp_path / "runs", "disk_full_on_1", SMALL_DISK=str(small_disk)))
    assert (found.cause, found.rank, found.sure) == ("disk_full", 1, True)
    assert "[Errno 28] No space left on device" in proof(found)


# ------------------------------------------------------------------------------------------------- failures with torch


@pytest.mark.slow
def test_a_checkpoint_on_a_full_disk(tmp_path: Path, small_disk: Path) -> None:
    found = explain(train(tmp_path / "runs", "checkpoint_on_full_disk_on_1", SMALL_DISK=str(small_disk)))
    assert (found.cause, found.rank) == ("disk_full", 1)
    assert "unexpected pos" in proof(found) or "No space left" in proof(found)


@pytest.mark.slow
def test_an_allocation_that_is_too_large(tmp_path: Path) -> None:
    found = explain(train(tmp_path, "allocator_on_1"))
    assert (found.cause, found.rank) == ("host_memory", 1)
    assert "can't allocate memory: you tried to allocate 1125899906842624 bytes" in proof(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("entry", "title", "line"),
    [
        (
            "rank_1_misses_a_collective",
            "a collective timed out: rank 1 did not arrive, rank 0 waited",
            "Timed out waiting 3000ms for",
        ),
        (
            "rank_1_misses_a_barrier",
            "rank 1 did not arrive",
            "Rank 1 failed to pass monitoredBarrier in 3000 ms",
        ),
        (
            "rank_1_never_comes",
            "the first meeting of the ranks timed out: rank 1 did not arrive",
            "1/2 clients joined",
        ),
    ],
)
def test_a_collective_that_a_rank_misses(tmp_path: Path, entry: str, title: str, line: str) -> None:
    found = explain(train(tmp_path, entry))
    assert found.cause == "collective_timeout"
    assert title in found.title
    assert found.behind == (1,)
    assert found.rank == 1
    assert line in proof(found)
    if entry == "rank_1_misses_a_collective":
        assert "busy with something else" in proof(found), "what the missing rank did last"


@pytest.mark.slow
def test_a_rank_that_leaves_a_collective_behind(tmp_path: Path) -> None:
    found = explain(train(tmp_path, "rank_1_vanishes_from_a_collective"))
    assert found.cause == "lost_rank"
    assert "Connection" in proof(found)


# --------------------------------------------------------------------------------------- what only a supercomputer shows


def failed(tmp_path: Path, *overrides: str, **fields: object) -> RunFolder:
    """A run of four ranks on two nodes that failed on Slurm, as its first task records it."""
    cfg = config(
        "parallelism.nodes=2",
        "parallelism.gpus_per_node=2",
        "parallelism.data_parallel_shard_degree=4",
        *overrides,
    )
    run = make_run(tmp_path, cfg)
    attempt = {"n": 1, "job_id": "7", "start": "7.0", "nodes": ["n1", "n2"], "reason": "killed", "step": 3}
    given = {"job_id": "7", "attempts": [attempt]}
    run.set_state("running")
    run.set_state("failed", **(given | fields))
    return run


def leave_error(
    run: RunFolder, rank: int, kind: str, message: str, log: str = "", at: int = 0
) -> dict[str, object]:
    record = {
        "rank": rank,
        "type": kind,
        "message": message,
        "traceback": f"Traceback (most recent call last):\n  File x\n{kind}: {message}\n",
        "time": f"2026-11-29T12:00:{at:02d}.000+00:00",
        "start": "7.0",
        "node": f"n{rank // 2 + 1}",
    }
    run.error_file(rank).write_text(json.dumps(record))
    run.log(rank).write_text(f"======== start\nstep 3\n{log or record['traceback']}")
    return record


# As torch 2.14 puts it together (c10/cuda/CUDACachingAllocator.cpp; the parts are strings of libc10_cuda.so).
CUDA_OOM = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 94.50 GiB of which 10.44 GiB is free. "
    "Including non-PyTorch memory, this process has 84.05 GiB memory in use. Of the allocated memory 80.77 GiB is allocated "
    "by PyTorch, and 1.10 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory Management"
)


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


def watchdog(rank: int, seq: int, enqueued: int, completed: int, group: str = "0(default_pg)") -> str:
    """As torch 2.14 puts it together (c10d/ProcessGroupNCCL.cpp; the parts are strings of libtorch_cuda.so)."""
    head = f"[rank{rank}]:[E1129 12:00:00.000000000 ProcessGroupNCCL.cpp:682] "
    pg = f"[PG ID 0 PG GUID {group} Rank {rank}]"
    return (
        f"{head}{pg} Watchdog caught collective operation timeout: WorkNCCL(SeqNum={seq}, OpType=ALLGATHER_BASE, "
        f"NumelIn=1048576, NumelOut=4194304, Timeout(ms)=600000) ran for 600012 milliseconds before timing out.\n"
        f"{head}{pg}  failure detected by watchdog at work sequence id: {seq} PG status: last enqueued work: {enqueued}, "
        f"last completed work: {completed}\n"
        f"{head}{pg} Some NCCL operations have failed or timed out. Due to the asynchronous nature of CUDA kernels, "
        "subsequent GPU operations might run on corrupted/incomplete data.\n"
        f"{head}To avoid data inconsistency, we are taking the entire process down.\n"
        "terminate called after throwing an instance of 'c10::DistBackendError'\nFatal Python error: Aborted\n"
    )


def test_the_watchdog_of_nccl_names_the_rank_that_is_behind(tmp_path: Path) -> None:
    run = failed(tmp_path)
    killed = "rank {0} was killed by signal 6 (SIGABRT); see logs/rank_{0}.log"
    for rank, enqueued in ((0, 12), (1, 12), (2, 11), (3, 12)):
        error = leave_error(
            run, rank, "Killed", killed.format(rank), watchdog(rank, enqueued, enqueued, enqueued - 1)
        )
    run.note(error=error, exit_codes={str(r): -6 for r in range(4)})
    found = explain(run)
    assert (found.cause, found.behind, found.rank, found.node) == ("collective_timeout", (2,), 2, "n2")
    assert "allgather" in found.title
    assert found.sure
    assert "Watchdog caught collective operation timeout" in proof(found)


def test_counts_of_different_groups_of_ranks_are_not_compared(tmp_path: Path) -> None:
    """Each group counts its own collectives: rank 3 hangs, its two groups wait for it, at very different numbers."""
    run = failed(tmp_path)
    killed = "rank {0} was killed by signal 6 (SIGABRT); see logs/rank_{0}.log"
    for rank, count, group in ((0, 45, "4(mesh_ep)"), (1, 45, "4(mesh_ep)"), (2, 120, "2(mesh_fsdp)")):
        error = leave_error(
            run, rank, "Killed", killed.format(rank), watchdog(rank, count, count, count - 1, group)
        )
    run.log(3).write_text("======== start\nwaiting for a file\n")
    run.note(error=error)
    assert explain(run).behind == (3,)
    # Within a group the counts tell.
    leave_error(run, 3, "Killed", killed.format(3), watchdog(3, 119, 119, 118, "2(mesh_fsdp)"))
    found = explain(run)
    assert (found.behind, found.sure) == ((3,), True)


def test_a_rank_that_says_nothing_is_the_one_that_did_not_arrive(tmp_path: Path) -> None:
    run = failed(tmp_path)
    killed = "rank {0} was killed by signal 6 (SIGABRT); see logs/rank_{0}.log"
    for rank in (0, 1, 3):
        error = leave_error(run, rank, "Killed", killed.format(rank), watchdog(rank, 12, 12, 11))
    run.log(2).write_text("======== start\nwaiting for a file\n")
    run.note(error=error)
    found = explain(run)
    assert (found.cause, found.behind) == ("collective_timeout", (2,))
    assert "waiting for a file" in proof(found)


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


# -------------------------------------------------------------------------------------------------------- no failures


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


def test_odd_lines_of_memory_reports_are_left_out(tmp_path: Path) -> None:
    run = failed(tmp_path)
    message = "rank 1 was killed by signal 11 (SIGSEGV); see logs/rank_1.log"
    run.note(error={"rank": 1, "type": "Killed", "message": message, "traceback": ""})
    line = {"start": "7.0", "rank": 1, "node": "n1", "free": 3.0, "reclaimable": 0.5}
    odd = ["7", "[1, 2]", '"x"', "null", '{"free": 1', json.dumps(line | {"free": None}), "\x00"]
    reports = run.path / "logs" / "host_memory.jsonl"
    reports.write_text("\n".join([*odd, json.dumps(line), ""]))
    assert "rank 1 on n1: 3.5 GiB free or reclaimable" in proof(explain(run))


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


@pytest.mark.parametrize("kind", ["StartError", "AgentKilled", "TooManyAttemptsError"])
def test_a_title_is_one_line_and_its_proof_has_the_others(tmp_path: Path, kind: str) -> None:
    error = {"rank": None, "type": kind, "message": "rank 0 can't be started:\n  no such file: python9"}
    found = explain(failed(tmp_path, attempts=[], error=error))
    assert "rank 0 can't be started" in found.title
    assert "\n" not in found.title
    assert all("\n" not in line for entry in found.evidence for line in entry.lines)
    assert "  no such file: python9" in proof(found).split("\n")


def test_the_last_line_of_a_log_is_shown_after_empty_ones(tmp_path: Path) -> None:
    run = failed(tmp_path)
    run.log(1).write_text(
        "======== start\nstep 3\n\nloading\n\n\n\n\n\n\n\nthe last that was heard of it\n\n"
    )
    run.note(error={"rank": 1, "type": "Exited", "message": "rank 1 ended", "traceback": ""})
    assert "the last that was heard of it" in proof(explain(run))


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


def test_a_rank_that_did_not_begin_again_has_said_nothing(tmp_path: Path) -> None:
    """Logs are appended to: what stands at the end of one may be of an attempt before the last."""
    job = {"job_id": "7_1", "nodes": ["n1", "n2"], "reason": "collective_timeout"}
    attempts = [{**job, "n": 1, "start": "9.0.0", "step": 3}, {**job, "n": 2, "start": "9.1.0", "step": None}]
    run = failed(tmp_path, attempts=attempts)
    waited = "Timed out waiting 3000ms for recv operation to complete"
    for rank in range(4):
        where = f"rank {rank} on n{rank // 2 + 1}"
        lines = [f"======== 2026-11-29T12:00:00.000+00:00 job 7_1, {where}", waited]
        if rank != 2:
            lines += [f"======== 2026-11-29T13:00:00.000+00:00 job 7_1, restart 1, {where}", waited]
        run.log(rank).write_text("\n".join([*lines, ""]))
    run.note(error={"rank": 0, "type": "RuntimeError", "message": waited, "traceback": ""})
    found = explain(run)
    assert (found.cause, found.behind, found.node) == ("collective_timeout", (2,), "n2")
    assert all(not entry.place.startswith("logs/rank_2.log") for entry in found.evidence)


@pytest.mark.slow
def test_ranks_whose_logs_are_too_many_to_read_are_not_accused(tmp_path: Path) -> None:
    cfg = config(
        "parallelism.nodes=130",
        "parallelism.gpus_per_node=4",
        "parallelism.data_parallel_shard_degree=520",
    )
    run = make_run(tmp_path, cfg)
    waited = "Timed out waiting 3000ms for recv operation to complete"
    for rank in range(520):
        run.log(rank).write_text(f"{waited}\n" if rank != 77 else "busy\n")
    error = {"rank": 0, "type": "RuntimeError", "message": waited, "traceback": ""}
    run.set_state("running")
    run.set_state("failed", error=error)
    found = explain(run)
    assert (found.cause, found.behind, found.sure) == ("collective_timeout", (77,), False)


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
