"""A task's part in one run of a Slurm job: it starts the rank, watches over it, and says how it ended.

As it stands here a task decides nothing; what the first one does besides is in ``slurm_first``.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from europa_exp.config.schema import Config
from europa_exp.launch import environment, processes, rendezvous
from europa_exp.launch.slurm_ledger import Ledger
from europa_exp.launch.slurm_task import Task
from europa_exp.launch.worker import RankSpec, record_error, run_rank
from europa_exp.runs.attempts import STOPPED, Reason
from europa_exp.runs.folder import RunFolder
from europa_exp.runs.status import State, now

_LOOK_EVERY_S = 10.0
"""How often the other tasks look whether the first one has recorded an end: it is one file for hundreds of them."""

_BEGIN_S = 120.0
"""Seconds that a task which failed at once waits for the first one to begin."""

_WATCHED = (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)


class Signals:
    """Counts signals instead of dying of them, and wakes whoever waits."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = dict.fromkeys(_WATCHED, 0)
        self._wake_in, self._wake_out = os.pipe()
        for end in (self._wake_in, self._wake_out):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self._wake_out, warn_on_full_buffer=False)
        for number in _WATCHED:
            signal.signal(number, self._count)
        for number in (signal.SIGCHLD, signal.SIGCONT):
            signal.signal(number, lambda *_: None)
        # What came since the job began has waited (see ``slurm_start``).
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)

    def wait(self, seconds: float) -> None:
        """Sleep until a signal comes, also one that came since the last wait, or the time is over."""
        ready, _, _ = select.select([self._wake_in], [], [], seconds)
        if ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_in, 4096)

    def release(self) -> None:
        """In a child: forget all this."""
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGCONT):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.close(self._wake_in)
        os.close(self._wake_out)

    def _count(self, number: int, _: object) -> None:
        self.counts[number] += 1


