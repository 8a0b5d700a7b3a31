"""Runs that were tried several times: the cause of the last end is not all that there is to say."""

from __future__ import annotations

import re
from dataclasses import replace

from europa_exp.runs.why import evidence
from europa_exp.runs.why.case import Case, ErrorRecord
from europa_exp.runs.why.explanation import MOST_PLACES, Cause, Explanation, bounded, in_one_line, proof


def too_many_starts(case: Case, error: ErrorRecord) -> Explanation:
    """Slurm started the job more often than ``cluster.max_attempts`` allows."""
    return case.explained(
        Cause.too_many_attempts,
        f"it was started too often: {in_one_line(error.message)}",
        [*evidence.history(case.attempts), *proof(evidence.STATUS, error.message)],
        ["Look at how the earlier attempts ended, and raise cluster.max_attempts if that was bad luck"],
    )


def with_attempts(case: Case, last: Explanation) -> Explanation:
    """``last``, the explanation of the last attempt, and what the attempts before it add."""
    if case.state != "failed" or len(case.attempts) < 2 or last.cause is Cause.too_many_attempts:
        return last
    history = evidence.history(case.attempts)
    reason = str(case.status.extra.get("reason") or "")
    limit = re.search(r"this was attempt (\d+) of (\d+)", reason)
    twice = re.search(r"again, with the same error as attempt \d+", reason)
    if twice:
        how = "it ended twice in the same way"
        advice = "The same end at the same step is no bad luck: cure the cause, then run it again"
    elif limit and int(limit[2]) > 1:
        how = f"it had its {limit[2]} attempts"
        advice = "cluster.max_attempts bounds how often it is tried"
    else:
        return replace(last, evidence=bounded([*last.evidence[: MOST_PLACES - 1], *history]))
    return replace(
        last,
        cause=Cause.too_many_attempts,
        title=f"requeued too often: {how}; the last time {last.title}",
        evidence=bounded([*history, *last.evidence]),
        advice=(advice, *last.advice),
    )
