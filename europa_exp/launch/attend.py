"""Watching submitted runs until they end, and what is said then."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from europa_exp.launch.dispatch import LAST_SECONDS
from europa_exp.runs import commands
from europa_exp.runs.folder import RunFolder
from europa_exp.runs.status import State

if TYPE_CHECKING:
    from europa_exp.launch.dispatch import LocalJob
    from europa_exp.launch.follow import Row
    from europa_exp.launch.points import Point

INTERRUPTED = 130
"""Exit code after Ctrl-C, as a shell gives it."""


class Stops:
    """Counts Ctrl-C and SIGTERM instead of dying of them.

    Once ``impatient`` is set, the second one raises KeyboardInterrupt, wherever the program is.
    """

    def __init__(self) -> None:
        self.count = 0
        self.impatient = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stops:
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is signal.SIG_IGN:
                continue  # a shell's background job, or nohup: somebody wants it ignored
            # Signal handlers can be set in the main thread only; elsewhere the caller's stay.
            with contextlib.suppress(ValueError):
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, *_: object) -> None:
        self.count += 1
        if self.impatient and self.count > 1:
            raise KeyboardInterrupt


# ------------------------------------------------------------------------------------------------------ this machine


def attend(
    job: LocalJob,
    runs: Sequence[RunFolder],
    points: Sequence[Point],
    stops: Stops,
    sweep: str | None,
    done: Sequence[RunFolder] = (),
) -> int:
    """Show how the runs of a job on this machine go until they have ended; the exit code of the call.

    ``done`` are completed runs that stand for skipped points: the comparison at the end holds them too.
    """
    from europa_exp.launch import follow

    begin = time.monotonic()
    rows = [follow.Row(run, p.cfg.training.steps) for run, p in zip(runs, points, strict=True)]
    view = follow.make_view()
    seen = 0
    kill_at: float | None = None

    def tick() -> None:
        nonlocal seen, kill_at
        if stops.count > seen:
            seen = stops.count
            if seen == 1:
                view.say("Stopping the ranks; once more to kill them at once.")
            else:
                kill_at = kill_at or time.monotonic() + LAST_SECONDS
            job.stop()
        if kill_at is not None and time.monotonic() > kill_at:
            job.kill()

    names = f"sweep {sweep}, " if sweep else ""
    print(f"{names}{len(runs)} run{'s' if len(runs) > 1 else ''} in {os.path.relpath(runs[0].path.parent)}")
    try:
        follow.follow(rows, view, active=job.active, tick=tick)
    finally:
        if sys.exc_info()[0] is not None:  # the view broke; the runs need not
            job.stop()
        job.reap()
    _close_accounts(job, rows, cancelled=bool(stops.count))
    return report(rows, time.monotonic() - begin, interrupted=bool(stops.count), done=done)


def _close_accounts(job: LocalJob, rows: Sequence[Row], *, cancelled: bool) -> None:
    """Nobody works on the runs any more: those that claim otherwise are marked."""
    from europa_exp.launch import follow

    open_states = (State.created, State.queued, State.running)
    for row in rows:
        row.refresh()
        state = row.status.state
        if state not in open_states:
            continue
        fields: dict[str, Any] = {}
        final = State.cancelled if cancelled else State.failed
        if not cancelled:
            started = "" if state is State.running else "not started: "
            pid = job.agent_pid()
            message = f"{started}the agent was killed" if pid else "the job did not start"
            message += f" (process {pid}, which ran the ranks)" if pid else f"; see {job.folder}"
            fields["error"] = {
                "rank": None,
                "type": "AgentKilled",
                "message": message,
                "traceback": job.last_words(),
            }
        try:
            row.run.set_state(final, only_from=open_states, **fields)
        except OSError as error:
            print(f"{row.run.name}: how it ended can't be recorded: {error}", file=sys.stderr)
        row.refresh()
        if row.status.state is State.failed:
            print(follow.failure_text(row))


def report(
    rows: Sequence[Row],
    seconds: float,
    *,
    interrupted: bool,
    done: Sequence[RunFolder] = (),
) -> int:
    """Say how the runs ended and what to type next; the exit code of the call."""
    from europa_exp.launch import follow

    completed = [row for row in rows if row.status.state is State.completed]
    print(f"{follow.count_states(rows)} in {seconds:.0f} s")
    for row in rows:
        if row.status.state is State.unknown:
            print(f"{row.run.name}: {row.status.reason}; was the folder removed while the run was going on?")
    runs = [row.run for row in rows]
    sweep = commands.sweep_of(runs)
    if len(completed) + len(done) > 1 and not interrupted:
        print_comparison([*runs, *done], f"sweep {sweep}" if sweep else "")
    where = runs[0].path.parent
    ended_badly = next((row.run for row in rows if row.status.state is State.failed), None)
    if ended_badly is not None:
        print(f"Next: {commands.europa('why', ended_badly.name, runs_dir=where)}")
    if len(rows) > 1 and sweep and completed:
        print(f"Next: {commands.europa('compare', '--sweep', sweep, runs_dir=where)}")
    elif len(completed) > 1:
        which = _by_hash([row.run for row in completed])
        print(f"Next: {commands.europa('compare', *which, runs_dir=where)}")
    elif completed:
        print(f"Next: {commands.europa('show', completed[0].run.name, runs_dir=where)}")
    if interrupted:
        return INTERRUPTED
    return 0 if len(completed) == len(rows) else 1


def _by_hash(runs: Sequence[RunFolder]) -> list[str]:
    """The hash that stands for all repeats of one experiment; the names of runs of several."""
    identities = {str(run.provenance().get("identity")) for run in runs}
    return list(identities) if len(identities) == 1 else [run.name for run in runs]


def print_comparison(runs: Sequence[RunFolder], title: str = "") -> None:
    """Print runs side by side; trouble with that is told and changes nothing."""
    print(flush=True)
    try:
        from europa_exp.runs.compare import compare
        from europa_exp.runs.table import show

        show(compare(list(runs), title=title))
    except Exception as error:
        # The runs are done and recorded; how they look side by side must not turn that into a failure.
        print(f"the comparison can't be shown: {error}", file=sys.stderr)
