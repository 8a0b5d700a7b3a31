"""Causes that the run recorded itself: why its last attempt ended, its error, the error records of its ranks."""

from __future__ import annotations

from collections.abc import Callable

from europa_exp.runs import commands
from europa_exp.runs.attempts import Reason
from europa_exp.runs.error_kinds import BAD_CONFIGURATION, ECHOES, echo_of
from europa_exp.runs.status import State
from europa_exp.runs.why import evidence, slurm, symptoms
from europa_exp.runs.why.advice import next_steps
from europa_exp.runs.why.case import Case, ErrorRecord
from europa_exp.runs.why.collective import lost, timed_out
from europa_exp.runs.why.explanation import MOST_LINES, Cause, Explanation, in_one_line, proof
from europa_exp.runs.why.rank_error import named_by_error
from europa_exp.runs.why.requeued import too_many_starts
from europa_exp.runs.why.silent_end import ended_silently

_DONE_BY_SLURM: dict[str, Callable[[Case], Explanation]] = {
    Reason.time_limit: slurm.time_limit,
    Reason.node_failure: slurm.node_failure,
    Reason.preemption: slurm.preempted,
}

_OF_DRIVER = {"JobEnded", "StepEnded"}
"""What drives a run recorded only that the job is over."""

_OF_LAUNCHER = {"AgentKilled", "StartError", "ForkServerError"}
_SILENT = {"Killed", "Exited", "LostRank"}
_BY_KIND = {
    "NonFiniteLossError": Cause.non_finite_loss,
    "MemoryError": Cause.host_memory,
    **dict.fromkeys(BAD_CONFIGURATION, Cause.bad_configuration),
}
"""Exceptions that name a cause, whatever their words."""


def from_record(case: Case) -> Explanation | None:
    """The run's own word, if it left one."""
    if case.state != "lost":
        reason = str(case.last.get("reason"))
        if reason in _DONE_BY_SLURM:
            return _DONE_BY_SLURM[reason](case)
        if reason == Reason.memory_floor:
            return _memory_floor(case)
    error = case.error if case.status.state is State.failed else None
    if error is not None and error.kind == "StepEnded" and not case.attempts:
        return _no_start(case, error)
    if error is None or error.kind in _OF_DRIVER:
        error = _first_error(case)
    return _of_error(case, error) if error is not None else None


def _first_error(case: Case) -> ErrorRecord | None:
    """The error record that explains the others: the earliest that is nobody's echo."""

    def order(error: ErrorRecord) -> tuple[bool, str]:
        return echo_of(error.kind, error.message) is not None, error.time

    return min(case.errors.values(), key=order, default=None)


def _of_error(case: Case, error: ErrorRecord) -> Explanation | None:
    if error.kind in _OF_LAUNCHER:
        return _launcher(case, error)
    if error.kind == "TooManyAttemptsError":
        return too_many_starts(case, error)
    if error.kind == "MemoryFloorError":
        return _memory_floor(case)
    if error.kind in _SILENT or (error.rank is None and error.kind not in BAD_CONFIGURATION):
        return ended_silently(case, error)
    if (cause := _BY_KIND.get(error.kind)) is not None:
        return named_by_error(case, cause, error)
    symptom = _symptom(case, error)
    if symptom is None:
        return named_by_error(case, Cause.exception, error)
    if symptom.cause is Cause.collective_timeout:
        return timed_out(case, error.rank, error.message)
    if symptom.cause is Cause.lost_rank:
        return lost(case, error)
    return named_by_error(case, symptom.cause, error, sure=symptom.sure)


def _symptom(case: Case, error: ErrorRecord) -> symptoms.Symptom | None:
    """What the words of an error show; the words in its traceback explain only what may be an echo of another's end."""
    found = symptoms.first_in(error.said)
    if found is not None or error.kind not in ECHOES:
        return found
    full = case.errors.get(error.rank) if error.rank is not None else None
    found = symptoms.first_in("\n".join([error.traceback, full.traceback if full is not None else ""]))
    echo = echo_of(error.kind, error.message)
    return found or (symptoms.OF_ECHO[echo] if echo is not None else None)


def _memory_floor(case: Case) -> Explanation:
    found = {rank: error for rank, error in case.errors.items() if error.kind == "MemoryFloorError"}
    nodes = sorted({error.node for error in found.values() if error.node})
    lines = proof("logs/rank_*.error.json", *[error.first_line for error in found.values()][:4])
    return case.explained(
        Cause.memory_floor,
        "less host memory was free than cluster.memory_floor_gib"
        + (f" on {', '.join(nodes)}" if nodes else ""),
        [*(lines or evidence.recorded(case)), *evidence.least_memory(case)],
        next_steps(case, Cause.memory_floor),
        rank=next(iter(found), None),
    )


def _launcher(case: Case, error: ErrorRecord) -> Explanation:
    """The process that ran the ranks was killed, or could not start them."""
    killed = error.kind == "AgentKilled"
    what = "the process that ran it was killed" if killed else "its ranks could not be started"
    return case.explained(
        Cause.launcher,
        f"{what}: {in_one_line(error.message)}",
        [*proof(evidence.STATUS, error.message), *case.launcher_log().last(4)],
        [
            "If nobody killed it, the machine ran out of memory: `dmesg -T | grep -i 'killed process'`"
            if killed
            else commands.about(case.run, "logs", "--launcher")
        ],
    )


def _no_start(case: Case, error: ErrorRecord) -> Explanation:
    """A step of an allocation ended before its ranks began."""
    words = error.traceback.splitlines()[-MOST_LINES + 1 :]
    return case.explained(
        Cause.launcher,
        in_one_line(error.message),
        proof(evidence.STATUS, error.message, *words),
        [
            "If the allocation lacks what the run asks for, take another one; then run it again: "
            + commands.rerun(case.run)
        ],
    )
