"""The answer of ``europa why``: a cause, the rank and node, the lines that prove it, and what to do next."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

MOST_LINES = 8
"""Most lines of evidence from one place."""

MOST_PLACES = 6
"""Most places that evidence is shown from."""

_LONGEST_LINE = 400


class Cause(StrEnum):
    """Why a run stands where it stands."""

    completed = "completed"
    going_on = "going_on"
    cancelled = "cancelled"
    device_memory = "device_memory"
    host_memory = "host_memory"
    collective_timeout = "collective_timeout"
    lost_rank = "lost_rank"
    node_failure = "node_failure"
    time_limit = "time_limit"
    preempted = "preempted"
    bad_configuration = "bad_configuration"
    non_finite_loss = "non_finite_loss"
    exception = "exception"
    killed = "killed"
    disk_full = "disk_full"
    memory_floor = "memory_floor"
    too_many_attempts = "too_many_attempts"
    not_started = "not_started"
    launcher = "launcher"
    unknown = "unknown"


IN_WORDS = {
    Cause.device_memory: "the accelerator's memory ran out",
    Cause.host_memory: "the host's memory ran out",
    Cause.disk_full: "the disk is full, or a quota is used up",
    Cause.non_finite_loss: "the loss is not finite",
    Cause.bad_configuration: "what was asked for can't be run",
    Cause.exception: "a Python exception",
    Cause.killed: "a rank was killed by a signal",
}
"""How a title begins where one line of a rank or of Slurm names the cause; that line follows."""


@dataclass(frozen=True)
class Evidence:
    """Lines from one place: ``logs/rank_3.log:120``, or ``Slurm`` or ``status.json``."""

    place: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Explanation:
    """Why a run stands where it stands. ``title`` is one line for people; ``sure`` is False for a guess.

    ``behind`` are the ranks that did not arrive at a collective, where that is known.
    """

    cause: Cause
    title: str
    sure: bool = True
    rank: int | None = None
    node: str | None = None
    evidence: tuple[Evidence, ...] = ()
    advice: tuple[str, ...] = ()
    behind: tuple[int, ...] = ()


def proof(place: str, *texts: str) -> list[Evidence]:
    """Evidence of the lines of ``texts`` that say something; none if there is no such line."""
    said = tuple(shorten(line) for text in texts for line in text.splitlines() if line.strip())
    return [Evidence(place, said)] if said else []


def shorten(line: str) -> str:
    """A line as it is shown: long ones end in dots."""
    line = line.rstrip()
    return line if len(line) <= _LONGEST_LINE else line[: _LONGEST_LINE - 3] + "..."


def in_one_line(text: str) -> str:
    """The first line; with the next one, where the first only announces it."""
    lines = [line.strip() for line in text.strip().split("\n") if line.strip()]
    return shorten(" ".join(lines[:2]) if lines and lines[0].endswith(":") else "".join(lines[:1]))


def bounded(evidence: Iterable[Evidence]) -> tuple[Evidence, ...]:
    """Each place once, and not more than fits on a screen."""
    once = dict.fromkeys(evidence)
    return tuple(replace(entry, lines=entry.lines[:MOST_LINES]) for entry in once)[:MOST_PLACES]
