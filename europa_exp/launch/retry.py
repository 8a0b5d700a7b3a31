"""What may be tried again after an attempt ended, and what may not.

Again: the time limit, a failed node, preemption, a requeue by hand or after a prolog, a floor of host memory, a segmentation
fault (which is how a Grace runs out of host memory), a rank that vanished without a record (which is how a failed node shows
first), a collective that timed out. Never: a Python exception, a loss that is not finite, a bad configuration, a cancellation, a
rank that somebody killed. Not for ever: ``max_attempts`` bounds it, two attempts that end at the same step with the same error
end the run, and so does a time limit before which nothing was saved.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from europa_exp.runs.attempts import Reason
from europa_exp.runs.error_kinds import BAD_CONFIGURATION, Echo, echo_of

AGAIN = frozenset(
    {
        Reason.time_limit,
        Reason.node_failure,
        Reason.preemption,
        Reason.requeued,
        Reason.asked,
        Reason.memory_floor,
        Reason.segmentation_fault,
        Reason.lost_rank,
        Reason.collective_timeout,
    }
)
"""Reasons after which a run is started again."""

_FROM_OUTSIDE = frozenset({Reason.node_failure, Reason.preemption, Reason.requeued, Reason.asked})
# They come whatever the run does, so twice at the same step proves nothing. (A memory floor is met before any step.)
_NO_PROOF = _FROM_OUTSIDE | {Reason.memory_floor}

_OF_ECHO = {Echo.timed_out: Reason.collective_timeout, Echo.broken: Reason.lost_rank}
_WATCHDOG = re.compile(
    r"watchdog.*(timeout|timed out)|collective operation timeout", re.IGNORECASE | re.DOTALL
)


@dataclass(frozen=True)
class Gain:
    """What an attempt leaves to the next one.

    ``saved``: a checkpoint newer than what it began from, the step ``began_from`` (None: from nothing). ``every`` is
    ``training.checkpoint_every``, ``margin_s`` is ``cluster.signal_margin_s``. ``whole_limit``: it had the time limit of the job
    to itself, which one that came after other runs of the job (``launch.points_per_job``), or in an allocation, had not.
    """

    saved: bool
    began_from: int | None
    every: int
    margin_s: int
    whole_limit: bool


@dataclass(frozen=True)
class Requeue:
    """Start again. ``why`` is one line for people, which does not repeat the reason of the end."""

    why: str


@dataclass(frozen=True)
class Stop:
    """Don't start again. ``why`` is one line for people, which does not repeat the reason of the end."""

    why: str


def decide(
    attempts: Sequence[Mapping[str, Any]],
    reason: Reason | str,
    error: Mapping[str, Any] | None,
    *,
    max_attempts: int,
    gain: Gain,
) -> Requeue | Stop:
    """Whether the run starts again.

    ``attempts`` are those of ``status.json`` (see ``runs.attempts``); the last one is the one that ended, with its ``step``.
    ``error`` is ``{rank, type, message}`` of what ended it, or None.
    """
    reason = Reason(reason)
    if reason not in AGAIN:
        return Stop("it is not tried again")
    if reason is Reason.time_limit and gain.whole_limit and not gain.saved:
        return Stop(_in_vain(gain))
    if len(attempts) >= max_attempts:
        return Stop(f"this was attempt {len(attempts)} of {max_attempts} (cluster.max_attempts)")
    if attempts and reason not in _NO_PROOF:
        last = dict(attempts[-1]) | {"reason": str(reason), "error": error}
        twin = next((a for a in attempts[:-1] if _mark(a) == _mark(last)), None)
        if twin is not None:
            where = "before its first step" if last.get("step") is None else f"at step {last['step']}"
            return Stop(f"{where} again, with the same error as attempt {twin.get('n')}")
    return Requeue(f"attempt {len(attempts) + 1} of {max_attempts} follows")


def _in_vain(gain: Gain) -> str:
    """Why another attempt would meet the time limit as this one did, and the way out.

    Also where the run keeps checkpoints and had none yet. The next attempt begins at the same step and has the same time; what
    came before the first checkpoint this time (a slow start, long steps, a save that outlasts the margin) comes before it again,
    but for luck. That luck would be bought with the most that an attempt can cost: the whole limit on all nodes. A start that
    hangs for a reason of the machine ends earlier, in a collective's own time-out, and that is tried again.
    """
    if not gain.every:
        return (
            "training.checkpoint_every=0: it would begin again and end again; set training.checkpoint_every, training.steps or "
            "cluster.time_limit"
        )
    since = "" if gain.began_from is None else f" since step {gain.began_from}, where it began"
    return (
        f"no checkpoint was saved{since}: it would begin at the same step and end again; raise cluster.time_limit or "
        f"cluster.signal_margin_s={gain.margin_s}, or lower training.checkpoint_every={gain.every}"
    )


def classify(error: Mapping[str, Any] | None) -> Reason:
    """What kind of end an ``error`` (``{rank, type, message, traceback}``) is."""
    if error is None:
        return Reason.lost_rank
    kind, message = str(error.get("type", "")), str(error.get("message", ""))
    if kind == "MemoryFloorError":
        return Reason.memory_floor
    if kind == "NonFiniteLossError":
        return Reason.non_finite_loss
    if kind in BAD_CONFIGURATION:
        return Reason.bad_configuration
    if kind == "Killed":
        if re.search(r"\((SIGSEGV|SIGBUS)\)", message):
            return Reason.segmentation_fault
        if "(SIGABRT)" in message:
            # NCCL's watchdog ends a rank this way when a collective does not; so does C++ code that gives up.
            text = str(error.get("traceback", ""))
            return Reason.collective_timeout if _WATCHDOG.search(text) else Reason.killed
        return Reason.killed
    echo = echo_of(kind, message)
    return _OF_ECHO[echo] if echo is not None else Reason.exception


def _mark(attempt: Mapping[str, Any]) -> tuple[Any, ...]:
    """What two ends must share to be the same: the step, the reason, and the error without its changing numbers."""
    error = attempt.get("error") or {}
    message = re.sub(r"0x[0-9a-f]+|\d+(\.\d+)*", "#", str(error.get("message", "")).partition("\n")[0])
    return attempt.get("step"), attempt.get("reason"), error.get("type"), message
