"""The first task of a Slurm job: it keeps the record of the run, asks Slurm what its signals mean, and decides what comes next."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from typing import Any

from europa_exp.config.schema import Config
from europa_exp.launch import failure, processes, retry, slurm_exclude, slurm_task
from europa_exp.launch.slurm_turn import Turn, wait_to_be_killed
from europa_exp.runs.attempts import STOPPED, Reason
from europa_exp.runs.slurm_record import node_names
from europa_exp.runs.status import State

_ABORTED_S = 2.0
"""Seconds that a rank gets to notice that the step is being ended without a record of why."""

_GRACE_S = 5.0
"""Seconds that the ranks have to end when another one has failed. srun ends them at once, unless Slurm's controller is away."""

_LATE_S = 600.0
"""Seconds that the first task waits for the others after its own rank is done."""

_REPORTS_S = 3.0
"""Seconds that the first task waits for the memory reports of the others, to name all nodes below the floor at once."""


class FirstTurn(Turn):
    """The first task's part in one run."""

    requeued_by_slurm = False
    preempted = False
    """Whether Slurm asked to save and stop for a job of higher priority."""
    failure_seen: float | None = None
    """When this task learned that another one's rank had failed."""
    _terms = 0
    """Signals to end that were looked into."""
    _aborted_at: float | None = None
    """Until when the rank may go on, where it is unclear why it should not."""

    def begin(self, cfg: Config) -> None:
        self.ledger.begin(cfg)

    def asked_to_save(self) -> None:
        # Slurm forgets why it asked as soon as it ends the job.
        self.preempted = self.preempted or slurm_task.ask(self.task).preempted

    def look(self) -> None:
        counts = self.signals.counts
        terms = counts[signal.SIGTERM] + counts[signal.SIGINT]
        if terms > self._terms:
            self._terms = terms
            self._aborted_at = self._on_term()
        elif self._aborted_at is not None and time.monotonic() > self._aborted_at:
            self.end_child(Reason.lost_rank, "a rank vanished and left no record")
        elif self._another_failed():
            self.end_child(Reason.exception, "another rank failed")

    def let_others_finish(self) -> None:
        """Nothing to wait for: ``conclude`` waited already."""

    def conclude(self) -> int:
        """Record how the run ended and decide what comes next; does not return when the job starts again."""
        done = self.code == 0 and self._others_succeeded()
        code = self.exit_code()
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
        bad = self._nodes_to_avoid(self.cfg, below_floor=reason is Reason.memory_floor)
        if self.requeued_by_slurm and self.ending is not None:
            self.ledger.close(State.queued, reason, code=self.code, why=self.ending[1])
            self._avoid(str(self.task.job), bad)
            wait_to_be_killed()
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
                wait_to_be_killed()
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

    def _nodes_to_avoid(self, cfg: Config, *, below_floor: bool) -> list[str]:
        """What the job must leave out when it starts again, if that is more than it does already; empty otherwise.

        ``below_floor``: it ended because of the memory floor. Then the nodes below it are added to the list of the sweep, and
        the jobs of the sweep that wait leave them out from now on.
        """
        bad = self._bad_nodes(cfg) if below_floor else {}
        path = slurm_exclude.place_of(self.run)
        listed = set(bad)
        try:
            listed |= set(slurm_exclude.add(path, bad) if bad else slurm_exclude.listed(path))
        except OSError as error:
            self.ledger.log(f"{path} can't be written: {error}")
        if bad:
            with processes.held_back(*slurm_task.SENT):
                troubles = slurm_exclude.tell_waiting(self.run, listed)
            for trouble in troubles:
                self.ledger.log(f"a job of the sweep does not leave them out: {trouble}")
        if not listed:
            return []
        now_out = set(slurm_task.ask(self.task).exclude)
        before = now_out | set(node_names(cfg.cluster.exclude or ""))
        more = listed - now_out - set(node_names(cfg.cluster.nodelist or ""))
        return sorted(before | more) if more else []

    def _bad_nodes(self, cfg: Config) -> dict[str, str]:
        """The nodes below the memory floor, with why."""
        end = time.monotonic() + _REPORTS_S
        while True:
            bad, reported = self.ledger.below_floor(cfg.cluster)
            if reported >= self.task.tasks or time.monotonic() > end:
                break
            time.sleep(0.1)
        self.ledger.log(f"left out from now on: {'; '.join(bad.values())}")
        return bad

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

    # ------------------------------------------------------------------------------------------------ asking Slurm

    def _on_term(self) -> float | None:
        """The first task got SIGTERM: find out why. Returns until when the rank may go on, where that is unclear."""
        job = slurm_task.ask(self.task, margin_s=1)
        self.ledger.log(f"SIGTERM; Slurm says {job}")
        preempted = self.preempted = self.preempted or job.preempted
        if job.state in ("RUNNING", ""):
            if not preempted and self.ledger.settled_errors():
                self.end_child(Reason.exception, "another rank failed")
                return None
            if self.code is None:
                processes.send(self.child, signal.SIGUSR2)
            # Before a preemption there is time to save. Otherwise srun is ending the step, and a rank that waits for a lost
            # one in a collective would wait for longer than Slurm does.
            return None if preempted else time.monotonic() + _ABORTED_S
        self.requeued_by_slurm = job.restarts > self.task.restarts
        if self.requeued_by_slurm and preempted:
            self.end_child(Reason.preemption, "Slurm requeues the job for one of higher priority")
        elif self.requeued_by_slurm and (lost := self._down_by_now()):
            self.end_child(Reason.node_failure, f"Slurm requeues the job: {', '.join(lost)} failed")
        elif self.requeued_by_slurm:
            self.end_child(Reason.requeued, "Slurm requeues the job")
        elif job.overtime or job.state == "TIMEOUT":
            self.end_child(Reason.time_limit, "the time limit is over")
        elif job.state == "NODE_FAIL":
            self.end_child(Reason.node_failure, "a node failed")
        elif job.state == "PREEMPTED":
            self.end_child(Reason.preemption, "the job is preempted")
        elif job.failed or any(not found.is_echo for found in self.ledger.errors()):
            # The job script has ended already, while this task was slow to look.
            self.end_child(Reason.exception, "another rank failed")
        else:
            self.end_child(Reason.cancelled, "the job is cancelled")
        return None

    def _another_failed(self) -> bool:
        """Whether a rank failed, and the others had their time to end of it. Where runs follow srun ends none of them."""
        if all(code in (0, STOPPED) for code in self.ledger.exit_codes().values()):
            return False
        if self.failure_seen is None:
            self.failure_seen = time.monotonic()
        return self.more or time.monotonic() > self.failure_seen + _GRACE_S

    def _down_by_now(self) -> list[str]:
        """The nodes of this job that are down. Slurm ends the jobs of a node before it calls the node down."""
        for pause in (0.0, 0.5):
            time.sleep(pause)
            if lost := slurm_task.down(self.task.nodes):
                return lost
        return []
