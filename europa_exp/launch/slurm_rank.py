"""One task of a Slurm job: it watches over one rank, and the first task also keeps the record and decides what comes next.

The rank itself is a child of this process, a new one for each run of the job (``launch.points_per_job``): no state of torch
survives from one run to the next, and when a rank dies of a signal somebody is left to say so. This process imports no torch.

How a job ends:

- A rank that fails leaves ``logs/rank_<r>.error.json``; if it can't, its task does. The task ends with the rank's exit code,
  and srun (--kill-on-bad-exit) sends SIGTERM to all others, by way of Slurm's controller. Where that is away, the first task
  sees the exit code, and the others see the record of the first. The first task gathers the errors of this start, finds the
  one that caused the rest (``failure``), and asks ``retry`` whether the job starts again.
- Slurm's USR2 (before the time limit, at a preemption) goes to the ranks. They agree on a step, save, and end with STOPPED.
- SIGTERM means a cancelled job, a preemption, a requeue, or a step that srun ends. Only the first task asks Slurm which;
  the ranks ignore it.

Starting again means that the first task calls ``scontrol requeue`` and every task waits to be killed: one that ended would
make Slurm call the job failed or, worse, completed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from europa_exp.launch import slurm_task
from europa_exp.launch.slurm_ledger import Ledger
from europa_exp.launch.slurm_task import Task
from europa_exp.launch.slurm_turn import Signals, Turn
from europa_exp.launch.worker import leave
from europa_exp.runs.folder import RunFolder
from europa_exp.runs.status import ENDED


def work(runs: Sequence[RunFolder], entry: str) -> None:
    """Be this task of the job: take part in each run in turn, with ``entry`` as the training function.

    After a failure this does not return: the process ends with the exit code of the first rank of its own that failed, or waits
    to be requeued.
    """
    signals = Signals()
    worst = 0
    worked: Turn | None = None
    try:
        task = Task.here(os.environ)
    except slurm_task.LayoutError as error:
        print(error, file=sys.stderr)
        leave(1)
    kind = Turn
    if task.rank == 0:
        from europa_exp.launch.slurm_first import FirstTurn  # hundreds of ranks start, and one needs it

        kind = FirstTurn
    for turn, run in enumerate(runs):
        part = kind(
            task, run, entry, signals, turn=turn, more=turn + 1 < len(runs), first_to_work=worked is None
        )
        code = part.take()
        worst = worst or code
        worked = part if part.worked else worked
    if worst and worked is not None:
        worked.let_others_finish()
    if task.rank == 0:
        _cancel_rest_of_chain(task, runs)
    if worst:
        leave(worst)


def _cancel_rest_of_chain(task: Task, runs: Sequence[RunFolder]) -> None:
    """Take the jobs that wait to continue these runs out of the queue, if there is nothing left to continue.

    They depend on the whole array before them: each task of it would get its nodes again only to end, for the sake of one that
    is not done. Each job takes its own successors out, whose ids are in the record once the whole chain is submitted; one that
    ended before that leaves it to the next.
    """
    ledger = Ledger(task, runs[-1])
    if all(run.status().state in ENDED for run in runs) and (jobs := ledger.rest_of_chain()):
        trouble = slurm_task.cancel(jobs)
        ledger.log(
            f"nothing is left to continue: scancel {' '.join(jobs)}{f': {trouble}' if trouble else ''}"
        )
