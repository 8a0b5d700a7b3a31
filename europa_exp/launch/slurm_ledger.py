"""What tasks of a Slurm job write down about a run, and read of each other: attempts, errors, exit codes, memory.

The first task alone writes ``status.json``. Every task leaves its error record and appends to two files of the run's
``logs/``; a line or a record belongs to the start of the job that it names, so that nothing of an earlier attempt is taken for
news.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from typing import Any

from europa_exp.config.schema import Cluster, Config
from europa_exp.launch import failure, host_memory, slurm_task
from europa_exp.launch.failure import Failure
from europa_exp.launch.slurm_task import Task
from europa_exp.runs import attempts, checkpoints
from europa_exp.runs.attempts import STOPPED, Reason
from europa_exp.runs.files import append_line, read_lines, replace_text
from europa_exp.runs.folder import RunFolder
from europa_exp.runs.status import ENDED, State, now

SETTLE_S = 1.0
"""Seconds that the first task waits for the error that caused the one it sees. After SIGTERM Slurm leaves KillWait, 30 s by
default, for all that is to be done here."""

TASKS_FILE = "tasks.jsonl"
"""Under ``logs/``: one line for each rank of each attempt, with its exit code, when it has ended."""


class TooManyAttemptsError(Exception):
    """Slurm keeps starting a run that had its attempts."""


class Ledger:
    """The records of one run, for one task of one start of a job."""

    def __init__(self, task: Task, run: RunFolder) -> None:
        self.task, self.run = task, run
        self.began_from: int | None = None
        """The step of the checkpoint that this attempt goes on from; None for one that begins with nothing."""
        self._saved_before = 0

    # --------------------------------------------------------------------------------------------- the attempt

    def over_before(self) -> State | None:
        """How the run ended if it was over before this start of the job: by an earlier one, or cancelled in the queue."""
        status = self.run.status()
        if status.state not in ENDED or any(
            a.get("start") == self.task.start for a in attempts.attempts_of(status)
        ):
            return None
        return status.state

    def begin(self, cfg: Config) -> None:
        """The first task: open the attempt. Raises TooManyAttemptsError, and RunFolderError when what was saved is gone."""
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
        folder = checkpoints.place(run, cfg.cluster.checkpoint_dir)
        for cut in checkpoints.remove_cut(folder):
            self.log(f"removed {cut}: an earlier attempt did not finish writing it")
        self.began_from = saved = checkpoints.resume_step(run, folder)
        self._saved_before = len(checkpoints.saved_steps(run))
        if saved is not None:
            how = f"goes on from step {saved}"
            if (newest := checkpoints.newest_saved(run) or saved) > saved:
                how += f"; step {newest} was saved and is gone"
        elif number == 1:
            how = "starts"
        elif cfg.training.checkpoint_every:
            how = "starts anew: no checkpoint was complete yet"
        else:
            how = "starts anew: it keeps no checkpoints (training.checkpoint_every=0)"
        self.log(f"attempt {number}, job {task.job_id}, {task.tasks} ranks on {', '.join(task.nodes)}: {how}")

    def _why_lost(self) -> Reason:
        """What to say of an earlier attempt that left no end: its first node failed, or everything there was killed at once."""
        for attempt in attempts.attempts_of(self.run.status()):
            nodes = attempt.get("nodes")
            if attempt.get("ended_at") is None and isinstance(nodes, list) and slurm_task.down(nodes):
                return Reason.node_failure
        return Reason.requeued if self.task.restarts else Reason.lost_rank

    def begun(self) -> bool:
        return any(a.get("start") == self.task.start for a in attempts.attempts_of(self.run.status()))

    def superseded(self) -> bool:
        """Whether a later start has taken the run over: this one's node hung, Slurm gave it up, and it came back."""
        found = [attempt.get("start") for attempt in attempts.attempts_of(self.run.status())]
        return self.task.start in found[:-1]

    def is_over(self) -> bool:
        status = self.run.status()
        return status.state in ENDED and any(
            a.get("start") == self.task.start and a.get("ended_at") for a in attempts.attempts_of(status)
        )

    def close(
        self,
        state: State,
        reason: Reason,
        *,
        code: int | None,
        error: dict[str, Any] | None = None,
        why: str | None = None,
        ended: bool = True,
    ) -> None:
        """End the attempt and set the state of the run, in one write. ``why`` adds to the reason, and does not repeat it."""
        told = f"{reason}: {why}" if why else str(reason)
        short = {k: error[k] for k in ("rank", "type", "message")} if error else None
        done = attempts.closed(
            self.run.status(), self.task.start, reason, step=self._last_step(code), error=short
        )
        fields: dict[str, Any] = {"attempts": done, "reason": told}
        if error is None and state is State.failed:
            error = {"rank": None, "type": str(reason), "message": why or str(reason), "traceback": ""}
        if ended:
            fields["error"] = error
            fields["exit_codes"] = {
                str(rank): ended_with for rank, ended_with in sorted(self.exit_codes().items())
            }
        self.log(f"{state}: {told}")
        for attempt in range(3):
            try:
                self.run.set_state(state, **fields)
                return
            except OSError as trouble:
                self.log(f"the state {state} can't be recorded: {trouble}")
                time.sleep(0.2 * attempt)

    def attempts_with_step(self, code: int | None) -> list[dict[str, Any]]:
        found = attempts.attempts_of(self.run.status())
        if found:
            found[-1]["step"] = self._last_step(code)
        return found

    def _last_step(self, code: int | None) -> int | None:
        """The last step of this attempt that is known to be done: logged, or saved."""
        mine = next(
            (a for a in attempts.attempts_of(self.run.status()) if a.get("start") == self.task.start), None
        )
        since = str(mine.get("started_at", "")) if mine else ""
        rows: list[dict[str, Any]] = []
        with contextlib.suppress(Exception):
            rows = [row for row in self.run.metrics() if str(row.get("time", "")) >= since]
        steps = [row["step"] for row in rows[-1:]]
        if code == STOPPED and (saved := checkpoints.newest(self.run.checkpoints)) is not None:
            steps.append(saved)
        return max(steps, default=None)

    def saved_something(self) -> bool:
        """Whether this attempt finished a checkpoint. The folder tells, too, where that could not be recorded."""
        newest = checkpoints.newest(self.run.checkpoints)
        more = newest is not None and (self.began_from is None or newest > self.began_from)
        return more or len(checkpoints.saved_steps(self.run)) > self._saved_before

    def rest_of_chain(self) -> list[str]:
        """The jobs that wait to continue this run after this one, in order; none when it is the last."""
        jobs = self.run.status().extra.get("job_ids")
        if not isinstance(jobs, list) or self.task.job_id not in jobs:
            return []
        return [str(job) for job in jobs[jobs.index(self.task.job_id) + 1 :]]

    # ------------------------------------------------------------------------------------- what ranks leave

    def complete(self, code: int) -> None:
        """Leave an error record for a rank that ended with ``code`` and could not leave one itself."""
        if self.own_error() is not None:
            return
        found = failure.examine(self.run, self.task.rank, code)
        assert found is not None
        record = {
            "rank": found.rank,
            "type": found.type,
            "message": found.message,
            "traceback": found.traceback,
            "time": now(),
            "exit_code": code,
            "start": self.task.start,
            "node": self.task.host,
        }
        try:
            replace_text(self.run.error_file(self.task.rank), json.dumps(record, indent=2) + "\n")
        except OSError as error:
            print(f"{self.run.error_file(self.task.rank)} can't be written: {error}", file=sys.stderr)

    def own_error(self) -> dict[str, Any] | None:
        record = failure.error_record(self.run.error_file(self.task.rank))
        return record if record is not None and record.get("start") == self.task.start else None

    def settled_errors(self) -> list[Failure]:
        """The errors of this start, once one of them is nobody's echo, or none came for a while."""
        end = time.monotonic() + SETTLE_S
        while True:
            found = self.errors()
            cause = failure.first_cause(found)
            if (cause is not None and not cause.is_echo) or time.monotonic() > end:
                return found
            time.sleep(0.1)

    def errors(self) -> list[Failure]:
        return [_as_failure(record) for record in self._error_records()]

    def _error_records(self) -> list[dict[str, Any]]:
        found = []
        for path in sorted((self.run.path / "logs").glob("rank_*.error.json")):
            record = failure.error_record(path)
            if record is not None and record.get("start") == self.task.start:
                found.append(record)
        return found

    def say_ended(self, code: int, *, by_us: bool) -> None:
        task = self.task
        line = {
            "time": now(),
            "start": task.start,
            "rank": task.rank,
            "node": task.host,
            "code": code,
            "ended_by_us": by_us,
        }
        try:
            append_line(self.run.path / "logs" / TASKS_FILE, json.dumps(line))
        except OSError as error:
            self.log(f"rank {task.rank} ended with exit code {code}, which can't be recorded: {error}")

    def exit_codes(self) -> dict[int, int]:
        """Exit codes of the ranks that have ended by themselves in this start of the job, negative for a signal."""
        return {
            int(line["rank"]): int(line["code"])
            for line in read_lines(self.run.path / "logs" / TASKS_FILE)
            if line.get("start") == self.task.start and not line.get("ended_by_us")
        }

    # -------------------------------------------------------------------------------------------------- memory

    def report_memory(self, local_world_size: int, cluster: Cluster) -> None:
        """Record what memory this rank finds. Raises MemoryFloorError when that is too little."""
        task = self.task
        found = host_memory.report()
        socket = host_memory.socket_of(found, task.local_rank, local_world_size)
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
            self.log(f"rank {task.rank}: the memory of its host can't be recorded: {error}")
        if (why := host_memory.below(line, cluster)) is not None:
            raise host_memory.MemoryFloorError(why)

    def below_floor(self, cluster: Cluster) -> tuple[dict[str, str], int]:
        """The nodes whose ranks reported too little memory, with why, and how many ranks reported in this start."""
        bad: dict[str, str] = {}
        reported = 0
        for line in read_lines(self.run.path / "logs" / host_memory.REPORT_FILE):
            if line.get("start") != self.task.start:
                continue
            reported += 1
            if (why := host_memory.below(line, cluster)) is not None:
                bad.setdefault(str(line.get("node")), why)
        return bad, reported

    def log(self, text: str) -> None:
        line = f"{now()} {text}\n"
        try:
            with open(self.run.launcher_log, "a", encoding="utf-8") as file:
                file.write(line)
        except OSError:
            print(f"{self.run.name}: {line}", end="", file=sys.stderr, flush=True)


def _as_failure(record: dict[str, Any]) -> Failure:
    return Failure(
        int(record.get("rank") or 0),
        str(record.get("type", "Exception")),
        str(record.get("message", "")),
        str(record.get("traceback", "")),
        failure.seconds(record.get("time"), time.time()),
    )
