"""The attempts of a run: how often a job began it, on which nodes, and how each of them ended.

``status.json`` holds them under ``attempts``, oldest first::

    {"n": 2, "job_id": "4711_3", "start": "4712.1", "nodes": ["jpbo-001-01", ...], "started_at": ..., "ended_at": ...,
     "reason": "time_limit", "step": 1200, "error": {"rank": ..., "type": ..., "message": ...} | null}

``start`` names one start of one job (Slurm's plain job id and how often it was restarted before), ``step`` is the last step
that is known to be done, ``reason`` is one of ``Reason``. An attempt that was lost without a word has no end until the next
one begins. Rank 0's side writes; everybody may read.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Any

from europa_exp.runs.status import Status, now, read_status, write_status

STOPPED = 85
"""Exit code of ranks that stopped because they were asked to, with the run unfinished: neither success nor failure.
A job that ends with it (where the site lets no job start again) is continued by the next job of its chain."""


class Reason(StrEnum):
    """Why an attempt ended."""

    completed = "completed"
    time_limit = "time_limit"
    preemption = "preemption"
    node_failure = "node_failure"
    requeued = "requeued"
    """By hand, by a failed prolog, or for a reason that Slurm kept to itself."""
    asked = "asked"
    """A signal asked the ranks to save and stop, and Slurm names no reason."""
    memory_floor = "memory_floor"
    segmentation_fault = "segmentation_fault"
    killed = "killed"
    """A rank was killed from outside: by the kernel when memory ran out, or by somebody."""
    collective_timeout = "collective_timeout"
    lost_rank = "lost_rank"
    """Connections to a rank broke, or it vanished, and it left no record."""
    exception = "exception"
    non_finite_loss = "non_finite_loss"
    bad_configuration = "bad_configuration"
    cancelled = "cancelled"


def attempts_of(status: Status) -> list[dict[str, Any]]:
    """The attempts in a status, oldest first; entries that are no mappings are left out."""
    found = status.extra.get("attempts")
    return [a for a in found if isinstance(a, dict)] if isinstance(found, list) else []


def open_attempt(folder: Path, *, job_id: str, start: str, nodes: list[str], lost: Reason) -> int:
    """Record that an attempt begins, and return its number (from 1). One that never ended is closed with the reason ``lost``.

    Raises OSError when the record can't be written.
    """
    attempts = attempts_of(read_status(folder))
    for attempt in attempts:
        if attempt.get("ended_at") is None:
            attempt.update(ended_at=now(), reason=str(lost))
    number = len(attempts) + 1
    attempts.append(
        {
            "n": number,
            "job_id": job_id,
            "start": start,
            "nodes": nodes,
            "started_at": now(),
            "ended_at": None,
            "reason": None,
            "step": None,
            "error": None,
        }
    )
    write_status(folder, None, attempts=attempts)
    return number


def closed(status: Status, start: str, reason: Reason, **fields: Any) -> list[dict[str, Any]]:
    """The attempts of ``status`` with the end of the one called ``start`` filled in; to be written with the new state."""
    attempts = attempts_of(status)
    for attempt in attempts:
        if attempt.get("start") == start:
            attempt.update({"ended_at": now(), "reason": str(reason), **fields})
    return attempts
