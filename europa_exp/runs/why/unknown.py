"""What is said when nobody tells the cause: what is known, and where to look."""

from __future__ import annotations

from europa_exp.runs.why import evidence
from europa_exp.runs.why.advice import where_to_look
from europa_exp.runs.why.case import Case
from europa_exp.runs.why.explanation import Cause, Explanation


def unknown(case: Case) -> Explanation:
    """Neither the run nor Slurm says how it ended."""
    status, title = case.status, "why it ended is not known"
    if case.state == "lost" and case.slurm is not None and case.slurm.state == "COMPLETED":
        title = f"job {case.slurm.job_id} ended as a success, but the run recorded no end"
    elif case.state == "lost" and case.slurm is None:
        if status.pid is not None:
            title = f"process {status.pid} on {status.host}, which ran it, is gone without a word"
        elif job := status.extra.get("job_id"):
            title = f"job {job} is gone, and neither the run nor Slurm says how it ended"
        else:
            return _not_started(case)
    return case.explained(
        Cause.unknown,
        title,
        [*evidence.recorded(case), *evidence.of_slurm(case), *evidence.last_words(case)],
        where_to_look(case),
        sure=False,
    )


def _not_started(case: Case) -> Explanation:
    return case.explained(
        Cause.not_started,
        "it was never started: the call that made it broke off",
        evidence.recorded(case),
        ["Type the same call again; it completes what is missing and doubles nothing"],
    )


def unreadable(case: Case) -> Explanation:
    """``status.json`` can't be read."""
    return case.explained(
        Cause.unknown,
        f"its record can't be read: {case.status.reason}",
        evidence.last_words(case),
        where_to_look(case),
        sure=False,
    )
