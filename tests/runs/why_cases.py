"""Runs that failed in ways that only a supercomputer shows, as they record it."""

from __future__ import annotations

import json
from pathlib import Path

from making import config, make_run

from europa_exp.runs.folder import RunFolder
from europa_exp.runs.why import Explanation
from europa_exp.runs.why.explanation import MOST_LINES, MOST_PLACES


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


def proof(found: Explanation) -> str:
    """All lines of evidence; within its bounds."""
    assert len(found.evidence) <= MOST_PLACES
    assert all(len(entry.lines) <= MOST_LINES for entry in found.evidence)
    return "\n".join(line for entry in found.evidence for line in entry.lines)


# As torch 2.14 puts it together (c10/cuda/CUDACachingAllocator.cpp; the parts are strings of libc10_cuda.so).
CUDA_OOM = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 94.50 GiB of which 10.44 GiB is free. "
    "Including non-PyTorch memory, this process has 84.05 GiB memory in use. Of the allocated memory 80.77 GiB is allocated "
    "by PyTorch, and 1.10 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory Management"
)


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
