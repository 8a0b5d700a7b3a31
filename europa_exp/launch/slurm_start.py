"""Where a task of a Slurm job begins: ``python -m europa_exp.launch.slurm_start FOLDER``.

submitit's own entry reads a pickle, and imports itself and numpy for that: half of the CPU time that a rank used to take until
its training function. What a job is to do is text, and lies in the job's folder as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from europa_exp.launch.job import Job

JOBS_FILE = "jobs.json"
"""In the job's folder: the runs and the training entry of each task of the array, in order."""

_SUBMITTED = "_submitted.pkl"
_WAIT_S = 60.0
"""Longest wait for the mark that the submission is complete."""


def write(folder: Path, jobs: Sequence[Job]) -> None:
    """Say what the tasks of an array are to do (a job without an array: its only one). Raises OSError."""
    from europa_exp.runs.files import replace_text

    text = json.dumps([{"runs": job.runs, "entry": job.entry} for job in jobs])
    replace_text(folder / JOBS_FILE, text + "\n")


def mark_submitted(folder: Path, job_id: str) -> None:
    """Leave the mark by which a job knows that the process which submitted it got its id. submitit leaves it by itself."""
    (folder / f"{job_id}{_SUBMITTED}").touch()


def submitted(folder: Path) -> list[str]:
    """The ids of the jobs that carry the mark."""
    return sorted(path.name.removesuffix(_SUBMITTED) for path in folder.glob(f"*{_SUBMITTED}"))


def main(folder: Path, environ: Mapping[str, str]) -> None:
    """Be this task of the job. Exits with a message when the job is nobody's: its submission broke off, and the same call,
    typed again, submits the runs anew."""
    array, index = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    job = f"{array}_{index}" if array and index else environ["SLURM_JOB_ID"]
    mark = folder / f"{job}{_SUBMITTED}"
    end = time.monotonic() + _WAIT_S
    while not mark.exists():
        if time.monotonic() > end:
            sys.exit(f"{mark} is missing: whoever submitted job {job} was gone before its id was known")
        time.sleep(0.5)
    tasks = json.loads((folder / JOBS_FILE).read_text(encoding="utf-8"))
    task = tasks[int(index) if array and index else 0]

    from europa_exp.launch import slurm_rank
    from europa_exp.runs.folder import RunFolder

    slurm_rank.work([RunFolder(run) for run in task["runs"]], task["entry"])


if __name__ == "__main__":
    main(Path(sys.argv[1]), os.environ)
