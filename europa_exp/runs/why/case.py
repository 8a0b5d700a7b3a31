"""All that is known of the last attempt of a run, read once."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from europa_exp.runs.attempts import attempts_of
from europa_exp.runs.folder import RunFolder
from europa_exp.runs.slurm_record import SlurmState, node_names
from europa_exp.runs.status import State, Status
from europa_exp.runs.why.explanation import Cause, Evidence, Explanation, bounded
from europa_exp.runs.why.log_text import LogText

MOST_LOGS = 512
"""Most logs that are read to explain one run."""

_WAITING = (State.created, State.queued)
_OVER = ("failed", "lost")


@dataclass(frozen=True)
class ErrorRecord:
    """An error as ``status.json``, an attempt or a rank recorded it; what is missing is empty or None."""

    kind: str
    message: str
    traceback: str = ""
    rank: int | None = None
    node: str | None = None
    time: str = ""

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> ErrorRecord:
        rank, node = record.get("rank"), record.get("node")
        return cls(
            str(record.get("type") or ""),
            str(record.get("message") or ""),
            str(record.get("traceback") or ""),
            rank if isinstance(rank, int) else None,
            node if isinstance(node, str) and node else None,
            str(record.get("time") or ""),
        )

    @property
    def first_line(self) -> str:
        """Of the message."""
        return self.message.strip().partition("\n")[0]

    @property
    def said(self) -> str:
        """``ValueError: the message``, all lines of it, as Python prints it."""
        return ": ".join(part for part in (self.kind, self.message) if part)

    @property
    def headline(self) -> str:
        """``ValueError: its first line``."""
        return ": ".join(part for part in (self.kind, self.first_line) if part)


@dataclass(frozen=True)
class Case:
    """What the sources of belief say: ``state`` is the run's own or a better known one, ``error`` is that of ``status.json``.

    ``attempts`` are the oldest first, also one that recorded nothing; ``errors`` maps the ranks, in order, to their error records of the last attempt.
    ``world`` is the number of ranks and ``per_node`` that of a node, ``nodes`` those of the last attempt, in the order of
    ranks.
    """

    run: RunFolder
    status: Status
    state: str
    slurm: SlurmState | None
    job_logs: Sequence[Path]
    attempts: list[dict[str, Any]]
    error: ErrorRecord | None
    errors: dict[int, ErrorRecord]
    world: int | None
    per_node: int
    nodes: list[str]

    @property
    def last(self) -> dict[str, Any]:
        """The last attempt; empty where none was recorded."""
        return self.attempts[-1] if self.attempts else {}

    def node(self, rank: int | None) -> str | None:
        """Where a rank ran, as far as that is known."""
        if rank is None:
            return None
        if (error := self.errors.get(rank)) is not None and error.node is not None:
            return error.node
        if self.nodes:
            index = rank // max(self.per_node, 1)
            return self.nodes[index] if index < len(self.nodes) else None
        return self.status.host

    def log(self, rank: int) -> LogText:
        """What a rank wrote in the last attempt: nothing where an earlier one was the last that it began."""
        text = LogText.end_of(self.run.log(rank), self.run.path).last_attempt()
        begun = [_start(attempt) for attempt in self.attempts]
        if text.begun_by is not None and text.begun_by in begun[:-1] and text.begun_by != begun[-1]:
            return replace(text, lines=[])
        return text

    def launcher_log(self) -> LogText:
        """What the launcher wrote."""
        return LogText.end_of(self.run.launcher_log, self.run.path)

    def silent_ranks(self) -> list[int]:
        """Ranks that left no error record while others did."""
        if self.world is None or not self.errors:
            return []
        codes = self.status.exit_codes
        return [r for r in range(self.world) if r not in self.errors and codes.get(str(r)) != 0]

    def explained(
        self,
        cause: Cause,
        title: str,
        evidence: Iterable[Evidence] = (),
        advice: Iterable[str] = (),
        *,
        rank: int | None = None,
        node: str | None = None,
        sure: bool = True,
        behind: Sequence[int] = (),
    ) -> Explanation:
        """An explanation with bounded evidence; ``node`` is that of ``rank`` unless it is given."""
        node = self.node(rank) if node is None else node
        return Explanation(cause, title, sure, rank, node, bounded(evidence), tuple(advice), tuple(behind))


def gather(run: RunFolder, state: str | None, slurm: SlurmState | None, job_logs: Sequence[Path]) -> Case:
    """Read what ``explain`` was asked about; a record that is missing or broken is taken for an empty one."""
    status = run.status()
    state = state or str(status.state)
    attempts = attempts_of(status)
    if attempts and status.state in _WAITING and state in _OVER:
        attempts.append(_without_record(status, slurm, attempts))
    last = attempts[-1] if attempts else {}
    world, per_node = None, 1
    try:
        layout = run.config().parallelism
        world, per_node = layout.nodes * layout.gpus_per_node, layout.gpus_per_node
    except Exception:  # a broken configuration is no reason to say nothing
        pass
    nodes = last.get("nodes")
    if isinstance(nodes, list) and nodes:
        nodes = [str(node) for node in nodes]
    else:
        nodes = node_names(slurm.nodes) if slurm is not None else []
    return Case(
        run=run,
        status=status,
        state=state,
        slurm=slurm,
        job_logs=_of_last_job(job_logs, attempts),
        attempts=attempts,
        error=ErrorRecord.of(status.error) if status.error is not None else None,
        errors=_errors(run, attempts),
        world=world,
        per_node=per_node,
        nodes=nodes,
    )


def _start(attempt: Mapping[str, Any]) -> tuple[str, int] | None:
    """The job of an attempt, and how often it was restarted before; None for an attempt without a job."""
    restarts = str(attempt.get("start")).split(".")[1:2]
    if attempt.get("job_id") is None or not (restarts and restarts[0].isdecimal()):
        return None
    return str(attempt["job_id"]), int(restarts[0])


def _without_record(
    status: Status, slurm: SlurmState | None, attempts: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The attempt of a job that was to go on with the run, and ended before it could record that it began."""
    job = slurm.job_id if slurm is not None else status.extra.get("job_id")
    return {"n": len(attempts) + 1, "job_id": job, "started_at": attempts[-1].get("ended_at")}


def _of_last_job(job_logs: Sequence[Path], attempts: Sequence[Mapping[str, Any]]) -> list[Path]:
    """``job_logs`` without those of the jobs that only earlier attempts ran in."""
    jobs = [str(attempt.get("job_id")) for attempt in attempts]
    earlier = tuple(f"{job}_" for job in jobs[:-1] if job != jobs[-1])
    return [path for path in job_logs if not path.name.startswith(earlier)]


def _errors(run: RunFolder, attempts: Sequence[Mapping[str, Any]]) -> dict[int, ErrorRecord]:
    """The error records of the ranks, of the last attempt."""
    start = attempts[-1].get("start") if attempts else None
    earlier = [attempt.get("start") for attempt in attempts[:-1]]
    found: dict[int, ErrorRecord] = {}
    for path in (run.path / "logs").glob("rank_*.error.json"):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            rank = int(record["rank"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
        # A record without a start is from a run of this machine, where each attempt removes the old ones.
        of = record.get("start")
        if of in (None, start) or (start is None and of not in earlier):
            found[rank] = ErrorRecord.of(record | {"rank": rank})
    return dict(sorted(found.items()))
