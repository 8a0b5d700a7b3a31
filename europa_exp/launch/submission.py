"""The record of what was handed to Slurm, and what of it is still alive.

A submission can break off at any point: Slurm refuses the second array, the connection is lost, somebody presses Ctrl-C.
``runs/.sweeps/<sweep>.json`` is written before Slurm is asked and after each answer, so the same call, typed again, goes on
where the first one stopped. What counts as handed over already is decided by the run folders and by Slurm itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from europa_exp.config.schema import Executor
from europa_exp.launch import job_folder, squeue
from europa_exp.runs.files import replace_text
from europa_exp.runs.folder import PROVENANCE_FILE, RunFolder, RunFolderError
from europa_exp.runs.skip import is_of
from europa_exp.runs.status import State, Status, now

if TYPE_CHECKING:
    from europa_exp.launch.points import Point

SWEEPS_FOLDER = ".sweeps"
"""Under the runs folder: one record a sweep."""

EXCLUDE_SUFFIX = ".exclude.json"
"""Beside the record of a sweep: the nodes that it must not get again (see ``slurm_exclude``)."""

OPEN = (State.created, State.queued, State.running)
"""States of a run that is not over, if somebody still works on it."""

JOB_IDS = "job_ids"
"""Field of ``status.json``: the Slurm jobs that are to run this folder. ``job_id`` is the first, or the one that ran last; the
others wait to continue it where Slurm may not start a job again."""

_PATIENCE_S = 2.0


def place(runs_dir: Path, stem: str) -> Path:
    """Where the record of a sweep lies; for a single run ``stem`` is its name."""
    return runs_dir.absolute() / SWEEPS_FOLDER / f"{re.sub(r'[^A-Za-z0-9._=,+@-]+', '_', stem)}.json"


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


def unfinished(runs_dir: Path, key: str) -> Record | None:
    """The newest record of a sweep whose submission by an identical call broke off."""
    found: list[Record] = []
    for path in (runs_dir.absolute() / SWEEPS_FOLDER).glob("*.json"):
        if not path.name.endswith(EXCLUDE_SUFFIX) and key.encode() in _bytes(path):
            record = Record.read(path)
            if key in record.unfinished and record.sweep is not None:
                found.append(record)
    return max(found, key=lambda r: r.created_at, default=None)


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


# ------------------------------------------------------------------------------------------------------ what is alive


class Life(Enum):
    live = "live"
    """Slurm has a job for it that is not over."""
    dead = "dead"
    """It claims to be open, and no job is left."""
    unclear = "unclear"
    """Slurm did not answer."""


@dataclass(frozen=True)
class OpenRun:
    """A run folder on Slurm whose record says that it is not over."""

    run: RunFolder
    status: Status
    key: tuple[str, str | None, str]
    """Identity, data fingerprint, cluster."""
    sweep: str | None
    code: str | None
    jobs: tuple[str, ...]
    life: Life
    word: str
    """What Slurm says of the job, for people."""

    @property
    def job(self) -> str:
        return self.jobs[-1] if self.jobs else "no job"


def key_of(point: Point, fingerprint: str | None) -> tuple[str, str | None, str]:
    """What a run must have in common with a point to be that point."""
    return (point.identity, fingerprint, point.cfg.cluster.name)


def open_runs(runs_dir: Path, keys: set[tuple[str, str | None, str]]) -> list[OpenRun]:
    """The runs of these keys that are not over by their own record, the oldest first, each held against Slurm."""
    found: list[tuple[RunFolder, Status, dict[str, Any]]] = []
    identities = {identity.encode() for identity, _, _ in keys}
    try:
        with os.scandir(runs_dir) as entries:
            paths = [Path(entry.path) for entry in entries if not entry.name.startswith(".")]
    except OSError:
        return []
    for path in paths:
        if not is_of(_bytes(path / PROVENANCE_FILE), identities):
            continue
        run = RunFolder(path)
        origin = run.provenance()
        key = (origin.get("identity"), origin.get("data_fingerprint"), origin.get("cluster"))
        if key in keys and (status := run.status()).state in OPEN and _on_slurm(run, status):
            found.append((run, status, origin))
    jobs = {run.name: tuple(jobs_of(run, status)) for run, status, _ in found}
    answer = squeue.ask(job for ids in jobs.values() for job in ids)
    out = []
    for run, status, origin in sorted(found, key=lambda f: (str(f[2].get("created_at")), f[0].name)):
        life, word = _life(jobs[run.name], answer)
        code = origin.get("code")
        out.append(
            OpenRun(
                run=run,
                status=status,
                key=(str(origin["identity"]), origin.get("data_fingerprint"), str(origin.get("cluster"))),
                sweep=origin.get("sweep"),
                code=code.get("fingerprint") if isinstance(code, dict) else None,
                jobs=jobs[run.name],
                life=life,
                word=word,
            )
        )
    return out


def _on_slurm(run: RunFolder, status: Status) -> bool:
    if "job_id" in status.extra:
        return True
    try:
        return run.config().cluster.executor is Executor.slurm
    except Exception:
        return False  # whatever lies there, it is not ours to submit again


def _life(ids: Sequence[str], answer: squeue.Answer) -> tuple[Life, str]:
    known = [answer.jobs[i] for i in ids if i in answer.jobs]
    if going_on := [state for state in known if not state.ended]:
        return Life.live, going_on[-1].text()
    if not ids:
        return Life.dead, "it was never submitted"
    if len(known) < len(ids) and not answer.known:
        return Life.unclear, "; ".join(answer.silent)
    return Life.dead, known[-1].text() if known else "Slurm knows it no more"


def living_jobs(runs_dir: Path, names: Iterable[str]) -> list[str]:
    """The Slurm jobs of those of these runs that are not over; a job counts as living unless Slurm says otherwise."""
    found = ((run := RunFolder(runs_dir / name), run.status()) for name in names)
    ids = [job for run, status in found if status.state in OPEN for job in jobs_of(run, status)]
    known = squeue.ask(ids).jobs
    return [job for job in ids if job not in known or not known[job].ended]


def jobs_of(run: RunFolder, status: Status) -> list[str]:
    """The Slurm jobs of a run: from its status, else (the submitting process died) from what submitit left."""
    several = status.extra.get(JOB_IDS)
    ids = [str(i) for i in several] if isinstance(several, list) else []
    single = status.extra.get("job_id")
    if isinstance(single, str) and single not in ids:
        ids.append(single)
    if not ids and isinstance(folder := status.extra.get("job_folder"), str):
        task = status.extra.get("job_task")
        ids = job_folder.job_ids(Path(folder), task if isinstance(task, int) else 0)
    return ids
