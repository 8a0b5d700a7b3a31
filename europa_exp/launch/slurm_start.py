"""Where a task of a Slurm job begins: ``python -m europa_exp.launch.slurm_start FOLDER``.

submitit's own entry reads a pickle, and imports itself and numpy for that: half of the CPU time that a rank used to take until
its training function. This one reads text (see ``job_folder``).
"""

from __future__ import annotations

import signal

if __name__ == "__main__":
    # Slurm may ask at any time, and an unheeded signal would end the job for good. It waits until ``slurm_rank`` can take it,
    # also while hundreds of ranks import what follows from one file system. The job script does the same for what comes before.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2, signal.SIGTERM})

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from europa_exp.launch import job_folder

_WAIT_S = 60.0
"""Longest wait for the mark that the submission is complete."""


def main(folder: Path, environ: Mapping[str, str]) -> None:
    """Be this task of the job. Exits with a message when the job is nobody's: its submission broke off, and the same call,
    typed again, submits the runs anew."""
    array, index = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    job = f"{array}_{index}" if array and index else environ["SLURM_JOB_ID"]
    mark = job_folder.mark(folder, job)
    end = time.monotonic() + _WAIT_S
    while not mark.exists():
        if signal.SIGTERM in signal.sigpending():
            sys.exit(f"job {job} is ended before {mark} came")
        if time.monotonic() > end:
            sys.exit(f"{mark} is missing: whoever submitted job {job} was gone before its id was known")
        time.sleep(0.5)
    runs, entry = job_folder.read_task(folder, int(index) if array and index else 0)

    from europa_exp.launch import slurm_rank
    from europa_exp.runs.folder import RunFolder

    slurm_rank.work([RunFolder(run) for run in runs], entry)


if __name__ == "__main__":
    main(Path(sys.argv[1]), os.environ)
