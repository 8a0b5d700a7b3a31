"""Runs into jobs, jobs into Slurm arrays, arrays to sbatch. One call of sbatch an array, however many runs it has."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import subprocess
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from europa_exp.config import schema
from europa_exp.launch import job_folder, slurm, slurm_exclude
from europa_exp.launch.job import Job
from europa_exp.runs.folder import RunFolder

if TYPE_CHECKING:
    from europa_exp.launch.points import Point

DEFAULT_ARRAY_SIZE = 1001
"""Slurm's own default of MaxArraySize, for when it can't be asked."""

_ASK_TIMEOUT_S = 15


class Refused(Exception):
    """Slurm did not take a job; the message is in Slurm's own words."""


@dataclass(frozen=True)
class Array:
    """What one call of sbatch submits: tasks of one resource shape, each with the runs that it does in turn."""

    tasks: tuple[tuple[RunFolder, ...], ...]
    cfg: schema.Config
    """Configuration of the first run; all agree in what Slurm is asked for."""
    folder: Path
    """The job's own folder: script, pickles, output."""
    attempts: int = 1
    """Jobs of the chain: where Slurm may not start a job again, further ones wait to continue what did not come to its end."""
    turn: int = 0
    """Counts from 0: an array starts when all of the turn before have ended (see ``turns``)."""

    @property
    def runs(self) -> list[RunFolder]:
        return [run for task in self.tasks for run in task]


def plan(
    pairs: Sequence[tuple[Point, RunFolder]], launch: schema.Launch, *, limit: int, runs_dir: Path
) -> list[Array]:
    """Arrays for these runs, in their order: points of a like shape together, ``launch.points_per_job`` of them a task, at
    most ``limit`` tasks an array. Makes the folder of each array. Raises OSError."""
    run_of = {id(point): run for point, run in pairs}
    arrays = []
    for group in slurm.by_shape([point for point, _ in pairs]):
        runs = [run_of[id(point)] for point in group]
        per_task = launch.points_per_job
        tasks = [tuple(runs[i : i + per_task]) for i in range(0, len(runs), per_task)]
        cluster = group[0].cfg.cluster
        attempts = 1 if cluster.requeue else max(point.cfg.cluster.max_attempts for point in group)
        for i in range(0, len(tasks), limit):
            arrays.append(
                Array(tuple(tasks[i : i + limit]), group[0].cfg, job_folder.make(runs_dir), attempts)
            )
    order = turns([len(array.tasks) for array in arrays], launch.throttle)
    return [replace(array, turn=turn) for array, turn in zip(arrays, order, strict=True)]


def turns(sizes: Sequence[int], throttle: int | None) -> list[int]:
    """For arrays of these sizes, in order, the turn in which each runs, so that never more than ``throttle`` tasks do at once.

    Slurm's own limit (--array=0-9%2) holds for one array. So arrays run side by side as long as their limits add up to no more
    than ``throttle``, and the others wait for them with --dependency=afterany. That holds whatever starts again in between,
    and a sweep of one array costs nothing. Where there are several, nodes may stay idle at the end of a turn, until its
    slowest task has ended.
    """
    found, turn, running = [], 0, 0
    for size in sizes:
        if throttle is not None:
            running += min(size, throttle)
            if running > throttle:
                turn, running = turn + 1, min(size, throttle)
        found.append(turn)
    return found


def most_tasks(launch: schema.Launch) -> int:
    """Most tasks of one array: MaxArraySize N allows the indices 0 to N-1; a site may allow fewer (max_array_tasks)."""
    if launch.max_array_size is not None:
        return launch.max_array_size
    with slurm.clean_environment(), contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            ["scontrol", "show", "config"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ASK_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
            check=True,
        )
        return _array_limit(done.stdout)
    return DEFAULT_ARRAY_SIZE


def _array_limit(text: str) -> int:
    size = re.search(r"(?m)^MaxArraySize\s*=\s*(\d+)", text)
    tasks = re.search(r"\bmax_array_tasks=(\d+)", text)
    found = [int(match[1]) for match in (size, tasks) if match]
    return max(1, min(found, default=DEFAULT_ARRAY_SIZE))  # 0 switches arrays off


def submit(
    array: Array,
    launch: schema.Launch,
    *,
    name: str,
    entry: str,
    code: Path | None,
    after: str | None = None,
    behind: Collection[str] = (),
) -> list[str]:
    """Hand an array to Slurm; the job of each task, as ``123_4`` (``123`` for a single one). Raises Refused.

    ``code`` is the folder that the job imports, without it the one that this process imports. With ``after`` (a job of the
    same array) it starts when that one has ended and not all of it was a success, and vanishes otherwise. It does not start
    before the jobs ``behind`` which it waits have ended, however that was.
    """
    from submitit.core.utils import FailedJobError

    if shutil.which("sbatch") is None:
        raise Refused("there is no sbatch on this machine; submit from a login node of the cluster")
    jobs = [Job(tuple(str(run.path) for run in task), str(array.folder), entry, "") for task in array.tasks]
    try:
        job_folder.write_tasks(array.folder, [(job.runs, job.entry) for job in jobs])
        bad = slurm_exclude.listed(slurm_exclude.place_of(array.runs[0]))
        executor = slurm.make_executor(
            array.cfg, launch, folder=array.folder, name=name, code=code, bad_nodes=bad
        )
        if after is not None:
            more = slurm.sbatch_parameters(array.cfg, launch, name=name)["additional_parameters"]
            executor.update_parameters(
                dependency=f"afternotok:{after}",
                additional_parameters={**more, "kill-on-invalid-dep": "yes"},
            )
        elif behind:
            jobs_before = ":".join(dict.fromkeys(job.partition("_")[0] for job in behind))
            conditions = [*filter(None, [launch.dependency]), f"afterany:{jobs_before}"]
            executor.update_parameters(dependency=",".join(conditions))
        # submitit prints what it raises as well.
        with slurm.clean_environment(), contextlib.redirect_stderr(io.StringIO()):
            if len(jobs) == 1:
                return [executor.submit(jobs[0]).job_id]
            with executor.batch():
                handles = [executor.submit(job) for job in jobs]
            return [handle.job_id for handle in handles]
    except FailedJobError as error:
        status = getattr(error.__cause__, "returncode", None)
        raise Refused(_words(str(error)) or f"sbatch ended with exit code {status}") from error
    except (OSError, RuntimeError) as error:
        raise Refused(str(error)) from error


def _words(text: str) -> str:
    """Slurm's own words, one line: what sbatch says before the last line is often the reason of the last."""
    lines = [line.removeprefix("sbatch:").strip() for line in text.splitlines()]
    return "; ".join(dict.fromkeys(line.removeprefix("error:").strip() for line in lines if line))


def cancel_unrecorded(folders: Sequence[Path]) -> list[str]:
    """Cancel jobs whose submission broke off before their ids were known (see ``slurm_start``): they could only wait and fail.

    Returns their ids. A job is known by its script, which lies in its own folder.
    """
    wanted = {str(folder) for folder in folders}
    if not wanted:
        return []
    command = ["squeue", "--me", "--noheader", "--format=%F|%o"]
    try:
        with slurm.clean_environment():
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=_ASK_TIMEOUT_S,
                stdin=subprocess.DEVNULL,
                check=True,
            )
            lines = [line.strip().partition("|") for line in done.stdout.splitlines()]
            ids = sorted({job for job, _, script in lines if os.path.dirname(script) in wanted})
            if ids:
                subprocess.run(["scancel", *ids], capture_output=True, timeout=_ASK_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return ids
