"""Runs that did not fail: completed, still going on, or cancelled."""

from __future__ import annotations

import re
from dataclasses import replace

from europa_exp.runs import commands
from europa_exp.runs.attempts import Reason
from europa_exp.runs.why import evidence
from europa_exp.runs.why.case import Case
from europa_exp.runs.why.explanation import Cause, Explanation, bounded, proof
from europa_exp.runs.why.record import from_record

GOING_ON = frozenset({"created", "queued", "loading", "running"})
"""States of a run that may still come to an end."""

_HELD = re.compile(r"held|hold", re.IGNORECASE)
"""In the reason or the state of a job that waits until somebody releases it."""

_BETWEEN_ATTEMPTS = ("queued", "loading")


def completed(case: Case) -> Explanation:
    tries = len(case.attempts)
    again = f" in {tries} attempts" if tries > 1 else ""
    note = case.status.extra.get("metrics")
    lines = []
    if isinstance(note, dict) and note.get("incomplete"):
        lines = proof(evidence.STATUS, f"metrics are incomplete: {note.get('problem')}")
    return case.explained(Cause.completed, f"it completed{again}", lines, [commands.about(case.run, "show")])


def going_on(case: Case) -> Explanation:
    """It runs or waits; of one that waits to be tried again, also why the attempt before ended."""
    running = case.state == "running"
    title = {"running": "it is running", "loading": "its job has begun, its ranks have not yet"}
    reason = case.status.extra.get("reason")
    ended = [attempt for attempt in case.attempts if attempt.get("reason")]
    found = case.explained(
        Cause.going_on,
        title.get(case.state, "it waits"),
        [
            *(proof(evidence.STATUS, reason) if isinstance(reason, str) and not running else []),
            *evidence.history(ended),
            *(proof(evidence.SLURM, case.slurm.text()) if case.slurm is not None else []),
        ],
        [
            *_release(case),
            commands.about(case.run, *(("logs", "-f") if running else ("status", "--watch"))),
        ],
    )
    # While it waits, the error records are still those of the attempt before.
    if not ended or case.state not in _BETWEEN_ATTEMPTS:
        return found
    if case.last.get("reason") == Reason.requeued:  # whatever its ranks met while Slurm ended them
        return replace(found, title=f"{found.title} to be tried again; the last time: Slurm requeued the job")
    last = from_record(case)
    if last is None:
        return replace(found, title=f"{found.title} to be tried again")
    return replace(
        found,
        title=f"{found.title} to be tried again; the last time: {last.title}",
        rank=last.rank,
        node=last.node,
        evidence=bounded([*found.evidence, *last.evidence]),
        behind=last.behind,
    )


def _release(case: Case) -> tuple[str, ...]:
    """How a job goes on that somebody holds in the queue."""
    slurm = case.slurm
    if slurm is None or not slurm.waiting or not (_HELD.search(slurm.reason) or _HELD.search(slurm.state)):
        return ()
    whose = "" if slurm.reason != "JobHeldAdmin" else " (an administrator's work: JobHeldAdmin)"
    return (f"It is held; to let it go on: scontrol release {slurm.job_id}{whose}",)


def cancelled(case: Case) -> Explanation:
    """By whom, as far as anybody knows."""
    asked, by, lines = case.status.extra.get("cancel_asked"), "", []
    if isinstance(asked, dict):
        by = f" by {asked.get('by')} (europa cancel)"
        lines += proof(evidence.STATUS, f"cancelled by {asked.get('by')} at {asked.get('at')}")
    elif case.slurm is not None and case.slurm.by:
        by = f" by user id {case.slurm.by} (scancel)"
    if case.error is not None:
        by = by or f": {case.error.first_line}"
        lines += proof(evidence.STATUS, case.error.first_line)
    launcher = case.launcher_log()
    index = launcher.find(
        re.compile(r"stopping: the launcher was told to|the job is cancelled|SIGTERM; Slurm says")
    )
    if index is not None:
        lines += launcher.around(index)
        if not by and "launcher was told to" in launcher.lines[index]:
            by = " at the launcher (Ctrl-C, or a signal to it)"
    lines += evidence.of_slurm(case)
    lines += evidence.in_jobs(case, re.compile(r"\*\*\* (?:JOB|STEP) .* CANCELLED AT"))
    return case.explained(
        Cause.cancelled,
        f"it was cancelled{by}",
        lines,
        [f"To run it again: {commands.rerun(case.run)}"],
    )
