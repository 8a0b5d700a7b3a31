"""Where runs stand: the run's own record first, squeue second, sacct third, and for local runs the process that drives them.

A record can lag behind: nobody writes "failed" when a node loses power. Slurm can't see what a run did, and its accounting
can be off, empty or late. So a record that has ended is believed; one that claims to go on is held against the queue.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from europa_exp.launch import squeue
from europa_exp.launch.agents import AgentRecord, agents
from europa_exp.launch.slurm_runs import jobs_of, unknown_jobs
from europa_exp.runs.attempts import attempts_of
from europa_exp.runs.folder import RunFolder, RunFolderError
from europa_exp.runs.lookup import Entry
from europa_exp.runs.slurm_record import CANCELLED, SUCCESS, Answer, SlurmState
from europa_exp.runs.status import STATUS_FILE, State, Status

LOST = "lost"
"""State of a run that claims to go on, or to wait, though nobody works on it any more."""

LOADING = "loading"
"""State of a run whose job has begun and whose ranks have not."""

BAD = frozenset({"failed", LOST, "unknown"})
"""States that are no success and that nobody asked for."""

OVER = frozenset({"completed", "failed", "cancelled", LOST, "unknown"})
"""States after which nothing more happens by itself."""

_SUBMITTING_S = 120.0
"""Longest time between the record of a submission and the job's id in it, while sbatch works."""

_WAITING = (State.created, State.queued)

_SAYS_ALL = ("Killed", "Exited", "AllocationEnded", None)
"""Types of errors whose message says all that the type does."""


@dataclass(frozen=True)
class Standing:
    """Where one run stands.

    ``state`` is a recorded state, ``lost`` or ``loading``. ``source`` says who knows it: ``record``, ``squeue``, ``sacct`` or
    ``process``. ``note`` is a phrase for people, empty when there is nothing to add. ``nodes`` is Slurm's list of nodes, or
    the host of a local run. ``attempt`` counts from 1; 0 before the first. ``progressed_at`` is when the last step was
    logged, in seconds since the epoch.
    """

    run: RunFolder
    status: Status
    state: str
    source: str = "record"
    note: str = ""
    job_id: str | None = None
    slurm: SlurmState | None = None
    nodes: str = ""
    attempt: int = 0
    step: int | None = None
    steps: int | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    progressed_at: float | None = None

    @property
    def over(self) -> bool:
        """Nothing more happens to the run by itself."""
        return self.state in OVER

    @property
    def bad(self) -> bool:
        """The run ended, or hangs in the air, in a way that nobody asked for."""
        return self.state in BAD


@dataclass(frozen=True)
class Survey:
    """Where several runs stand, and the sources that gave no answer (a phrase each)."""

    standings: list[Standing]
    silent: tuple[str, ...] = ()


def on_slurm(status: Status) -> bool:
    """Whether the run was meant for Slurm, even if its submission broke off."""
    return "job_folder" in status.extra or "job_id" in status.extra


def current_job(ids: Sequence[str], answer: Answer) -> tuple[str | None, SlurmState | None]:
    """Of the jobs that were to work on a run (several where dependent jobs continue it), the one that matters now: one that
    runs, else one that waits, else the last that Slurm knows."""
    known = [answer.jobs[i] for i in ids if i in answer.jobs]
    for wanted in (
        [s for s in known if not s.ended and not s.waiting],
        [s for s in known if s.waiting],
        known[::-1],
    ):
        if wanted:
            return wanted[0].job_id, wanted[0]
    return (ids[-1] if ids else None), None


def survey(
    runs: Iterable[RunFolder],
    *,
    ask: Callable[[Iterable[str]], Answer] = squeue.ask,
    slurm: Answer | None = None,
) -> Survey:
    """Where ``runs`` stand. Slurm is asked once, and only about runs whose own record has not ended.

    ``slurm`` is an earlier answer to use instead of a new one: a view that redraws itself must not burden the controller.
    """
    entries = [Entry(run) for run in runs]
    open_ids = [i for e in entries if not e.status.ended for i in jobs_of(e.run, e.status)]
    answer = slurm if slurm is not None else ask(open_ids) if open_ids else Answer(known=True)
    busy: set[str] = set()
    for index, entry in enumerate(entries):
        i, found = current_job(jobs_of(entry.run, entry.status), answer)
        if i and not entry.status.ended and (found is None or found.ended):
            # The job may have written its last word since: a record is read before the queue, and once more after it.
            entries[index] = entry = Entry(entry.run)
        if i and entry.status.state is State.running:
            busy.add(i)
    known = _agents_of(entries)
    return Survey([_standing(e, answer, known, busy) for e in entries], answer.silent)


