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

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

from europa_exp.config.schema import Config
from europa_exp.launch import environment, failure, processes, rendezvous, retry, slurm_task
from europa_exp.launch.slurm_ledger import Ledger
from europa_exp.launch.slurm_task import Task
from europa_exp.launch.worker import RankSpec, leave, record_error, run_rank
from europa_exp.runs.attempts import STOPPED, Reason
from europa_exp.runs.folder import RunFolder
from europa_exp.runs.status import ENDED, State, now

_ABORTED_S = 2.0
"""Seconds that a rank gets to notice that the step is being ended without a record of why."""

_GRACE_S = 5.0
"""Seconds that the ranks have to end when another one has failed. srun ends them at once, unless Slurm's controller is away."""

_LOOK_EVERY_S = 10.0
"""How often the other tasks look whether the first one has recorded an end: it is one file for hundreds of them."""

_LATE_S = 600.0
"""Seconds that the first task waits for the others after its own rank is done."""

_BEGIN_S = 120.0
"""Seconds that a task which failed at once waits for the first one to begin."""

_WATCHED = (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)


def work(runs: Sequence[RunFolder], entry: str) -> None:
    """Be this task of the job: take part in each run in turn, with ``entry`` as the training function.

    After a failure this does not return: the process ends with the exit code of the first rank of its own that failed, or waits
    to be requeued.
    """
    signals = _Signals()
    worst = 0
    worked: _Turn | None = None
    try:
        task = Task.here(os.environ)
    except slurm_task.LayoutError as error:
        print(error, file=sys.stderr)
        leave(1)
    for turn, run in enumerate(runs):
        part = _Turn(
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


class _Signals:
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


class _Turn:
    """This task's part in one run. ``more``: other runs follow in this job. ``first_to_work``: none before it took any time of
    this start."""

    def __init__(
        self,
        task: Task,
        run: RunFolder,
        entry: str,
        signals: _Signals,
        *,
        turn: int,
        more: bool,
        first_to_work: bool,
    ) -> None:
        self.task, self.run, self.entry, self.signals = task, run, entry, signals
        self.turn, self.more, self.first_to_work = turn, more, first_to_work
        self.worked = False
        """Whether there was anything to do in this start."""
        self.first = task.rank == 0
        self.ledger = Ledger(task, run)
        self.trouble: dict[str, Any] | None = None
        """Why the rank could not even be started."""
        self.cfg: Config | None = None
        self.child = 0
        self.code: int | None = None
        """Exit code of the rank's process, negative for a signal; None while it runs."""
        self.requeued_by_slurm = False
        self.preempted = False
        """Whether Slurm asked to save and stop for a job of higher priority."""
        self.ending: tuple[Reason, str] | None = None
        """Why this task ended its rank, where it did."""
        self.failure_seen: float | None = None
        """When this task, the first, learned that another one's rank had failed."""

    # ------------------------------------------------------------------------------------------------ the run

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
            if self.first:
                self.ledger.begin(cfg)
            self.ledger.report_memory(cfg.parallelism.gpus_per_node, cfg.cluster)
            spec = self._spec(cfg)
        except Exception as error:
            record_error(self.run, self.task.rank, error, start=self.task.start)
            # A full disk keeps no record, and without one this would pass for a lost rank.
            kind, message = type(error).__name__, str(error)
            self.trouble = {"rank": self.task.rank, "type": kind, "message": message, "traceback": ""}
            self.code = 1
        else:
            self._fork(spec, cfg)
            self._watch()
        assert self.code is not None
        if self.code not in (0, STOPPED) and self.ending is None:
            self.ledger.complete(self.code)
        self.ledger.say_ended(self.code, by_us=self.ending is not None)
        if self.first:
            return self._conclude()
        return self._follow()

    def _spec(self, cfg: Config) -> RankSpec:
        task = self.task
        meeting = rendezvous.meeting(cfg.cluster.master_addr, task.nodes[0])
        port = rendezvous.port(task.job, task.restarts, self.turn + task.step)
        notes = []
        if binding := os.environ.get("EUROPA_NUMA"):
            notes.append(f"NUMA of rank 0: {binding}" if self.first else f"NUMA: {binding}")
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

    # --------------------------------------------------------------------------------------------- the process

    def _fork(self, spec: RankSpec, cfg: Config) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        # A signal that comes before the child can take it waits for it.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2, signal.SIGTERM})
        self.child = os.fork()
        if self.child == 0:
            try:
                self.signals.release()
                left_out = _clean_environment()
                spec.notes.extend(left_out)
                run_rank(spec, preloaded=False)
            finally:
                os._exit(1)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2, signal.SIGTERM})

    def _watch(self) -> None:
        """Wait for the end of the child, and pass on what signals mean."""
        told = terms = 0
        aborted_at: float | None = None
        look_at = time.monotonic() + _LOOK_EVERY_S
        while not self._reap():
            counts = self.signals.counts
            if counts[signal.SIGUSR2] > told:
                told = counts[signal.SIGUSR2]
                processes.send(self.child, signal.SIGUSR2)
                if self.first:
                    # Slurm forgets why it asked as soon as it ends the job.
                    self.preempted = self.preempted or slurm_task.ask(self.task).preempted
            if self.first:
                if counts[signal.SIGTERM] + counts[signal.SIGINT] > terms:
                    terms = counts[signal.SIGTERM] + counts[signal.SIGINT]
                    aborted_at = self._on_term()
                elif aborted_at is not None and time.monotonic() > aborted_at:
                    self._end_child(Reason.lost_rank, "a rank vanished and left no record")
                elif self._another_failed():
                    self._end_child(Reason.exception, "another rank failed")
            elif self.more or counts[signal.SIGTERM] or time.monotonic() > look_at:
                look_at = time.monotonic() + _LOOK_EVERY_S
                if self.ledger.is_over():
                    self._end_child(Reason.cancelled, "the run is over")
            self.signals.wait(0.5 if counts[signal.SIGTERM] else 2.0)

    def _another_failed(self) -> bool:
        """Whether a rank failed, and the others had their time to end of it. Where runs follow srun ends none of them."""
        if all(code in (0, STOPPED) for code in self.ledger.exit_codes().values()):
            return False
        if self.failure_seen is None:
            self.failure_seen = time.monotonic()
        return self.more or time.monotonic() > self.failure_seen + _GRACE_S

    def _on_term(self) -> float | None:
        """The first task got SIGTERM: find out why. Returns until when the rank may go on, where that is unclear."""
        job = slurm_task.ask(self.task, margin_s=1)
        self.ledger.log(f"SIGTERM; Slurm says {job}")
        preempted = self.preempted = self.preempted or job.preempted
        if job.state in ("RUNNING", ""):
            if not preempted and self.ledger.settled_errors():
                self._end_child(Reason.exception, "another rank failed")
                return None
            if self.code is None:
                processes.send(self.child, signal.SIGUSR2)
            # Before a preemption there is time to save. Otherwise srun is ending the step, and a rank that waits for a lost
            # one in a collective would wait for longer than Slurm does.
            return None if preempted else time.monotonic() + _ABORTED_S
        self.requeued_by_slurm = job.restarts > self.task.restarts
        if self.requeued_by_slurm and preempted:
            self._end_child(Reason.preemption, "Slurm requeues the job for one of higher priority")
        elif self.requeued_by_slurm and (lost := self._down_by_now()):
            self._end_child(Reason.node_failure, f"Slurm requeues the job: {', '.join(lost)} failed")
        elif self.requeued_by_slurm:
            self._end_child(Reason.requeued, "Slurm requeues the job")
        elif job.overtime or job.state == "TIMEOUT":
            self._end_child(Reason.time_limit, "the time limit is over")
        elif job.state == "NODE_FAIL":
            self._end_child(Reason.node_failure, "a node failed")
        elif job.state == "PREEMPTED":
            self._end_child(Reason.preemption, "the job is preempted")
        elif job.failed or any(not found.is_echo for found in self.ledger.errors()):
            # The job script has ended already, while this task was slow to look.
            self._end_child(Reason.exception, "another rank failed")
        else:
            self._end_child(Reason.cancelled, "the job is cancelled")
        return None

    def _down_by_now(self) -> list[str]:
        """The nodes of this job that are down. Slurm ends the jobs of a node before it calls the node down."""
        for pause in (0.0, 0.5):
            time.sleep(pause)
            if lost := slurm_task.down(self.task.nodes):
                return lost
        return []

    def _reap(self) -> bool:
        if self.code is None:
            pid, status = os.waitpid(self.child, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code is not None

    def _end_child(self, reason: Reason, why: str) -> None:
        if self.ending is None:
            self.ending = (reason, why)
        if self.code is None:
            # Its helpers are in its session; a rank that is ended here has nothing left to say.
            processes.send(self.child, signal.SIGKILL, group=True)
            processes.send(self.child, signal.SIGKILL)

    # ------------------------------------------------------------------------------------ tasks other than the first

    def _follow(self) -> int:
        """The end of a task that decides nothing."""
        code = self._exit_code()
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
            _wait_to_be_killed(until=lambda: self.ledger.is_over() or self.signals.counts[signal.SIGTERM] > 0)
        return code

    def let_others_finish(self) -> None:
        """Wait until the run is over for all: a task that ends with the failure of another run ends the others."""
        if not self.first and self.code == 0:
            _wait_to_be_killed(until=lambda: self.ledger.is_over() or self.signals.counts[signal.SIGTERM] > 0)

    # ------------------------------------------------------------------------------------------- the first task

    def _conclude(self) -> int:
        """Record how the run ended and decide what comes next; does not return when the job starts again."""
        done = self.code == 0 and self._others_succeeded()
        code = self._exit_code()
        if self.ledger.superseded():
            self.ledger.log(f"start {self.task.start} is back, and another has taken the run over: it ends")
            return code
        if done:
            self.ledger.close(State.completed, Reason.completed, code=self.code)
            return 0
        reason, error = self._cause()
        if self.ending is not None:
            code = self.ledger.exit_codes().get(int(error["rank"] or 0) if error else 0, 0) or 1
            code = 128 - code if code < 0 else code
        if reason is Reason.cancelled:
            self.ledger.close(State.cancelled, reason, code=self.code)
            return code
        if self.cfg is None:
            self.ledger.close(State.failed, reason, code=self.code, error=error)
            return code
        # Also where this run is not tried again: others of the sweep must not meet the nodes.
        bad = self.ledger.nodes_to_avoid(self.cfg, below_floor=reason is Reason.memory_floor)
        if self.requeued_by_slurm and self.ending is not None:
            self.ledger.close(State.queued, reason, code=self.code, why=self.ending[1])
            self._avoid(str(self.task.job), bad)
            _wait_to_be_killed()
        decision = retry.decide(
            self.ledger.attempts_with_step(self.code),
            reason,
            error,
            max_attempts=self.cfg.cluster.max_attempts,
            gain=self._gain(self.cfg),
        )
        if isinstance(decision, retry.Stop):
            self.ledger.close(State.failed, reason, code=self.code, error=error, why=decision.why)
            return code
        return self._again(self.cfg, reason, error, decision.why, code, bad)

    def _gain(self, cfg: Config) -> retry.Gain:
        return retry.Gain(
            saved=self.ledger.saved_something(),
            began_from=self.ledger.began_from,
            every=cfg.training.checkpoint_every,
            margin_s=cfg.cluster.signal_margin_s,
            whole_limit=self.first_to_work and not cfg.cluster.inside_allocation,
        )

    def _others_succeeded(self) -> bool:
        """Wait for the other tasks, whose ranks may end later than this one or fail at their exit. False: one failed, or the
        job is being ended; ``ending`` says what happened then."""
        terms, begin = 0, time.monotonic()
        while True:
            codes = self.ledger.exit_codes()
            if any(code not in (0, STOPPED) for code in codes.values()):
                self.ending = (Reason.exception, "another rank failed")
                return False
            if len(codes) >= self.task.tasks:
                return all(code == 0 for code in codes.values())
            if self.signals.counts[signal.SIGTERM] > terms:
                terms = self.signals.counts[signal.SIGTERM]
                if self._on_term() is not None:
                    self.ending = (Reason.lost_rank, "a rank vanished and left no record")
                if self.ending is not None:
                    return False
            if time.monotonic() - begin > _LATE_S:
                late = sorted(set(range(self.task.tasks)) - set(codes))
                self.ledger.log(
                    f"ranks {late} did not say that they ended within {_LATE_S:.0f} s; not waiting for them"
                )
                return True
            self.signals.wait(0.2)

    def _again(
        self,
        cfg: Config,
        reason: Reason,
        error: dict[str, Any] | None,
        why: str,
        code: int,
        bad: Sequence[str],
    ) -> int:
        """Start again: by a requeue, or by the next job of the chain, without the nodes that are ``bad``."""
        if cfg.cluster.requeue and not cfg.cluster.inside_allocation:
            # Before Slurm is asked: it kills this process.
            self.ledger.close(State.queued, reason, code=self.code, error=error, why=why, ended=False)
            trouble = slurm_task.requeue(self.task, pause=self._pause, say=self.ledger.log)
            if trouble is None:
                self._avoid(str(self.task.job), bad)
                self.ledger.log("requeued")
                _wait_to_be_killed()
            self.ledger.log(f"scontrol requeue: {trouble}")
            why = f"Slurm does not requeue the job: {trouble}"
        elif jobs := self.ledger.rest_of_chain():
            self._avoid(jobs[0], bad)
            self.ledger.close(
                State.queued, reason, code=self.code, error=error, why=f"{why}, in the next job", ended=False
            )
            return STOPPED
        else:
            why = "cluster.requeue=false, and no job follows this one"
        self.ledger.close(State.failed, reason, code=self.code, error=error, why=why)
        return code

    def _pause(self, seconds: float) -> None:
        """Sleep, but no longer once Slurm ends the job: what is to be asked of it has to be asked then."""
        counts, end = self.signals.counts, time.monotonic() + seconds
        terms = counts[signal.SIGTERM]
        while counts[signal.SIGTERM] == terms and (left := end - time.monotonic()) > 0:
            self.signals.wait(left)

    def _avoid(self, job: str, nodes: Sequence[str]) -> None:
        if nodes and (trouble := slurm_task.avoid(job, nodes)) is not None:
            self.ledger.log(f"Slurm does not exclude {', '.join(nodes)} from job {job}: {trouble}")

    def _cause(self) -> tuple[Reason, dict[str, Any] | None]:
        """Why the attempt ended, and the error behind it where there is one."""
        if self.ending is not None and self.ending[0] not in (Reason.exception, Reason.lost_rank):
            return self.ending[0], None
        if self.code == STOPPED:
            assert self.cfg is not None
            job = slurm_task.ask(self.task, margin_s=self.cfg.cluster.signal_margin_s + 60)
            if self.preempted or job.preempted:
                return Reason.preemption, None
            return Reason.time_limit if job.overtime else Reason.asked, None
        found = failure.first_cause(self.ledger.settled_errors())
        if found is None and self.trouble is not None:
            return retry.classify(self.trouble), self.trouble
        if found is None:
            message = self.ending[1] if self.ending else "the rank left no record"
            error = {"rank": None, "type": "LostRank", "message": message, "traceback": ""}
            return Reason.lost_rank, error
        record = found.record()
        return retry.classify(record | {"traceback": found.traceback}), record

    def _exit_code(self) -> int:
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


def _wait_to_be_killed(until: Any = None) -> None:
    """Wait for the kill that a requeue brings; for ever, or until a condition holds."""
    while until is None or not until():
        time.sleep(1.0)
