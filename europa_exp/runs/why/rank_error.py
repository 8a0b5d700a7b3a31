"""A cause that the error of one rank names."""

from __future__ import annotations

from europa_exp.runs.why import evidence
from europa_exp.runs.why.advice import next_steps
from europa_exp.runs.why.case import Case, ErrorRecord
from europa_exp.runs.why.explanation import IN_WORDS, Cause, Explanation, in_one_line, proof


def named_by_error(case: Case, cause: Cause, error: ErrorRecord, *, sure: bool = True) -> Explanation:
    """``cause`` as ``error`` tells it, with what the rank's log says around."""
    what = in_one_line(error.said)
    if error.rank is not None:
        lines = evidence.of_error(case, error.rank, error)
    else:
        lines = proof(evidence.STATUS, what, *error.traceback.splitlines()[-4:])
    if cause is Cause.non_finite_loss:
        lines += evidence.last_losses(case)
    return case.explained(
        cause,
        f"{IN_WORDS[cause]}: {what}" if what else IN_WORDS[cause],
        lines,
        next_steps(case, cause, error.rank),
        rank=error.rank,
        sure=sure,
    )
