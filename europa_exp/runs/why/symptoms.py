"""What causes look like in logs: the words that PyTorch, gloo, NCCL, the kernel and Slurm use.

Each pattern names where its words come from; "met" means that they were produced for real (see tests/runs/test_why.py).
PyTorch's are those of 2.14.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from europa_exp.runs.error_kinds import Echo
from europa_exp.runs.why.explanation import Cause


@dataclass(frozen=True)
class Symptom:
    """Words that prove a cause. ``sure`` is False where they have other causes now and then."""

    cause: Cause
    pattern: re.Pattern[str]
    sure: bool = True


def _symptom(cause: Cause, *patterns: str, sure: bool = True) -> Symptom:
    return Symptom(cause, re.compile("|".join(patterns), re.IGNORECASE), sure)


TIMED_OUT = _symptom(
    Cause.collective_timeout,
    # torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp (strings of libtorch_cuda.so).
    r"Watchdog caught collective operation timeout: WorkNCCL",
    r"Timeout at collective:",
    r"ranks? \[[\d, ]+\] are the lagging ranks that caused this timeout",
    # gloo/transport/tcp/unbound_buffer.cc; met.
    r"Timed out waiting \d+ms for (?:recv|send) operation to complete",
    # ProcessGroupGloo.cpp; the first one met.
    r"Rank \d+ failed to pass monitoredBarrier in \d+ ms",
    r"timed out in monitoredBarrier after \d+",
    # TCPStore.cpp and socket.cpp; met.
    r"Timed out after \d+ seconds waiting for clients\. \d+/\d+ clients joined",
    r"The client socket has timed out after \d+\s?ms while trying to connect",
    r"wait timeout after \d+ms, keys:",
)

LOST = _symptom(
    Cause.lost_rank,
    # gloo/transport/tcp/pair.cc; met.
    r"Connection closed by peer",
    r"Connection reset by peer",
    # NCCL 2.x: ncclRemoteError, as ProcessGroupNCCL reports it.
    r"ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely",
)

OF_ECHO = {Echo.timed_out: TIMED_OUT, Echo.broken: LOST}
"""What an error that is the echo of another rank's end shows, also in words that prove nothing in a log."""

IN_RANKS = (
    _symptom(
        Cause.device_memory,
        # c10/cuda/CUDACachingAllocator.cpp (strings of libc10_cuda.so); the class is torch.OutOfMemoryError.
        r"CUDA out of memory\. (?:Tried to allocate|Allocation was preemptively rejected)",
        r"\btorch\.(?:cuda\.)?OutOfMemoryError\b",
        # The CUDA runtime's own words (cudaErrorMemoryAllocation), for memory that PyTorch's allocator does not manage.
        r"CUDA error: out of memory",
        r"CUBLAS_STATUS_ALLOC_FAILED",
        # NCCL 2.x, misc/alloc.h.
        r"NCCL WARN Cuda failure.*out of memory",
    ),
    _symptom(
        Cause.host_memory,
        # c10/core/impl/alloc_cpu.cpp; met.
        r"DefaultCPUAllocator: can't allocate memory",
        # strerror(ENOMEM): fork and mmap; met.
        r"Cannot allocate memory",
        # libstdc++ when nobody catches it.
        r"terminate called after throwing an instance of 'std::bad_alloc'",
        r"^MemoryError\b",
    ),
    _symptom(
        Cause.disk_full,
        # strerror(ENOSPC) and strerror(EDQUOT); the first one met.
        r"No space left on device",
        r"Disk quota exceeded",
    ),
    _symptom(
        Cause.disk_full,
        # caffe2/serialize/inline_container.cc: what torch.save says when the file system takes no more; met.
        r"inline_container\.cc:\d+\] \. unexpected pos \d+ vs \d+",
        r"PytorchStreamWriter failed writing file",
        sure=False,
    ),
    _symptom(Cause.non_finite_loss, r"Loss is not finite"),  # torchtitan/trainer.py
    TIMED_OUT,
    LOST,
)
"""In what ranks print and in their errors; the first that fits is the cause."""

OOM_KILL = re.compile(
    # slurmstepd ("Detected 1 oom_kill event in StepId=7.0", "oom-kill" in older ones), srun, and the kernel's log.
    r"Detected \d+ oom[-_]kill event|task [\d,\-]+: Out Of Memory|oom-kill:|Out of memory: Killed process",
    re.IGNORECASE,
)

IN_JOBS = (
    _symptom(Cause.host_memory, OOM_KILL.pattern),
    # slurmstepd; the first, the third and the last met.
    _symptom(Cause.time_limit, r"CANCELLED AT .* DUE TO TIME LIMIT"),
    _symptom(
        Cause.node_failure,
        r"CANCELLED AT .* DUE TO NODE FAILURE",
        r"Node failure on ",
        r"error: Node \S+ has failed",
    ),
    _symptom(Cause.preempted, r"CANCELLED AT .* DUE TO PREEMPTION"),
    _symptom(
        Cause.killed,
        r"tasks? [\d,\-]+: (?:Killed|Segmentation fault|Bus error|Aborted|Illegal instruction)",
        # Somebody, or Slurm before a preemption or the time limit, asked before there was anybody to hear it; met.
        r"tasks? [\d,\-]+: User defined signal \d",
    ),
    # The job script, before any rank (launch/slurm.py).
    _symptom(Cause.bad_configuration, r"^cluster\.(?:modules|unpack|setup): failed"),
)
"""In the output of Slurm's job script, where srun and slurmstepd write."""

CRASH = re.compile(r"^Fatal Python error: ")
"""Begins what faulthandler prints of a crash in native code; the stack follows, the innermost frame first."""

LATE_IN_BARRIER = re.compile(r"Rank (\d+) failed to pass monitoredBarrier")
LAGGING = re.compile(r"ranks? \[([\d, ]+)\] are the lagging ranks")
JOINED = re.compile(r"(\d+)/(\d+) clients joined")
ENQUEUED = re.compile(r"(?:PG GUID (.+?) Rank \d+\].*)?last enqueued work: (\d+)")
COLLECTIVE = re.compile(r"WorkNCCL\(SeqNum=(\d+), OpType=(\w+)")
SIGNAL = re.compile(r"signal (\d+) \((SIG\w+)\)")


def first_in(text: str) -> Symptom | None:
    """The first of ``IN_RANKS`` that a line of ``text`` shows."""
    return next((symptom for symptom in IN_RANKS if search_lines(symptom.pattern, text)), None)


def search_lines(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    """The first line of ``text`` that fits."""
    return next((found for line in text.split("\n") if (found := pattern.search(line))), None)
