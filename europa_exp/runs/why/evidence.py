"""Lines that prove a cause, by the place that they come from. No evidence where a place has nothing to say."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from europa_exp.runs.files import read_lines
from europa_exp.runs.why.case import MOST_LOGS, Case, ErrorRecord
from europa_exp.runs.why.explanation import MOST_LINES, Evidence, proof
from europa_exp.runs.why.log_text import LogText

STATUS = "status.json"
SLURM = "Slurm"
MEMORY = "logs/host_memory.jsonl"
SRUN_OF_TASKS = re.compile(r"srun: error: .*task")
"""srun's word on tasks that ended badly."""

_MOST_JOB_LOGS = 3


# ------------------------------------------------------------------------------------------------- the run's own record


def recorded(case: Case) -> list[Evidence]:
    """The reason and the error of ``status.json``."""
    reason = case.status.extra.get("reason")
    lines = [reason] if isinstance(reason, str) else []
    lines += [case.error.headline] if case.error is not None else []
    return proof(STATUS, *dict.fromkeys(lines))


def history(attempts: Sequence[Mapping[str, Any]]) -> list[Evidence]:
    """How attempts ended, a line each."""
    lines = []
    for attempt in attempts[-MOST_LINES:]:
        step = "before its first step" if attempt.get("step") is None else f"at step {attempt['step']}"
        error = attempt.get("error")
        more = f": {ErrorRecord.of(error).headline}" if isinstance(error, dict) else ""
        how = attempt.get("reason") or "no end recorded"
        lines.append(f"attempt {attempt.get('n')}, job {attempt.get('job_id')}: {how} {step}{more}")
    return proof(STATUS, *lines)


def last_losses(case: Case) -> list[Evidence]:
    """Loss and gradient norm of the last logged steps."""
    try:
        rows = case.run.metrics()[-3:]
    except Exception:  # without them the error still tells the cause
        return []
    return proof(
        "metrics.jsonl",
        *(
            f"step {row.get('step')}: loss {row.get('loss/global_avg')}, grad_norm {row.get('grad_norm')}"
            for row in rows
        ),
    )


def least_memory(case: Case) -> list[Evidence]:
    """What the ranks found free at their start, the least first."""
    start = case.last.get("start")
    found = []
    for row in read_lines(case.run.path / MEMORY):
        if start is not None and row.get("start") not in (None, start):
            continue
        try:
            found.append((float(row["free"]) + float(row["reclaimable"]), row))
        except (ValueError, KeyError, TypeError):
            continue
    found.sort(key=lambda pair: pair[0])
    return proof(
        MEMORY,
        *(
            f"rank {row.get('rank')} on {row.get('node')}: {gib:.1f} GiB free or reclaimable in its socket at the start"
            for gib, row in found[:3]
        ),
    )


# -------------------------------------------------------------------------------------------------------------- ranks


def of_error(case: Case, rank: int, error: ErrorRecord) -> list[Evidence]:
    """Where the rank's log tells an error, with the frames before; without a log, the error record."""
    text = case.log(rank)
    wanted = error.first_line[:80].strip() or error.kind
    index = text.find(re.compile(re.escape(wanted))) if wanted else None
    if index is not None:
        return text.around(index, before=4, after=3)
    if (full := case.errors.get(rank)) is not None:
        trace = [line for line in full.traceback.splitlines() if line.strip()]
        return proof(error_file(rank), *(trace[-5:] or [error.headline]))
    return proof(STATUS, error.headline)


def error_file(rank: int) -> str:
    """What evidence calls the error record of a rank."""
    return f"logs/rank_{rank}.error.json"


def last_words(case: Case) -> list[Evidence]:
    """How the logs of the launcher and of rank 0 end."""
    return [*case.launcher_log().last(4), *case.log(0).last(4)]


# -------------------------------------------------------------------------------------------------------------- Slurm


def of_slurm(case: Case) -> list[Evidence]:
    """What Slurm says of the job, of its steps, and of the job before it was requeued."""
    job = case.slurm
    if job is None:
        return []
    code = "" if job.exit_code is None else f", exit code {job.exit_code}:{job.signal or 0}"
    steps = [s for s in job.steps if s.state not in ("COMPLETED", "RUNNING")]
    return proof(
        SLURM,
        f"job {job.job_id}: {job.text()}{code}{f' on {job.nodes}' if job.nodes else ''}",
        *(f"step {s.name}: {s.state}, exit code {s.exit_code}:{s.signal} on {s.nodes}" for s in steps[:4]),
        *(
            f"before: {e.state}{f' on {e.nodes}' if e.nodes else ''}, ended {e.ended_at}"
            for e in job.earlier[-3:]
        ),
    )


def in_jobs(case: Case, pattern: re.Pattern[str]) -> list[Evidence]:
    """Where the output of the job has such a line about the last attempt; one line a file, the last jobs' files first."""
    found: list[Evidence] = []
    for path in list(reversed(case.job_logs))[:MOST_LOGS]:
        text = LogText.end_of(path, case.run.path.parent)
        for index in range(len(text.lines) - 1, -1, -1):
            line = text.lines[index]
            # A requeued job goes on in the same file: what is above this line was about an earlier attempt.
            if "DUE TO JOB REQUEUE" in line and not pattern.search("DUE TO JOB REQUEUE"):
                break
            if pattern.search(line) and not _is_before(case, line):
                found += text.around(index)
                break
        if len(found) == _MOST_JOB_LOGS:
            break
    return found


def _is_before(case: Case, line: str) -> bool:
    """Whether Slurm wrote a line with a time (local, without a zone) before the last attempt began."""
    stamp = re.search(r"CANCELLED AT (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)", line)
    began = case.last.get("started_at")
    if stamp is None or not isinstance(began, str):
        return False
    try:
        return datetime.fromisoformat(stamp[1]).timestamp() < datetime.fromisoformat(began).timestamp() - 1
    except ValueError:
        return False
