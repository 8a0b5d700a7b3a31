"""Why a run ended as it did: the cause, the rank and node, the lines that prove it, and what to do next.

The order of belief is that of the whole project: what the run recorded itself, then its logs, then Slurm. What can't be told
is said to be unknown, with the places to look; a guess is marked as one.

In the order of reading:

- ``explanation``: what is answered. ``case``: what is known, read once. ``log_text``: the end of a log, to search and quote.
- ``symptoms``: the words that prove a cause. ``evidence``: the lines that are shown. ``advice``: what to do next.
- The sources of belief: ``record`` (the run's own word) with ``rank_error`` (a rank that says why it failed), ``silent_end``
  (a rank that died without a word, exit codes) and ``collective`` (ranks that waited for others); ``slurm``.
- ``standing``: runs that did not fail. ``requeued``: what earlier attempts add. ``unknown``: when nobody knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from europa_exp.runs.folder import RunFolder
from europa_exp.runs.slurm_record import SlurmState
from europa_exp.runs.status import State
from europa_exp.runs.why import standing
from europa_exp.runs.why.case import gather
from europa_exp.runs.why.explanation import Cause, Evidence, Explanation
from europa_exp.runs.why.record import from_record
from europa_exp.runs.why.requeued import with_attempts
from europa_exp.runs.why.silent_end import from_exit_codes
from europa_exp.runs.why.slurm import from_slurm
from europa_exp.runs.why.unknown import unknown, unreadable

__all__ = ["Cause", "Evidence", "Explanation", "explain"]


def explain(
    run: RunFolder,
    *,
    state: str | None = None,
    slurm: SlurmState | None = None,
    job_logs: Sequence[Path] = (),
) -> Explanation:
    """Why the run stands where it stands.

    ``state`` is its state where somebody knows better than its own record (``lost``, or Slurm's failure of a job that could
    record nothing), ``slurm`` what Slurm says of its job, ``job_logs`` the output of that job.
    """
    case = gather(run, state, slurm, job_logs)
    if case.status.state is State.unknown:
        return unreadable(case)
    if case.state == "completed":
        return standing.completed(case)
    if case.state in standing.GOING_ON:
        return standing.going_on(case)
    if case.state == "cancelled":
        return standing.cancelled(case)
    return with_attempts(
        case, from_record(case) or from_slurm(case) or from_exit_codes(case) or unknown(case)
    )
