"""The folder of a job: where it lies, and what a task of a Slurm job finds in it.

submitit leaves its pickles and logs there. What a task is to do is text, so that it can be read without submitit.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from europa_exp.runs.files import replace_text

JOBS_FOLDER = ".submitit"
"""Under the runs folder: submitit's pickles and logs, a folder a job."""

_TASKS_FILE = "jobs.json"
"""The runs and the training entry of each task of the array, in order."""

_SUBMITTED = "_submitted.pkl"


def make(runs_dir: Path) -> Path:
    """A folder for one job. submitit names its files after job and process ids, which come again: each job gets its own."""
    place = runs_dir.absolute() / JOBS_FOLDER
    place.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=time.strftime("%Y%m%d-%H%M%S-"), dir=place))


def write_tasks(folder: Path, tasks: Iterable[tuple[Sequence[str], str]]) -> None:
    """Say what the tasks of an array are to do (a job without an array: its only one): paths of run folders, training entry.
    Raises OSError."""
    text = json.dumps([{"runs": list(runs), "entry": entry} for runs, entry in tasks])
    replace_text(folder / _TASKS_FILE, text + "\n")


def read_task(folder: Path, index: int) -> tuple[list[str], str]:
    """What the task with this index in the array is to do."""
    task = json.loads((folder / _TASKS_FILE).read_text(encoding="utf-8"))[index]
    return task["runs"], task["entry"]


def mark(folder: Path, job_id: str) -> Path:
    """The mark by which a job (``123``, or ``123_4`` in an array) knows that the process which submitted it got its id.
    submitit leaves it by itself."""
    return folder / f"{job_id}{_SUBMITTED}"


def job_ids(folder: Path, task: int) -> list[str]:
    """The jobs that carry the mark and do this task of the array."""
    marked = sorted(path.name.removesuffix(_SUBMITTED) for path in folder.glob(f"*{_SUBMITTED}"))
    return [job for job in marked if int(job.partition("_")[2] or 0) == task]
