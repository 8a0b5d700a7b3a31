"""Watching runs that Slurm has: from their folders, as local ones; Slurm itself is asked now and then.

Watching asks nothing of the runs. Ctrl-C, a closed terminal or a lost connection ends the watching, and they go on.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from europa_exp.config import schema
from europa_exp.launch import squeue
from europa_exp.launch.attend import INTERRUPTED, Stops, report
from europa_exp.launch.slurm_runs import OPEN, jobs_of
from europa_exp.runs import commands
from europa_exp.runs.status import State

if TYPE_CHECKING:
    from europa_exp.launch.follow import Row
    from europa_exp.launch.slurm_submit import Handed
    from europa_exp.launch.standing import Standing

ASK_EVERY_S = 20.0
"""Between two questions to Slurm: a login node has many users, the controller only one life."""

FIRST_ASK_S = 4.0

CONFIRM_S = 8.0
"""To the second question about a job that is over although its run is not."""

LINGER_S = 60.0
"""Longest wait for the jobs of runs that are over: rank 0 says completed, and another rank can still fail at its end."""

_LOOK_EVERY_S = 1.0
_LINGER_EVERY_S = 2.0
_NO_RANKS = frozenset({"COMPLETING", "STAGE_OUT"})
"""States of a job that is not over, in which its processes have ended."""


def attend(handed: Handed, launch: schema.Launch, stops: Stops) -> int:
    """Follow the runs to their end and return the exit code: 0 all completed, 1 some did not, 130 after Ctrl-C."""
    from europa_exp.launch import follow

    stops.impatient = True
    begin = time.monotonic()
    rows = [follow.Row(run, point.cfg.training.steps) for point, run in handed.runs]
    view = follow.make_view()
    watch = Watch(rows, view.say)
    try:
        follow.follow(
            rows,
            view,
            active=lambda: not stops.count and watch.going_on(),
            tick=lambda: None,
            interval=_LOOK_EVERY_S,
        )
    except KeyboardInterrupt:  # the second Ctrl-C
        stops.count = max(stops.count, 1)
    if stops.count:
        alive = sum(row.status.state in OPEN for row in rows)
        if alive:
            print(f"No longer watching; {alive} of {len(rows)} runs go on.")
            say_next(handed, launch)
        return INTERRUPTED
    return report(rows, time.monotonic() - begin, interrupted=False)


def say_next(handed: Handed, launch: schema.Launch) -> None:
    """What to type to see, or to stop, runs that go on without this command."""
    if not handed.runs:
        return
    which = commands.naming([run for _, run in handed.runs])
    print(f"Next: {commands.europa('status', *which, '--watch', runs_dir=launch.runs_dir)}")
    print(f"To cancel: {commands.europa('cancel', *which, runs_dir=launch.runs_dir)}")


class Watch:
    """Whether runs are still to be waited for. Their own records say so; only Slurm knows of one that died without a word."""

    def __init__(self, rows: Sequence[Row], say: Callable[[str], None]) -> None:
        self._rows = rows
        self._say = say
        self._next = time.monotonic() + FIRST_ASK_S
        self._over: set[str] = set()
        self._waits = ""
        self._silent: tuple[str, ...] = ()
        self._linger_until: float | None = None

    def going_on(self) -> bool:
        """True until every run has ended, by its own record or, twice in a row, by Slurm's, and no rank is left."""
        for row in self._rows:
            row.refresh()
        left = [row for row in self._rows if row.status.state in OPEN]
        if not left:
            return self._ranks_left()
        self._linger_until = None
        if time.monotonic() >= self._next:
            self._ask(left)
            self._next = time.monotonic() + (CONFIRM_S if self._over else ASK_EVERY_S)
        return True

    def _ranks_left(self) -> bool:
        """Whether jobs of the runs, all of which are over, still have processes: what they do may change the end."""
        now = time.monotonic()
        if self._linger_until is None:
            self._linger_until, self._next = now + LINGER_S, now
        if now < self._next:
            return True
        self._next = now + _LINGER_EVERY_S
        ids = [job for row in self._rows for job in jobs_of(row.run, row.status)]
        found = squeue.ask(ids).jobs.values()
        busy = [j for j in found if not (j.ended or j.waiting or j.state in _NO_RANKS)]
        if busy and now > self._linger_until:
            self._say(f"job {busy[0].job_id} still runs, though its runs are over")
            return False
        return bool(busy)

    def _ask(self, left: Sequence[Row]) -> None:
        from europa_exp.launch.standing import survey

        found = survey(row.run for row in left)
        if found.silent != self._silent:
            self._silent = found.silent
            if found.silent:
                self._say(f"Slurm gives no answer ({'; '.join(found.silent)}); following the run folders")
        over = {s.run.name: s for s in found.standings if s.over and not s.status.ended}
        for name, standing in over.items():
            # Once may be the moment before the ranks write their last word, or before Slurm requeues the job.
            if name in self._over:
                close(standing)
        self._over = set(over)
        self._tell_waiting(found.standings)

    def _tell_waiting(self, standings: Sequence[Standing]) -> None:
        reasons: dict[str, int] = {}
        for standing in standings:
            if standing.slurm is not None and standing.slurm.waiting and standing.slurm.reason:
                reasons[standing.slurm.reason] = reasons.get(standing.slurm.reason, 0) + 1
        text = ", ".join(f"{n} for {reason}" for reason, n in sorted(reasons.items()))
        if text and text != self._waits:
            self._say(f"Slurm lets wait: {text}")
        self._waits = text


def close(standing: Standing) -> None:
    """Record the end of a run whose job ended without the run saying so."""
    state = State.cancelled if standing.state == "cancelled" else State.failed
    error = None
    if state is State.failed:
        message = f"job {standing.job_id} is over and its ranks left no word: {standing.note}"
        error = {"rank": None, "type": "JobEnded", "message": message, "traceback": ""}
    try:
        standing.run.set_state(state, only_from=OPEN, error=error, reason=standing.note)
    except OSError as problem:
        print(f"{standing.run.name}: how it ended can't be recorded: {problem}", file=sys.stderr)