def _standing(entry: Entry, answer: Answer, known: dict[str, AgentRecord], busy: set[str]) -> Standing:
    status, tries = entry.status, attempts_of(entry.status)
    i, found = current_job(jobs_of(entry.run, status), answer)
    if status.ended and tries and isinstance(last := tries[-1].get("job_id"), str):
        # The rest of a chain, which had nothing left to do, says nothing of the run.
        i, found = last, answer.jobs.get(last)
    row, _ = entry.last
    step = row.get("step")
    base = Standing(
        run=entry.run,
        status=status,
        state=str(status.state),
        job_id=i,
        slurm=found,
        nodes=_nodes(status, found, tries),
        attempt=_count(status, tries),
        step=step if isinstance(step, int) else None,
        steps=planned_steps(entry.run),
        metrics=row,
        progressed_at=_modified(entry.run.metrics_file) if row else None,
        note=_reason(status),
    )
    if status.state is State.unknown:
        slurm = f"Slurm: {found.text()}" if found is not None else ""
        return replace(base, note="; ".join(filter(None, [status.reason, slurm])))
    if status.ended:
        return base
    if i is None and (odd := unknown_jobs(status)):
        return replace(base, state=LOST, note=f"its record names the unknown job {', '.join(odd)}")
    if i is None and on_slurm(status):
        written = _modified(entry.run.path / STATUS_FILE)
        if written is not None and time.time() - written < _SUBMITTING_S:
            return replace(base, note="it is being handed to Slurm")
        note = "it was never handed to Slurm; type the call that made it again"
        return replace(base, state=LOST, note=note)
    if i is None:
        return _local(base, known.get(str(entry.run.path)))
    if found is None:
        if answer.known and not any(text.startswith("sacct") for text in answer.silent):
            return replace(base, state=LOST, source="squeue", note=f"Slurm does not know job {i} any more")
        if answer.known:
            return replace(
                base, state=LOST, source="squeue", note=f"job {i} has left the queue; how is not known"
            )
        return replace(base, note="; ".join(filter(None, [base.note, "Slurm did not answer"])))
    return _on_slurm(base, found, busy)


def _on_slurm(base: Standing, found: SlurmState, busy: set[str]) -> Standing:
    state = base.status.state
    if found.ended:
        if found.state == CANCELLED:
            return replace(base, state="cancelled", source=found.source, note=f"Slurm: {found.text()}")
        if found.state == SUCCESS:
            note = f"Slurm: {found.text()}, but the run recorded no end"
            return replace(base, state=LOST, source=found.source, note=note)
        return replace(base, state="failed", source=found.source, note=f"Slurm: {found.text()}")
    if found.waiting:
        why = found.reason or found.state
        again = "requeued: " if state is State.running or base.attempt else ""
        note = "; ".join(filter(None, [base.note, f"{again}waits ({why})"]))
        return replace(base, state="queued", source=found.source, note=note)
    if state is State.running:
        note = "" if found.state == "RUNNING" else f"Slurm: {found.text()}"
        return replace(base, note=note)
    if base.job_id in busy:
        return replace(base, note=f"waits for its turn in job {base.job_id}")
    return replace(base, state=LOADING, source=found.source, note=base.note)


def _local(base: Standing, agent: AgentRecord | None) -> Standing:
    status = base.status
    if status.orphaned:
        note = f"process {status.pid}, which ran it on this machine, is gone"
        return replace(base, state=LOST, source="process", note=note)
    if status.state in _WAITING and agent is not None:
        if not agent.alive:
            note = f"process {agent.pid}, which was to run it, is gone"
            return replace(base, state=LOST, source="process", note=note)
        if base.run.launcher_log.exists():
            return replace(base, state=LOADING, source="process")
    return base


def _agents_of(entries: Sequence[Entry]) -> dict[str, AgentRecord]:
    """The agents of the local runs that wait, if there are such runs."""
    places = {e.run.path.parent for e in entries if e.status.state in _WAITING and not on_slurm(e.status)}
    found: dict[str, AgentRecord] = {}
    for place in places:
        found.update(agents(place))
    return found


def planned_steps(run: RunFolder) -> int | None:
    """``training.steps`` of the frozen configuration, read without parsing all of it: a list shows a hundred runs."""
    try:
        text = run.config_text()
    except RunFolderError:
        return None
    found = re.search(r"^training:\n(?:[ ].*\n)*?  steps: (\d+)$", text, re.MULTILINE)
    return int(found[1]) if found else None


def _nodes(status: Status, found: SlurmState | None, tries: Sequence[dict[str, Any]]) -> str:
    if found is not None and found.nodes:
        return found.nodes
    recorded = tries[-1].get("nodes") if tries else None
    if isinstance(recorded, list):
        return ",".join(map(str, recorded))
    if isinstance(recorded, str) and recorded:
        return recorded
    return "" if on_slurm(status) else status.host or ""


def _count(status: Status, tries: Sequence[dict[str, Any]]) -> int:
    if tries:
        last = tries[-1].get("n")
        return last if isinstance(last, int) else len(tries)
    return 1 if status.started_at else 0


def _reason(status: Status) -> str:
    reason = status.extra.get("reason")
    if status.state in _WAITING and isinstance(reason, str):
        return reason
    if status.state in (State.failed, State.cancelled) and status.error:
        error = status.error
        rank = "" if error.get("rank") is None else f"rank {error['rank']}: "
        kind = "" if error.get("type") in _SAYS_ALL else f"{error['type']}: "
        first = str(error.get("message") or "").strip().partition("\n")[0]
        text = first if not kind else f"{rank}{kind}{first}"
        return text if len(text) <= 160 else text[:157] + "..."
    return ""


def _modified(path: Path) -> float | None:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return None
