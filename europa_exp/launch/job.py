"""The job function that submitit runs: it carries paths of run folders, and everything else lies in those folders."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from europa_exp.launch.forkserver import PRELOAD
from europa_exp.launch.worker import TRAIN


@dataclass(frozen=True)
class Job:
    """What is pickled. ``runs`` are paths of run folders, run in turn; ``folder`` is the job's own folder.

    ``entry`` and ``preload`` name code to import; they are not settings of a run.
    """

    runs: tuple[str, ...]
    folder: str
    entry: str = TRAIN
    preload: str = PRELOAD

    def __call__(self) -> dict[str, str]:
        """Run; only ``config.yaml`` of each folder says what.

        On one machine this is the agent, which starts the ranks and returns run -> state. Under Slurm every task of the job
        calls it, and is one rank.
        """
        from europa_exp.runs.folder import RunFolder

        runs = [RunFolder(path) for path in self.runs]
        if under_slurm():
            from europa_exp.launch import slurm_rank

            return slurm_rank.work(runs, Path(self.folder), self.entry)
        from europa_exp.launch.agent import Agent

        return Agent(runs, Path(self.folder), entry=self.entry, preload=self.preload).work()


def under_slurm() -> bool:
    """Whether this process is a task of a job that submitit's Slurm executor made. (A shell inside an allocation has Slurm's
    variables as well, and may start a local job.)"""
    wanted = ("SLURM_JOB_ID", "SLURM_PROCID")
    return os.environ.get("SUBMITIT_EXECUTOR") == "slurm" and all(name in os.environ for name in wanted)
