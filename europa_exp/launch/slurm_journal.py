"""What is written down of a submission while it goes on: before Slurm is asked, after each answer, and in the end.

Wherever it breaks off, the run folders and the record of the sweep say how far it came. What Slurm did not take is taken back.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from europa_exp.launch.already import epitaph
from europa_exp.launch.arrays import Array
from europa_exp.launch.slurm_runs import JOB_IDS, OpenRun
from europa_exp.launch.sweep_record import Record
from europa_exp.runs.folder import RunFolder
from europa_exp.runs.status import State


class Journal:
    """The states of the runs and the ``record`` of their sweep during one submission. ``key`` is that of the call."""

    def __init__(self, record: Record, key: str) -> None:
        self._record, self._key = record, key
        self._before: dict[str, dict[str, Any]] = {}
        self._unused: list[Path] = []

    def open(self, planned: Sequence[Array], again: Iterable[OpenRun]) -> None:
        """Record what is about to be done; ``again`` are the runs that are submitted once more. Raises OSError."""
        self._unused = [array.folder for array in planned]
        reasons: dict[str, str] = {}
        for o in again:
            reasons[o.run.name] = f"submitted again: {epitaph(o)}"
            self._before[o.run.name] = {
                "state": o.status.state,
                **{k: o.status.extra.get(k) for k in ("job_id", JOB_IDS, "job_folder", "job_task", "reason")},
            }
        for array in planned:
            for index, task in enumerate(array.tasks):
                for run in task:
                    fields: dict[str, Any] = {"job_id": None, "job_folder": str(array.folder)}
                    if run.name in reasons:
                        fields |= {"reason": reasons[run.name], JOB_IDS: []}
                    run.set_state(State.queued, job_task=index, **fields)
                    self._record.runs[run.name] = {"job_id": None, "folder": str(array.folder)}
        if self._key not in self._record.unfinished:
            self._record.unfinished.append(self._key)
        self._record.write()

    def others(self, planned: Sequence[Array]) -> list[str]:
        """The runs on record that are not part of this submission."""
        mine = {run.name for array in planned for run in array.runs}
        return [name for name in self._record.runs if name not in mine]

    def took(self, array: Array) -> None:
        """Slurm has the job: its folder stays, whatever happens."""
        self._unused.remove(array.folder)

    def note(self, array: Array, chain: Sequence[list[str]]) -> None:
        """Record the jobs of an array, and of those that wait to continue it: ``chain[n][i]`` is the n-th one of task i."""
        for index, task in enumerate(array.tasks):
            for run in task:
                self._record.runs[run.name]["job_id"] = chain[0][index]
        try:
            self._record.write()
            for index, task in enumerate(array.tasks):
                ids = [jobs[index] for jobs in chain]
                for run in task:
                    run.note(**{"job_id": ids[0], JOB_IDS: ids})
        except OSError as error:
            # Slurm has them; the ids can be found again through the job's own folder, which is on record.
            job = chain[0][0].partition("_")[0]
            print(f"job {job} can't be recorded everywhere: {error}", file=sys.stderr)

    def close(self) -> None:
        """Slurm has all of it. Raises OSError."""
        self._record.unfinished.remove(self._key)
        self._record.write()

    def take_back(self, left: Sequence[RunFolder], fresh: Sequence[RunFolder]) -> None:
        """Runs that Slurm did not get: new folders (``fresh``) go, others are again what they were."""
        for folder in self._unused:
            shutil.rmtree(folder, ignore_errors=True)
        if not left:
            return
        for run in left:
            if run in fresh:
                shutil.rmtree(run.path, ignore_errors=True)
            elif run.name in self._before:
                fields = dict(self._before[run.name])
                run.set_state(fields.pop("state"), **fields)
            self._record.runs.pop(run.name, None)
        if self._record.runs and self._record.sweep is not None:
            self._record.write()
        else:
            self._record.path.unlink(missing_ok=True)
