"""Runs on Slurm: which of them are not over by their own record, what jobs they have, and which of those are alive."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from europa_exp.config.schema import Executor
from europa_exp.launch import job_folder, squeue
from europa_exp.launch.sweep_record import Record
from europa_exp.runs.folder import PROVENANCE_FILE, RunFolder
from europa_exp.runs.skip import is_of
from europa_exp.runs.slurm_record import is_job
from europa_exp.runs.status import State, Status

if TYPE_CHECKING:
    from europa_exp.launch.points import Point

OPEN = (State.created, State.queued, State.running)
"""States of a run that is not over, if somebody still works on it."""

JOB_IDS = "job_ids"
"""Field of ``status.json``: the Slurm jobs that are to run this folder. ``job_id`` is the first, or the one that ran last; the
others wait to continue it where Slurm may not start a job again."""


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


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


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
    """The Slurm jobs of a run: from its status, else (the submitting process died) from what submitit left, else (the status
    is broken) from the record of its sweep."""
    ids = [text for text in _named(status) if is_job(text)]
    if not ids and isinstance(folder := status.extra.get("job_folder"), str):
        task = status.extra.get("job_task")
        ids = job_folder.job_ids(Path(folder), task if isinstance(task, int) else 0)
    return ids or (_handed_over(run) if status.state is State.unknown else [])


def _handed_over(run: RunFolder) -> list[str]:
    sweep = run.provenance().get("sweep")
    if not isinstance(sweep, str):
        return []
    job = Record.of(run.path.parent, sweep).job_of(run.name)
    return [job] if job is not None else []


def without_folder(runs_dir: Path, sweep: str) -> str | None:
    """In a line, the runs of a sweep that were handed to Slurm and whose folders are gone; None if there are none."""
    record = Record.of(runs_dir, sweep)
    gone = {name: record.job_of(name) for name in record.runs if not (runs_dir / name).is_dir()}
    if not gone:
        return None
    names = ", ".join(f"{name} (job {job})" if job else name for name, job in sorted(gone.items()))
    found = squeue.ask(job for job in gone.values() if job).jobs
    living = [job for job, state in found.items() if not state.ended]
    left = (
        f"; Slurm still has {len(living)} of their jobs: {shlex.join(['scancel', *living])}" if living else ""
    )
    count = "1 run" if len(gone) == 1 else f"{len(gone)} runs"
    return f"{count} of sweep {sweep} without a folder any more: {names}{left}"


def unknown_jobs(status: Status) -> list[str]:
    """What stands in ``status.json`` in the place of a job's id and is none: Slurm can't be asked about it. In quotes."""
    return [text if text == "null" else repr(text) for text in _named(status) if not is_job(text)]


def _named(status: Status) -> list[str]:
    several, single = status.extra.get(JOB_IDS), status.extra.get("job_id")
    named = [*(several if isinstance(several, list) else []), *([] if single is None else [single])]
    return list(dict.fromkeys(i if isinstance(i, str) else json.dumps(i) for i in named))
