"""One task of a Slurm job: it watches over one rank, and the first task also keeps the record and decides what comes next.

The rank itself is a child of this process, a new one for each run of the job (``launch.points_per_job``): no state of torch
survives from one run to the next, and when a rank dies of a signal somebody is left to say so. This process imports no torch.

How a job ends:

- A rank that fails leaves ``logs/rank_<r>.error.json``; if it can't, its task does. The task ends with the rank's exit code,
  and srun (--kill-on-bad-exit) sends SIGTERM to all others. The first task gathers the errors of this start, finds the one
  that caused the rest (``failure``), and asks ``retry`` whether the job starts again.
- Slurm's USR2 (before the time limit, at a preemption) goes to the ranks. They agree on a step, save, and end with STOPPED.
- SIGTERM means a cancelled job, a preemption, a requeue, or a step that srun ends. Only the first task asks Slurm which;
  the ranks ignore it.

Starting again means that the first task calls ``scontrol requeue`` and every task waits to be killed: one that ended would
make Slurm call the job failed or, worse, completed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from europa_exp.config.schema import Config
from europa_exp.launch import environment, failure, host_memory, processes, rendezvous, retry, slurm_task
from europa_exp.launch.failure import Failure
from europa_exp.launch.slurm_task import Task
from europa_exp.launch.worker import RankSpec, leave, record_error, run_rank
from europa_exp.runs import attempts
from europa_exp.runs.attempts import STOPPED, Reason
from europa_exp.runs.files import append_line, read_lines, replace_text
from europa_exp.runs.folder import RunFolder
from europa_exp.runs.status import ENDED, State, now

SETTLE_S = 1.0
"""Seconds that the first task waits for the error that caused the one it sees. After SIGTERM Slurm leaves KillWait, 30 s by
default, for all that is to be done here."""

_ABORTED_S = 2.0
"""Seconds that a rank gets to notice that the step is being ended without a record of why."""

_LATE_S = 600.0
"""Seconds that the first task waits for the others after its own rank is done."""

_BEGIN_S = 120.0
"""Seconds that a task which failed at once waits for the first one to begin."""

_REPORTS_S = 3.0
"""Seconds that the first task waits for the memory reports of the others, to name all nodes below the floor at once."""

TASKS_FILE = "tasks.jsonl"
"""Under ``logs/``: one line for each rank of each attempt, with its exit code, when it has ended."""

_WATCHED = (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)


def work(runs: Sequence[RunFolder], folder: Path, entry: str) -> dict[str, str]:
    """Be this task of the job: take part in each run in turn; returns run -> state when all went well.

    ``folder`` is the job's own folder, ``entry`` the training function. After a failure this does not return: the process
    ends with the exit code of the first rank of its own that failed, or waits to be requeued.
    """
    signals = _Signals()
    worst = 0
    try:
        task = Task.here(os.environ)
    except slurm_task.LayoutError as error:
        print(error, file=sys.stderr)
        leave(1)
    for turn, run in enumerate(runs):
        part = _Turn(task, run, entry, signals, turn=turn, more=turn + 1 < len(runs))
        code = part.take()
        if worst and code == 0 and turn + 1 == len(runs):
            part.let_others_finish()
        worst = worst or code
    if worst:
        leave(worst)
    return {run.name: str(run.status().state) for run in runs} if task.rank == 0 else {}


class TooManyAttemptsError(Exception):
    """Slurm keeps starting a run that had its attempts."""


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
    """This task's part in one run. ``more``: other runs follow in this job."""

    def __init__(
        self, task: Task, run: RunFolder, entry: str, signals: _Signals, *, turn: int, more: bool
    ) -> None:
        self.task, self.run, self.entry, self.signals = task, run, entry, signals
        self.turn, self.more = turn, more
        self.first = task.rank == 0
        self.cfg: Config | None = None
        self.child = 0
        self.code: int | None = None
        """Exit code of the rank's process, negative for a signal; None while it runs."""
        self.requeued_by_slurm = False
        self.preempted = False
        """Whether Slurm asked to save and stop for a job of higher priority."""
        self.ending: tuple[Reason, str] | None = None
        """Why this task ended its rank, where it did."""

    # ------------------------------------------------------------------------------------------------ the run

    def take(self) -> int:
        """Run the rank to its end and record it; returns the exit code for this task."""
        if self._over_before():
            return 0
        with contextlib.suppress(OSError):
            # An earlier attempt's record must not explain this one's end.
            self.run.error_file(self.task.rank).unlink(missing_ok=True)
        try:
            self.cfg = cfg = self.run.config()
            self.task.check(cfg)
            if self.first:
                self._begin(cfg)
            self._look_at_memory(cfg)
            spec = self._spec(cfg)
        except Exception as error:
            record_error(self.run, self.task.rank, error, start=self.task.start)
            self.code = 1
        else:
            self._fork(spec, cfg)
            self._watch()
        assert self.code is not None
        if self.code not in (0, STOPPED):
            self._complete_record()
        self._say_that_it_ended()
        if self.first:
            return self._conclude()
        return self._follow()

    def _over_before(self) -> bool:
        """Whether the run was over before this start of the job: completed by an earlier one, or cancelled in the queue."""
        status = self.run.status()
        if status.state not in ENDED:
            return False
        return not any(a.get("start") == self.task.start for a in attempts.attempts_of(status))

    def _begin(self, cfg: Config) -> None:
        """The first task: open the attempt, unless there were too many."""
        task, run = self.task, self.run
        number = attempts.open_attempt(
            run.path, job_id=task.job_id, start=task.start, nodes=list(task.nodes), lost=self._why_lost()
        )
        # Slurm starts a job again by itself after a failed prolog or node, whatever the job asked for: once more is fine.
        if number > cfg.cluster.max_attempts + 1:
            raise TooManyAttemptsError(
                f"Slurm started attempt {number}, and cluster.max_attempts={cfg.cluster.max_attempts}"
            )
        run.set_state(
            State.running, pid=None, host=task.host, error=None, exit_codes={}, ended_at=None, reason=None
        )
        saved = newest_checkpoint(run.checkpoints)
        if saved is not None:
            how = f"goes on from step {saved}"
        elif number == 1:
            how = "starts"
        elif cfg.training.checkpoint_every:
            how = "starts anew: no checkpoint was complete yet"
        else:
            how = "starts anew: it keeps no checkpoints (training.checkpoint_every=0)"
        self._log(
            f"attempt {number}, job {task.job_id}, {task.tasks} ranks on {', '.join(task.nodes)}: {how}"
        )

    def _why_lost(self) -> Reason:
        """What to say of an earlier attempt that left no end: its first node failed, or everything there was killed at once."""
        for attempt in attempts.attempts_of(self.run.status()):
            nodes = attempt.get("nodes")
            if attempt.get("ended_at") is None and isinstance(nodes, list) and slurm_task.down(nodes):
                return Reason.node_failure
        return Reason.requeued if self.task.restarts else Reason.lost_rank

    def _look_at_memory(self, cfg: Config) -> None:
        task, per_node = self.task, cfg.parallelism.gpus_per_node
        found = host_memory.report()
        socket = host_memory.socket_of(found, task.local_rank, per_node)
        line = {
            "time": now(),
            "start": task.start,
            "rank": task.rank,
            "node": task.host,
            "socket": socket,
            "available_gib": found["available"],
            **(found["nodes"][socket] if socket is not None else {}),
        }
        try:
            append_line(self.run.path / "logs" / host_memory.REPORT_FILE, json.dumps(line))
        except OSError as error:
            self._log(f"rank {task.rank}: the memory of its host can't be recorded: {error}")
        if (why := host_memory.below(line, cfg.cluster)) is not None:
            raise host_memory.MemoryFloorError(why)

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
                elif self.more and any(code not in (0, STOPPED) for code in self._ended().values()):
                    self._end_child(Reason.exception, "another rank failed")
            elif (self.more or counts[signal.SIGTERM]) and self._ended_by_first():
                self._end_child(Reason.cancelled, "the run is over")
            self.signals.wait(0.5 if counts[signal.SIGTERM] else 2.0)

    def _on_term(self) -> float | None:
        """The first task got SIGTERM: find out why. Returns until when the rank may go on, where that is unclear."""
        job = slurm_task.ask(self.task, margin_s=1)
        self._log(f"SIGTERM; Slurm says {job}")
        preempted = self.preempted = self.preempted or job.preempted
        if job.state in ("RUNNING", ""):
            if not preempted and self._settled_errors():
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
        elif job.failed or any(not found.is_echo for found in self._errors()):
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

    def _complete_record(self) -> None:
        """Leave an error record for a rank that could not, unless this task ended it."""
        if self.ending is not None or self._own_error() is not None:
            return
        assert self.code is not None
        found = failure.examine(self.run, self.task.rank, self.code)
        assert found is not None
        record = {
            "rank": found.rank,
            "type": found.type,
            "message": found.message,
            "traceback": found.traceback,
            "time": now(),
            "exit_code": self.code,
            "start": self.task.start,
            "node": self.task.host,
        }
        try:
            replace_text(self.run.error_file(self.task.rank), json.dumps(record, indent=2) + "\n")
        except OSError as error:
            print(f"{self.run.error_file(self.task.rank)} can't be written: {error}", file=sys.stderr)

    # ------------------------------------------------------------------------------------ tasks other than the first

    def _follow(self) -> int:
        """The end of a task that decides nothing."""
        code = self._exit_code()
        if code == 0:
            return 0
        # A failure ends the step; the first task may not even have begun, and nobody else would decide.
        begun_until = time.monotonic() + _BEGIN_S
        while (
            not self._begun() and time.monotonic() < begun_until and not self.signals.counts[signal.SIGTERM]
        ):
            self.signals.wait(0.2)
        if code == STOPPED or self.more:
            # Ending now would end the first task before it has asked Slurm, or the runs that follow. It finds the record.
            _wait_to_be_killed(
                until=lambda: self._ended_by_first() or self.signals.counts[signal.SIGTERM] > 0
            )
        return code

    def _begun(self) -> bool:
        return any(a.get("start") == self.task.start for a in attempts.attempts_of(self.run.status()))

    def let_others_finish(self) -> None:
        """Wait until the run is over for all: a task that ends with a failure of an earlier run ends the others."""
        if not self.first:
            _wait_to_be_killed(
                until=lambda: self._ended_by_first() or self.signals.counts[signal.SIGTERM] > 0
            )

    def _ended_by_first(self) -> bool:
        status = self.run.status()
        return status.state in ENDED and any(
            a.get("start") == self.task.start and a.get("ended_at") for a in attempts.attempts_of(status)
        )

    # ------------------------------------------------------------------------------------------- the first task

    def _conclude(self) -> int:
        """Record how the run ended and decide what comes next; does not return when the job starts again."""
        if self.code == 0 and self._others_succeeded():
            self._close(State.completed, Reason.completed)
            return 0
        code = self._exit_code()
        reason, error = self._cause()
        if self.ending is not None:
            code = self._ended().get(int(error["rank"] or 0) if error else 0, 0) or 1
            code = 128 - code if code < 0 else code
        if reason is Reason.cancelled:
            self._close(State.cancelled, reason)
            return code
        if self.cfg is None:
            self._close(State.failed, reason, error=error)
            return code
        if self.requeued_by_slurm and self.ending is not None:
            self._close(State.queued, reason, why=self.ending[1])
            _wait_to_be_killed()
        decision = retry.decide(
            self._attempts_with_step(), reason, error, max_attempts=self.cfg.cluster.max_attempts
        )
        if isinstance(decision, retry.Stop):
            self._close(State.failed, reason, error=error, why=decision.reason)
            return code
        return self._again(self.cfg, reason, error, decision.why, code)

    def _others_succeeded(self) -> bool:
        """Wait for the other tasks, whose ranks may end later than this one or fail at their exit. False: one failed, or the
        job is being ended; ``ending`` says what happened then."""
        terms, begin = 0, time.monotonic()
        while True:
            codes = self._ended()
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
                self._log(
                    f"ranks {late} did not say that they ended within {_LATE_S:.0f} s; not waiting for them"
                )
                return True
            self.signals.wait(0.2)

    def _again(self, cfg: Config, reason: Reason, error: dict[str, Any] | None, why: str, code: int) -> int:
        """Start again: by a requeue, or by the next job of the chain."""
        if cfg.cluster.requeue and not cfg.cluster.inside_allocation:
            bad = self._bad_nodes() if reason is Reason.memory_floor else []
            # Before Slurm is asked: it kills this process.
            self._close(State.queued, reason, error=error, why=why, ended=False)
            trouble = slurm_task.requeue(self.task)
            if trouble is None or slurm_task.ask(self.task).restarts > self.task.restarts:
                # In the second case Slurm was faster.
                if bad and (trouble := slurm_task.avoid(self.task, bad)) is not None:
                    self._log(f"Slurm does not exclude {', '.join(bad)}: {trouble}")
                self._log("requeued")
                _wait_to_be_killed()
            self._log(f"scontrol requeue: {trouble}")
            why = f"{reason}, and Slurm does not requeue the job: {trouble}"
        elif self._next_in_chain():
            self._close(State.queued, reason, error=error, why=f"{why}, in the next job", ended=False)
            return STOPPED
        else:
            why = f"{reason}, and cluster.requeue=false with no job to follow this one"
        self._close(State.failed, reason, error=error, why=why)
        return code

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
        found = failure.first_cause(self._settled_errors())
        if found is None:
            message = self.ending[1] if self.ending else "the rank left no record"
            error = {"rank": None, "type": "LostRank", "message": message, "traceback": ""}
            return Reason.lost_rank, error
        record = found.record()
        return retry.classify(record | {"traceback": found.traceback}), record

    def _close(
        self,
        state: State,
        reason: Reason,
        *,
        error: dict[str, Any] | None = None,
        why: str | None = None,
        ended: bool = True,
    ) -> None:
        """End the attempt and set the state of the run, in one write."""
        short = {k: error[k] for k in ("rank", "type", "message")} if error else None
        done = attempts.closed(
            self.run.status(), self.task.start, reason, step=self._last_step(), error=short
        )
        fields: dict[str, Any] = {"attempts": done, "reason": why or str(reason)}
        if error is None and state is State.failed:
            error = {"rank": None, "type": str(reason), "message": why or str(reason), "traceback": ""}
        if ended:
            fields["error"] = error
            fields["exit_codes"] = {str(rank): code for rank, code in sorted(self._ended().items())}
        self._log(f"{state}: {why or reason}")
        for attempt in range(3):
            try:
                self.run.set_state(state, **fields)
                return
            except OSError as trouble:
                self._log(f"the state {state} can't be recorded: {trouble}")
                time.sleep(0.2 * attempt)

    def _attempts_with_step(self) -> list[dict[str, Any]]:
        found = attempts.attempts_of(self.run.status())
        if found:
            found[-1]["step"] = self._last_step()
        return found

    def _last_step(self) -> int | None:
        """The last step of this attempt that is known to be done: logged, or saved."""
        mine = next(
            (a for a in attempts.attempts_of(self.run.status()) if a.get("start") == self.task.start), None
        )
        since = str(mine.get("started_at", "")) if mine else ""
        rows: list[dict[str, Any]] = []
        with contextlib.suppress(Exception):
            rows = [row for row in self.run.metrics() if str(row.get("time", "")) >= since]
        steps = [row["step"] for row in rows[-1:]]
        if self.code == STOPPED and (saved := newest_checkpoint(self.run.checkpoints)) is not None:
            steps.append(saved)
        return max(steps, default=None)

    def _bad_nodes(self) -> list[str]:
        """The nodes below the memory floor, added to the list of the sweep; what the job must avoid from now on."""
        assert self.cfg is not None
        end = time.monotonic() + _REPORTS_S
        while True:
            bad, reported = self._below_floor(self.cfg)
            if reported >= self.task.tasks or time.monotonic() > end:
                break
            time.sleep(0.1)
        self._log(f"left out from now on: {'; '.join(bad.values())}")
        excluded = set(bad)
        try:
            excluded |= set(host_memory.exclude(exclude_file(self.run), bad))
        except OSError as error:
            self._log(f"{exclude_file(self.run)} can't be written: {error}")
        return sorted(excluded | set(slurm_task.ask(self.task).exclude))

    def _below_floor(self, cfg: Config) -> tuple[dict[str, str], int]:
        """The nodes whose ranks reported too little memory, with why, and how many ranks reported in this start."""
        bad: dict[str, str] = {}
        reported = 0
        for line in read_lines(self.run.path / "logs" / host_memory.REPORT_FILE):
            if line.get("start") != self.task.start:
                continue
            reported += 1
            if (why := host_memory.below(line, cfg.cluster)) is not None:
                bad.setdefault(str(line.get("node")), why)
        return bad, reported

    def _next_in_chain(self) -> bool:
        """Whether a later job waits to continue this run."""
        jobs = self.run.status().extra.get("job_ids")
        return isinstance(jobs, list) and self.task.job_id in jobs and jobs[-1] != self.task.job_id

    # ------------------------------------------------------------------------------------------------- errors

    def _settled_errors(self) -> list[Failure]:
        """The errors of this start, once one of them is nobody's echo, or none came for a while."""
        end = time.monotonic() + SETTLE_S
        while True:
            found = self._errors()
            cause = failure.first_cause(found)
            if (cause is not None and not cause.is_echo) or time.monotonic() > end:
                return found
            time.sleep(0.1)

    def _errors(self) -> list[Failure]:
        return [_as_failure(record) for record in self._error_records()]

    def _error_records(self) -> list[dict[str, Any]]:
        found = []
        for path in sorted((self.run.path / "logs").glob("rank_*.error.json")):
            record = failure.error_record(path)
            if record is not None and record.get("start") == self.task.start:
                found.append(record)
        return found

    def _say_that_it_ended(self) -> None:
        task = self.task
        line = {
            "time": now(),
            "start": task.start,
            "rank": task.rank,
            "node": task.host,
            "code": self.code,
            "ended_by_us": self.ending is not None,
        }
        try:
            append_line(self.run.path / "logs" / TASKS_FILE, json.dumps(line))
        except OSError as error:
            self._log(f"rank {task.rank} ended with exit code {self.code}, which can't be recorded: {error}")

    def _ended(self) -> dict[int, int]:
        """Exit codes of the ranks that have ended by themselves in this start of the job, negative for a signal."""
        return {
            int(line["rank"]): int(line["code"])
            for line in read_lines(self.run.path / "logs" / TASKS_FILE)
            if line.get("start") == self.task.start and not line.get("ended_by_us")
        }

    def _own_error(self) -> dict[str, Any] | None:
        record = failure.error_record(self.run.error_file(self.task.rank))
        return record if record is not None and record.get("start") == self.task.start else None

    def _exit_code(self) -> int:
        """The rank's exit code as a shell would give it: 128 and the number of a signal."""
        assert self.code is not None
        return 128 - self.code if self.code < 0 else self.code

    def _log(self, text: str) -> None:
        line = f"{now()} {text}\n"
        try:
            with open(self.run.launcher_log, "a", encoding="utf-8") as file:
                file.write(line)
        except OSError:
            print(f"{self.run.name}: {line}", end="", file=sys.stderr, flush=True)


def exclude_file(run: RunFolder) -> Path:
    """Where the nodes lie that the sweep of a run (a run without one: the run) must not get again."""
    stem = re.sub(r"[^A-Za-z0-9._=,+@-]+", "_", str(run.provenance().get("sweep") or run.name))
    return run.path.parent / ".sweeps" / f"{stem}.exclude.json"


def newest_checkpoint(folder: Path) -> int | None:
    """Step of the newest complete checkpoint; one that was cut while being written has no ``.metadata``. None without any."""
    with contextlib.suppress(OSError):
        steps = [
            int(found[1])
            for entry in os.scandir(folder)
            if (found := re.fullmatch(r"step-(\d+)", entry.name)) and Path(entry.path, ".metadata").is_file()
        ]
        return max(steps, default=None)
    return None


def _as_failure(record: dict[str, Any]) -> Failure:
    return Failure(
        int(record.get("rank") or 0),
        str(record.get("type", "Exception")),
        str(record.get("message", "")),
        str(record.get("traceback", "")),
        failure.seconds(record.get("time"), time.time()),
    )


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
