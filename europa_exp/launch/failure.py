"""Which rank failed first, and why: when one rank dies, its peers fail too, and theirs is not the story to tell."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from europa_exp.launch.processes import signal_name
from europa_exp.runs.error_kinds import echo_of
from europa_exp.runs.folder import RunFolder

SHORT_LINES = 16
"""Lines of a traceback that go to the screen and into ``status.json``; all of it is in the rank's log."""


@dataclass(frozen=True)
class Failure:
    """One rank's end that is no success. ``at`` is in seconds since the epoch; ``traceback`` may be long."""

    rank: int
    type: str
    message: str
    traceback: str
    at: float

    @property
    def is_echo(self) -> bool:
        """Whether this looks like the consequence of another rank's end: a connection that broke, a wait that ran out."""
        return echo_of(self.type, self.message) is not None

    def record(self) -> dict[str, Any]:
        """The ``error`` of ``status.json``."""
        return {
            "rank": self.rank,
            "type": self.type,
            "message": self.message,
            "traceback": shorten(self.traceback),
        }


def first_cause(failures: Iterable[Failure]) -> Failure | None:
    """The earliest failure that is nobody's echo; among echoes alone, the earliest of them."""
    return min(failures, key=lambda f: (f.is_echo, f.at, f.rank), default=None)


def examine(run: RunFolder, rank: int, code: int, *, at: float | None = None) -> Failure | None:
    """What an exit code means for this rank; None for 0. ``at``: when it was seen, for ranks that left no record."""
    if code == 0:
        return None
    at = time.time() if at is None else at
    if code < 0:
        hint = {
            9: "somebody killed it, or the machine ran out of memory",
            15: "somebody or something ended it",
        }.get(-code, f"see {_log_name(rank)}")
        message = f"rank {rank} was killed by signal {-code} ({signal_name(-code)}); {hint}"
        # After a crash in native code the log ends with what faulthandler found.
        tail = "" if -code in (9, 15) else _tail(run.log(rank))
        return Failure(rank, "Killed", message, tail, at)
    record = error_record(run.error_file(rank))
    if record is not None:
        return Failure(
            rank,
            str(record.get("type", "Exception")),
            str(record.get("message", "")),
            str(record.get("traceback", "")),
            seconds(record.get("time"), at),
        )
    message = f"rank {rank} ended with exit code {code} and left no record; see {_log_name(rank)}"
    return Failure(rank, "Exited", message, _tail(run.log(rank)), at)


def shorten(text: str, lines: int = SHORT_LINES) -> str:
    """The end of a traceback, where the cause is."""
    kept = text.rstrip().splitlines()
    if len(kept) <= lines:
        return "\n".join(kept)
    return "\n".join([f"... ({len(kept) - lines} lines more in the log)", *kept[-lines:]])


def _log_name(rank: int) -> str:
    return f"logs/rank_{rank}.log"


def error_record(path: Path) -> dict[str, Any] | None:
    """What a failing rank left at ``path``; None where there is nothing to read."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def seconds(when: Any, otherwise: float) -> float:
    """A recorded time in seconds since the epoch, or ``otherwise``."""
    try:
        return datetime.fromisoformat(when).timestamp()
    except (TypeError, ValueError):
        return otherwise


def _tail(path: Path, size: int = 4096) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - size))
            return file.read().decode(errors="replace").strip()
    except OSError:
        return ""