class Turn:
    """This task's part in one run. ``more``: other runs follow in this job. ``first_to_work``: none before it took any time of
    this start."""

    def __init__(
        self,
        task: Task,
        run: RunFolder,
        entry: str,
        signals: Signals,
        *,
        turn: int,
        more: bool,
        first_to_work: bool,
    ) -> None:
        self.task, self.run, self.entry, self.signals = task, run, entry, signals
        self.turn, self.more, self.first_to_work = turn, more, first_to_work
        self.worked = False
        """Whether there was anything to do in this start."""
        self.ledger = Ledger(task, run)
        self.trouble: dict[str, Any] | None = None
        """Why the rank could not even be started."""
        self.cfg: Config | None = None
        self.child = 0
        self.code: int | None = None
        """Exit code of the rank's process, negative for a signal; None while it runs."""
        self.ending: tuple[Reason, str] | None = None
        """Why this task ended its rank, where it did."""
        self._look_at = 0.0
        """When this task looks next whether the first one has recorded an end."""

    def take(self) -> int:
        """Run the rank to its end and record it; returns the exit code for this task."""
        if (ended := self.ledger.over_before()) is not None:
            return 1 if ended is State.failed else 0
        self.worked = True
        with contextlib.suppress(OSError):
            # An earlier attempt's record must not explain this one's end.
            self.run.error_file(self.task.rank).unlink(missing_ok=True)
        try:
            self.cfg = cfg = self.run.config()
            self.task.check(cfg)
            self.begin(cfg)
            self.ledger.report_memory(cfg.parallelism.gpus_per_node, cfg.cluster)
            spec = self._spec(cfg)
        except Exception as error:
            record_error(self.run, self.task.rank, error, start=self.task.start)
            # A full disk keeps no record, and without one this would pass for a lost rank.
            kind, message = type(error).__name__, str(error)
            self.trouble = {"rank": self.task.rank, "type": kind, "message": message, "traceback": ""}
            self.code = 1
        else:
            self._fork(spec)
            self._watch()
        assert self.code is not None
        if self.code not in (0, STOPPED) and self.ending is None:
            self.ledger.complete(self.code)
        self.ledger.say_ended(self.code, by_us=self.ending is not None)
        return self.conclude()

    # ------------------------------------------------------------------------------- what the first task does otherwise

    def begin(self, cfg: Config) -> None:
        """Before the rank is started."""

    def asked_to_save(self) -> None:
        """Slurm's USR2 came and was passed on to the rank."""

    def look(self) -> None:
        """While the rank runs, now and then and after each signal: whether it must be ended."""
        if self.more or self.signals.counts[signal.SIGTERM] or time.monotonic() > self._look_at:
            self._look_at = time.monotonic() + _LOOK_EVERY_S
            if self.ledger.is_over():
                self.end_child(Reason.cancelled, "the run is over")

    def conclude(self) -> int:
        """After the end of the rank: what remains to be done. Returns the exit code for this task."""
        code = self.exit_code()
        if code == 0:
            return 0
        # A failure ends the step; the first task may not even have begun, and nobody else would decide.
        begun_until = time.monotonic() + _BEGIN_S
        while (
            not self.ledger.begun()
            and time.monotonic() < begun_until
            and not self.signals.counts[signal.SIGTERM]
        ):
            self.signals.wait(0.2)
        if code == STOPPED or self.more:
            # Ending now would end the first task before it has asked Slurm, or the runs that follow. It finds the record.
            wait_to_be_killed(until=lambda: self.ledger.is_over() or self.signals.counts[signal.SIGTERM] > 0)
        return code

    def let_others_finish(self) -> None:
        """Wait until the run is over for all: a task that ends with the failure of another run ends the others."""
        if self.code == 0:
            wait_to_be_killed(until=lambda: self.ledger.is_over() or self.signals.counts[signal.SIGTERM] > 0)

    # --------------------------------------------------------------------------------------------- the process

    def _spec(self, cfg: Config) -> RankSpec:
        task = self.task
        meeting = rendezvous.meeting(cfg.cluster.master_addr, task.nodes[0])
        port = rendezvous.port(task.job, task.restarts, self.turn + task.step)
        notes = []
        if binding := os.environ.get("EUROPA_NUMA"):
            notes.append(f"NUMA: {binding}" if task.rank else f"NUMA of rank 0: {binding}")
        again = f", restart {task.restarts}" if task.restarts else ""
        return RankSpec(
            run=str(self.run.path),
            rank=task.rank,
            master_addr=meeting.address,
            master_port=port,
            parent=os.getpid(),
            devices=environment.accelerators(),
            notes=notes,
            entry=self.entry,
            on_slurm=True,
            start=task.start,
            header=f"======== {now()} job {task.job_id}{again}, rank {task.rank} on {task.host}",
            record={
                "rendezvous": {"strategy": cfg.cluster.master_addr.name, "how": meeting.how, "port": port},
                "slurm": {"job_id": task.job_id, "start": task.start, "nodes": list(task.nodes)},
            },
        )

    def _fork(self, spec: RankSpec) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        # A signal that comes before the child can take it waits for it.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2, signal.SIGTERM})
        self.child = os.fork()
        if self.child == 0:
            try:
                self.signals.release()
                spec.notes.extend(_clean_environment())
                run_rank(spec, preloaded=False)
            finally:
                os._exit(1)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2, signal.SIGTERM})

    def _watch(self) -> None:
        """Wait for the end of the child, and pass on what signals mean."""
        told = 0
        self._look_at = time.monotonic() + _LOOK_EVERY_S
        while not self._reap():
            counts = self.signals.counts
            if counts[signal.SIGUSR2] > told:
                told = counts[signal.SIGUSR2]
                processes.send(self.child, signal.SIGUSR2)
                self.asked_to_save()
            self.look()
            self.signals.wait(0.5 if counts[signal.SIGTERM] else 2.0)

    def _reap(self) -> bool:
        if self.code is None:
            pid, status = os.waitpid(self.child, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code is not None

    def end_child(self, reason: Reason, why: str) -> None:
        if self.ending is None:
            self.ending = (reason, why)
        if self.code is None:
            # Its helpers are in its session; a rank that is ended here has nothing left to say.
            processes.send(self.child, signal.SIGKILL, group=True)
            processes.send(self.child, signal.SIGKILL)

    def exit_code(self) -> int:
        """The rank's exit code as a shell would give it: 128 and the number of a signal."""
        assert self.code is not None
        return 128 - self.code if self.code < 0 else self.code


def _clean_environment() -> list[str]:
    """In the child: keep of the environment what a rank may inherit, and what Slurm itself says; returns remarks."""
    kept, left_out = environment.inherited(os.environ)
    kept |= {name: value for name, value in os.environ.items() if name.startswith("SLURM")}
    os.environ.clear()
    os.environ.update(kept)
    return [
        f"{name} of the job's environment was left out: settings come from the configuration"
        for name in left_out
    ]


def wait_to_be_killed(until: Callable[[], bool] | None = None) -> None:
    """Wait for the kill that a requeue brings; for ever, or until a condition holds."""
    while until is None or not until():
        time.sleep(1.0)
