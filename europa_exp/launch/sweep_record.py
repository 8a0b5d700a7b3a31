"""The record of what was handed to Slurm of a sweep, so that a submission that broke off can be completed.

A submission can break off at any point: Slurm refuses the second array, the connection is lost, somebody presses Ctrl-C.
``runs/.sweeps/<sweep>.json`` is written before Slurm is asked and after each answer, so the same call, typed again, goes on
where the first one stopped. What counts as handed over already is decided by the run folders and by Slurm itself (see
``slurm_runs``).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from europa_exp.runs.files import replace_text
from europa_exp.runs.folder import RunFolderError
from europa_exp.runs.slurm_record import is_job
from europa_exp.runs.status import now

if TYPE_CHECKING:
    from europa_exp.launch.points import Point

SWEEPS_FOLDER = ".sweeps"
"""Under the runs folder: one record a sweep."""

EXCLUDE_SUFFIX = ".exclude.json"
"""Beside the record of a sweep: the nodes that it must not get again (see ``slurm_exclude``)."""

_PATIENCE_S = 2.0


def place(runs_dir: Path, stem: str) -> Path:
    """Where the record of a sweep lies; for a single run ``stem`` is its name. Two names never share a file."""
    plain = re.sub(r"[^A-Za-z0-9._=,+@-]+", "_", stem)
    if plain != stem or plain.endswith(Path(EXCLUDE_SUFFIX).stem):
        plain += f"-{hashlib.sha256(stem.encode()).hexdigest()[:8]}"
    return runs_dir.absolute() / SWEEPS_FOLDER / f"{plain}.json"


@contextlib.contextmanager
def alone(runs_dir: Path, interrupted: Callable[[], bool]) -> Iterator[None]:
    """One submission at a time in a runs folder: two that look at the same moment would both find nothing submitted.

    Raises KeyboardInterrupt when ``interrupted()`` while waiting, RunFolderError when the folder can't be written.
    """
    folder = runs_dir.absolute() / SWEEPS_FOLDER
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / ".lock", "a")  # noqa: SIM115
    except OSError as error:
        rule = (
            f"launch.runs_dir={runs_dir}: {folder} can't be written ({error.strerror}); nothing was submitted"
        )
        raise RunFolderError(rule) from error
    with lock:
        told = time.monotonic() + _PATIENCE_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if interrupted():
                    raise KeyboardInterrupt from None
                if told and time.monotonic() > told:
                    print(f"waiting: another call submits to {runs_dir}", file=sys.stderr)
                    told = 0
                time.sleep(0.1)
            except OSError:
                break  # a network file system without locks
        yield


def call_key(points: Sequence[Point], fingerprints: Sequence[str | None]) -> str:
    """Equal for calls that ask for the same runs, whatever the state of the code (a broken call is often cured by an edit)."""
    asked = sorted(
        (p.identity, p.repeat, p.cfg.cluster.name, str(f)) for p, f in zip(points, fingerprints, strict=True)
    )
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]


# ---------------------------------------------------------------------------------------------------------- the record


@dataclass
class Record:
    """What was handed over of one sweep. ``runs`` maps the name of a run folder to its entry: ``job_id`` (null before Slurm
    took it) and ``folder``, the job's own. ``unfinished`` are the keys of calls that broke off."""

    path: Path
    sweep: str | None
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    unfinished: list[str] = field(default_factory=list)
    created_at: str = field(default_factory=now)

    def write(self) -> None:
        """Replace the file; a single run, which belongs to no sweep, has none. Raises OSError."""
        if self.sweep is None:
            return
        text = {
            "sweep": self.sweep,
            "created_at": self.created_at,
            "updated_at": now(),
            "unfinished": self.unfinished,
            "runs": self.runs,
        }
        replace_text(self.path, json.dumps(text, indent=1) + "\n")

    @classmethod
    def read(cls, path: Path, sweep: str | None = None) -> Record:
        """The record at ``path``; an empty one when there is none or it is broken."""
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            found = None
        if not isinstance(found, dict):
            return cls(path, sweep)
        runs, unfinished = found.get("runs"), found.get("unfinished")
        return cls(
            path,
            found.get("sweep", sweep),
            {str(k): v for k, v in runs.items() if isinstance(v, dict)} if isinstance(runs, dict) else {},
            [str(key) for key in unfinished] if isinstance(unfinished, list) else [],
            str(found.get("created_at", now())),
        )

    @classmethod
    def of(cls, runs_dir: Path, sweep: str) -> Record:
        """The record of a sweep; an empty one when there is none."""
        return cls.read(place(runs_dir, sweep), sweep)

    def job_of(self, name: str) -> str | None:
        """The job that a run was handed to; None before Slurm took it."""
        job = self.runs.get(name, {}).get("job_id")
        return job if isinstance(job, str) and is_job(job) else None


def unfinished(runs_dir: Path, key: str) -> Record | None:
    """The newest record of a sweep whose submission by an identical call broke off."""
    found: list[Record] = []
    for path in (runs_dir.absolute() / SWEEPS_FOLDER).glob("*.json"):
        if not path.name.endswith(EXCLUDE_SUFFIX) and _mentions(path, key):
            record = Record.read(path)
            if key in record.unfinished and record.sweep is not None:
                found.append(record)
    return max(found, key=lambda r: r.created_at, default=None)


def _mentions(path: Path, key: str) -> bool:
    """Told without parsing: records of large sweeps are long, and of most sweeps the submission did not break off."""
    try:
        return key.encode() in path.read_bytes()
    except OSError:
        return False
