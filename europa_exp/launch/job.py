"""A job: it carries paths of run folders, and everything else lies in those folders."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from europa_exp.launch.forkserver import PRELOAD
from europa_exp.launch.worker import TRAIN


@dataclass(frozen=True)
class Job:
    """``runs`` are paths of run folders, run in turn; ``folder`` is the job's own folder.

    ``entry`` and ``preload`` name code to import; they are not settings of a run.
    """

    runs: tuple[str, ...]
    folder: str
    entry: str = TRAIN
    preload: str = PRELOAD

    def __call__(self) -> dict[str, str]:
        """What submitit runs on one machine: the agent, which starts the ranks and returns run -> state. Only ``config.yaml``
        of each folder says what a run is. (On Slurm each task begins in ``slurm_start``.)"""
        from europa_exp.launch.agent import Agent
        from europa_exp.runs.folder import RunFolder

        runs = [RunFolder(path) for path in self.runs]
        return Agent(runs, Path(self.folder), entry=self.entry, preload=self.preload).work()
