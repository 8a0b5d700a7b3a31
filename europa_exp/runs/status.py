"""The state of a run: ``status.json``, replaced atomically, readable whatever happened to it.

Two processes write it, the launcher and rank 0, so each change is a locked read-modify-write. A reader needs no lock:
it sees the old file or the new one, never half of one.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from europa_exp.runs.files import replace_text

STATUS_FILE = "status.json"


class State(StrEnum):
    """Where a run stands. ``unknown`` is only ever read, never written: the file is missing, cut or foreign."""

    created = "created"
    queued = "queued"
    running = "running"
    completed = "completed"
    failed = "failed"
    cancelled = "cancelled"
    unknown = "unknown"


ENDED = frozenset({State.completed, State.failed, State.cancelled})
"""States in which nothing more happens by itself."""


@dataclass(frozen=True)
class Status:
    """What ``status.json`` says.

    Times are ISO 8601 in UTC. ``error`` is ``{rank, type, message, traceback}`` or None, ``exit_codes`` maps the rank (as a
    string) to its exit code, ``pid`` and ``host`` name the process that drives the run. ``reason`` says why the state is
    ``unknown``. ``extra`` holds every other field that somebody recorded.
    """

    state: State
    created_at: str | None = None
    started_at: str | None = None
    ended_at: str | None = None
    error: dict[str, Any] | None = None
    exit_codes: dict[str, int] = field(default_factory=dict)
    pid: int | None = None
    host: str | None = None
    reason: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def ended(self) -> bool:
        """True when nothing more happens to the run by itself."""
        return self.state in ENDED

    @property
    def orphaned(self) -> bool:
        """True when the run claims to go on, but its process was on this machine and is gone (a ``kill -9``, a reboot)."""
        if self.state is not State.running or self.pid is None or self.host != socket.gethostname():
            return False
        started = self.extra.get("pid_started")
        return not _alive(self.pid, started if isinstance(started, str) else None)


def now() -> str:
    """The time as the record writes it: ISO 8601, UTC, milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def read_status(folder: Path) -> Status:
    """The status of the run in ``folder``; never raises: what can't be read has the state ``unknown`` and a reason."""
    try:
        record = json.loads((folder / STATUS_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Status(State.unknown, reason=f"{STATUS_FILE} is missing")
    except (OSError, ValueError) as error:
        return Status(State.unknown, reason=f"{STATUS_FILE} can't be read: {error}")
    return _from_record(record)


def write_status(
    folder: Path,
    state: State | str | None,
    *,
    only_from: Collection[State | str] | None = None,
    **fields: Any,
) -> bool:
    """Change the status of the run in ``folder``; False if the present state is not in ``only_from``.

    ``state=None`` keeps the state and records ``fields`` only. Entering ``running`` sets ``started_at`` (and clears what an
    earlier attempt left: ``ended_at``, ``error``, ``exit_codes``); entering an end state sets ``ended_at``. ``fields`` win
    over both. Raises OSError when the file can't be written; the old one is whole then.
    """
    if state is not None:
        state = State(state)
        if state is State.unknown:
            raise ValueError("unknown is what a reader says of a broken record; it is never written")
    with _locked(folder):
        record = _raw(folder)
        before = record.get("state")
        if only_from is not None and before not in {str(s) for s in only_from}:
            return False
        if state is not None:
            record["state"] = str(state)
            if state is State.running and before != State.running:
                record.update(started_at=now(), ended_at=None, error=None, exit_codes={})
            elif state in ENDED:
                record["ended_at"] = now()
        pid = fields.get("pid")
        if isinstance(pid, int):
            # Process ids are reused: the start time tells a later process with the same id from ours.
            fields.setdefault("host", socket.gethostname())
            fields.setdefault("pid_started", _started(pid))
        record.update(fields)
        replace_text(folder / STATUS_FILE, json.dumps(record, indent=2, default=str) + "\n")
    return True


def first_record(**fields: Any) -> dict[str, Any]:
    """The content of the ``status.json`` that a new run folder starts with."""
    record: dict[str, Any] = {
        "state": str(State.created),
        "created_at": now(),
        "started_at": None,
        "ended_at": None,
        "error": None,
        "exit_codes": {},
        "pid": None,
        "host": None,
    }
    return record | fields


def _raw(folder: Path) -> dict[str, Any]:
    try:
        record = json.loads((folder / STATUS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        # A broken record must not stop the run from recording what comes next.
        record = None
    return record if isinstance(record, dict) else {"note": "an earlier status.json could not be read"}


def _from_record(record: Any) -> Status:
    if not isinstance(record, dict):
        return Status(State.unknown, reason=f"{STATUS_FILE} holds no mapping")
    known = {"state", "created_at", "started_at", "ended_at", "error", "exit_codes", "pid", "host"}
    reason = None
    try:
        state = State(str(record.get("state")))
    except ValueError:
        state, reason = State.unknown, f"{STATUS_FILE} holds the unknown state {record.get('state')!r}"
    codes = record.get("exit_codes")
    error = record.get("error")
    return Status(
        state=state,
        created_at=_text(record.get("created_at")),
        started_at=_text(record.get("started_at")),
        ended_at=_text(record.get("ended_at")),
        error=error if isinstance(error, dict) else None,
        exit_codes={str(k): v for k, v in codes.items() if isinstance(v, int)}
        if isinstance(codes, dict)
        else {},
        pid=record["pid"] if isinstance(record.get("pid"), int) else None,
        host=_text(record.get("host")),
        reason=reason,
        extra={k: v for k, v in record.items() if k not in known},
    )


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of the run folder. The lock sits on the folder itself, so it leaves no file behind."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        # Some network file systems have no locks; the replace is atomic there all the same.
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _started(pid: int) -> str | None:
    """Start time of a process in clock ticks since boot (field 22 of /proc/PID/stat); None where there is no /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None


def _alive(pid: int, started: str | None) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return started is None or _started(pid) in (started, None)
