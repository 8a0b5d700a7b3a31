"""Collectives that timed out and connections that broke: who waited, and who did not come."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from europa_exp.runs.error_kinds import Echo, echo_of
from europa_exp.runs.log_files import ranks, spans
from europa_exp.runs.why import evidence, symptoms
from europa_exp.runs.why.advice import after_a_timeout, where_to_look
from europa_exp.runs.why.case import MOST_LOGS, Case, ErrorRecord
from europa_exp.runs.why.explanation import Cause, Evidence, Explanation, proof
from europa_exp.runs.why.slurm import from_slurm

_MOST_WITNESSES = 3
_MOST_MISSING = 2


@dataclass
class _Testimony:
    """What the ranks say, all of them together.

    ``waited`` are the ranks that ran out of patience, ``named`` those that PyTorch calls late. ``enqueued`` maps a process group
    to its ranks, and those to the number of the last collective that they began in it. ``joined`` tells how many of how many
    ranks came to the first meeting. ``unread`` are ranks that said something which nobody read: there are too many.
    """

    waited: list[int] = field(default_factory=list)
    named: set[int] = field(default_factory=set)
    enqueued: dict[str, dict[int, int]] = field(default_factory=dict)
    collective: str = ""
    joined: tuple[int, int] | None = None
    evidence: list[Evidence] = field(default_factory=list)
    unread: frozenset[int] = frozenset()


def timed_out(case: Case, rank: int | None, message: str) -> Explanation:
    """A collective timed out. ``rank`` is one that says so, in the words of ``message``."""
    heard = _hear(case)
    lines = heard.evidence or proof(evidence.STATUS, message)
    behind, sure = _behind(case, heard)
    for absent in behind[:_MOST_MISSING]:
        lines += case.log(absent).last(4)
    return case.explained(
        Cause.collective_timeout,
        _title(heard, behind, message),
        lines,
        after_a_timeout(case, behind),
        rank=behind[0] if behind else rank,
        sure=sure or not behind,
        behind=behind,
    )


def _hear(case: Case) -> _Testimony:
    """Read what the ranks wrote, in their logs and their error records."""
    present = sorted({*ranks(case.run), *case.errors})
    heard = _Testimony(unread=frozenset(present[MOST_LOGS:]))
    for rank in present[:MOST_LOGS]:
        text = case.log(rank)
        error = case.errors.get(rank)
        said = "\n".join([*text.lines, *([error.message] if error is not None else [])])
        if found := symptoms.search_lines(symptoms.TIMED_OUT.pattern, said):
            heard.waited.append(rank)
            if len(heard.evidence) < _MOST_WITNESSES:
                # The line that names the rank says more than the one below it that repeats how long was waited.
                index = text.find(symptoms.LATE_IN_BARRIER)
                index = text.find(symptoms.TIMED_OUT.pattern) if index is None else index
                heard.evidence += (
                    text.around(index, after=1)
                    if index is not None
                    else proof(evidence.error_file(rank), found.string)
                )
        heard.named |= {int(number) for number in symptoms.LATE_IN_BARRIER.findall(said)}
        for group in symptoms.LAGGING.findall(said):
            heard.named |= {int(number) for number in re.findall(r"\d+", group)}
        for group, number in symptoms.ENQUEUED.findall(said):
            heard.enqueued.setdefault(group, {})[rank] = int(number)
        if found := symptoms.COLLECTIVE.search(said):
            heard.collective = found[2].lower().replace("_", "-").strip("-")
        if found := symptoms.JOINED.search(said):
            heard.joined = (int(found[1]), int(found[2]))
    return heard


def _behind(case: Case, heard: _Testimony) -> tuple[list[int], bool]:
    """The ranks that did not arrive, and whether that is certain: named by PyTorch, behind in their count of collectives, or
    the only ones that did not complain."""
    if heard.named:
        return sorted(heard.named), True
    # Each group counts its own collectives.
    groups = heard.enqueued.values()
    if late := {rank for group in groups for rank, n in group.items() if n < max(group.values())}:
        return sorted(late), True
    if case.world is None or not heard.waited:
        return [], False
    excused = {*heard.waited, *heard.unread}
    absent = [rank for rank in range(case.world) if rank not in excused]
    # Ranks that met the end of the others (a closed connection) were there in time, perhaps in another collective.
    away = [rank for rank in absent if not _met_the_end_of_others(case.errors.get(rank))]
    return away or absent, len(away) == 1 and not heard.unread


def _met_the_end_of_others(error: ErrorRecord | None) -> bool:
    return error is not None and echo_of(error.kind, error.message) is Echo.broken


def _title(heard: _Testimony, behind: list[int], message: str) -> str:
    what = f"a collective ({heard.collective})" if heard.collective else "a collective"
    if heard.joined is not None or re.search(r"trying to connect", message):
        what = "the first meeting of the ranks"
    title = f"{what} timed out"
    if behind:
        title += f": {_ranks(behind)} did not arrive"
        if heard.waited:
            title += f", {_ranks(heard.waited)} waited"
    elif heard.joined is not None:
        title += f": {heard.joined[0]} of {heard.joined[1]} ranks came"
    return title


def lost(case: Case, error: ErrorRecord) -> Explanation:
    """Connections broke, and nobody recorded why: look for the rank that left nothing, and what Slurm says."""
    by_slurm = from_slurm(case)
    if by_slurm is not None and by_slurm.cause not in (Cause.unknown, Cause.killed):
        return by_slurm
    silent = case.silent_ranks()
    lines = evidence.of_error(case, error.rank, error) if error.rank is not None else []
    lines += evidence.in_jobs(case, evidence.SRUN_OF_TASKS)
    for rank in silent[:_MOST_MISSING]:
        lines += case.log(rank).last(4)
    first = silent[0] if silent else error.rank
    return case.explained(
        Cause.lost_rank,
        f"the connection to {_ranks(silent) if silent else 'another rank'} broke, and "
        f"{'they' if len(silent) > 1 else 'it'} left no word of why",
        lines,
        where_to_look(case, first),
        rank=first,
        sure=len(silent) == 1,
    )


def _ranks(numbers: list[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {spans(numbers)}"
