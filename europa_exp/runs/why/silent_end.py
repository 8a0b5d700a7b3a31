"""A rank died and could not say why: its signal, what it printed before, and what Slurm and the kernel say."""

from __future__ import annotations

import json
import re
import signal
from dataclasses import dataclass, replace

from europa_exp.runs.why import evidence, symptoms
from europa_exp.runs.why.advice import next_steps, where_to_look
from europa_exp.runs.why.case import Case, ErrorRecord
from europa_exp.runs.why.collective import timed_out
from europa_exp.runs.why.explanation import MOST_LINES, Cause, Evidence, Explanation, bounded, proof
from europa_exp.runs.why.rank_error import named_by_error

_CRASHES = (signal.SIGSEGV, signal.SIGBUS)


@dataclass(frozen=True)
class _Death:
    """The end of a rank; of one that is not known, where ``rank`` is None."""

    case: Case
    rank: int | None
    signal: int | None
    message: str

    @property
    def who(self) -> str:
        return f"rank {self.rank}" if self.rank is not None else "a rank"

    @property
    def signal_name(self) -> str:
        try:
            return signal.Signals(self.signal).name if self.signal else ""
        except ValueError:
            return f"signal {self.signal}"


def from_exit_codes(case: Case) -> Explanation | None:
    """The first rank by number that did not end well, where exit codes are all that is recorded."""
    bad = {int(rank): code for rank, code in case.status.exit_codes.items() if code != 0 and rank.isdigit()}
    if not bad:
        return None
    rank = min(bad)
    message = f"rank {rank} ended with exit code {bad[rank]}"
    return ended_silently(case, ErrorRecord("Exited", message, rank=rank))


def ended_silently(case: Case, error: ErrorRecord) -> Explanation | None:
    """What is known of an end that ``error`` only states; None where not even the rank is known."""
    rank = error.rank
    if rank is None and error.kind == "LostRank" and len(silent := case.silent_ranks()) == 1:
        rank = silent[0]
    death = _Death(case, rank, _signal_of(case, rank, error.message), error.message)
    if (found := _said_in_log(death) or _killed_for_memory(death)) is not None:
        return found
    lines = _last_lines(death)
    if death.signal in _CRASHES:
        return _crashed(death, lines)
    if death.signal:
        return _killed(death, lines)
    if rank is not None or error.kind == "Exited":
        return _just_ended(death, lines)
    return None


def _signal_of(case: Case, rank: int | None, message: str) -> int | None:
    """The signal that ended a rank: from its message, or its exit code (negative, or 128 more, as a shell says it)."""
    if found := symptoms.SIGNAL.search(message):
        return int(found[1])
    code = case.status.exit_codes.get(str(rank)) if rank is not None else None
    if code is not None and code < 0:
        return -code
    return code - 128 if code is not None and 128 < code < 128 + 65 else None


def _said_in_log(death: _Death) -> Explanation | None:
    """A symptom in the log of the rank, of a kind that could have ended it in this way."""
    if death.rank is None:
        return None
    text = death.case.log(death.rank)
    for symptom in symptoms.IN_RANKS:
        if death.signal in (None, signal.SIGABRT):
            fits = symptom.cause is not Cause.lost_rank
        else:
            fits = symptom.cause in (Cause.host_memory, Cause.device_memory)
        index = text.find(symptom.pattern) if fits else None
        if index is None:
            continue
        line = text.lines[index].strip()
        if symptom.cause is Cause.collective_timeout:
            return timed_out(death.case, death.rank, line)
        error = ErrorRecord("", line, rank=death.rank)
        found = named_by_error(death.case, symptom.cause, error, sure=symptom.sure)
        return replace(found, evidence=bounded(text.around(index, before=2, after=2)))
    return None


def _killed_for_memory(death: _Death) -> Explanation | None:
    """Slurm or the kernel killed processes for lack of host memory, and this end looks like that."""
    if death.signal not in (None, signal.SIGKILL, *_CRASHES):
        return None
    case, job = death.case, death.case.slurm
    lines = evidence.in_jobs(case, symptoms.OOM_KILL)
    if job is not None and "OUT_OF_MEMORY" in (job.state, *(step.state for step in job.steps)):
        lines += evidence.of_slurm(case)
    if not lines:
        return None
    name = f" ({death.signal_name})" if death.signal else ""
    return case.explained(
        Cause.host_memory,
        f"the host's memory ran out: {death.who} was killed{name}",
        [*lines, *proof(evidence.STATUS, death.message)],
        next_steps(case, Cause.host_memory, death.rank),
        rank=death.rank,
    )


def _last_lines(death: _Death) -> list[Evidence]:
    """What is recorded of the end, how the rank's log ends (or the stack of its crash), and srun's word on it."""
    lines = proof(evidence.STATUS, death.message)
    if death.rank is not None:
        text = death.case.log(death.rank)
        crash = text.find(symptoms.CRASH)
        lines += text.last() if crash is None else text.around(crash, after=MOST_LINES - 1)
    return lines + evidence.in_jobs(death.case, evidence.SRUN_OF_TASKS)


def _crashed(death: _Death, lines: list[Evidence]) -> Explanation:
    case = death.case
    lines = [*lines, *evidence.least_memory(case)]
    if _is_arm(case):
        return case.explained(
            Cause.host_memory,
            f"{death.who} crashed with {death.signal_name}; on a Grace that is how a lack of host memory shows",
            lines,
            next_steps(case, Cause.host_memory, death.rank),
            rank=death.rank,
            sure=False,
        )
    return case.explained(
        Cause.killed,
        f"{death.who} crashed in native code ({death.signal_name})",
        lines,
        [
            "The stack in the rank's log shows where; a crash that comes at one step again is a bug, one that moves is often "
            "memory or a node"
        ],
        rank=death.rank,
    )


def _is_arm(case: Case) -> bool:
    runtime = case.run.runtime()
    machine = json.dumps([runtime.get("device_name"), runtime.get("platform")])
    cluster = str(case.run.provenance().get("cluster"))
    return bool(
        re.search(r"aarch64|arm64|grace|GH200", machine, re.IGNORECASE)
        or re.search(r"jupiter", cluster, re.IGNORECASE)
    )


def _killed(death: _Death, lines: list[Evidence]) -> Explanation:
    by = (
        "; somebody killed it, or the kernel did for lack of memory" if death.signal == signal.SIGKILL else ""
    )
    return death.case.explained(
        Cause.killed,
        f"{death.who} was killed by signal {death.signal} ({death.signal_name}){by}",
        lines,
        [
            "`dmesg -T | grep -i 'killed process'` on the node tells whether the kernel did it",
            *where_to_look(death.case, death.rank),
        ],
        rank=death.rank,
    )


def _just_ended(death: _Death, lines: list[Evidence]) -> Explanation:
    code = death.case.status.exit_codes.get(str(death.rank))
    how = f" with exit code {code}" if code is not None else ""
    return death.case.explained(
        Cause.unknown,
        f"{death.who} ended{how} and left no word of why",
        lines,
        where_to_look(death.case, death.rank),
        rank=death.rank,
        sure=False,
    )
