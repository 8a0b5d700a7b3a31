"""Causes that Slurm tells: its record of the job, and what its daemons wrote into the job's output."""

from __future__ import annotations

import re
from collections.abc import Callable

from europa_exp.runs.why import evidence, symptoms
from europa_exp.runs.why.advice import next_steps, where_to_look
from europa_exp.runs.why.case import Case
from europa_exp.runs.why.explanation import IN_WORDS, Cause, Evidence, Explanation


def from_slurm(case: Case) -> Explanation | None:
    """What Slurm did to the job, if it did anything."""
    if case.slurm is not None and (by_state := _BY_STATE.get(case.slurm.state)) is not None:
        return by_state(case)
    for symptom in symptoms.IN_JOBS:
        if found := evidence.in_jobs(case, symptom.pattern):
            by_symptom = _BY_SYMPTOM.get(symptom.cause)
            return by_symptom(case) if by_symptom is not None else _said(case, symptom.cause, found)
    return None


def _said(case: Case, cause: Cause, found: list[Evidence]) -> Explanation:
    """A line of the job's output names the cause, and perhaps the task that met it."""
    line = found[0].lines[-1]
    task = re.search(r"tasks? (\d+)(?=[:,\-])", line)
    rank = int(task[1]) if task else None
    return case.explained(
        cause,
        f"{IN_WORDS[cause]}: {line.strip()}",
        [*found, *evidence.of_slurm(case)],
        next_steps(case, cause, rank) or where_to_look(case, rank),
        rank=rank,
    )


def _out_of_memory(case: Case) -> Explanation:
    return case.explained(
        Cause.host_memory,
        "the host's memory ran out: Slurm's limit of the job was reached",
        [*evidence.of_slurm(case), *evidence.in_jobs(case, symptoms.OOM_KILL)],
        next_steps(case, Cause.host_memory),
    )


def time_limit(case: Case) -> Explanation:
    """Slurm ended the job, or told the ranks to save and stop before it would."""
    said = evidence.in_jobs(case, re.compile("DUE TO TIME LIMIT"))
    return _done(case, Cause.time_limit, "Slurm's time limit was reached", said)


def preempted(case: Case) -> Explanation:
    """Slurm gave the nodes to another job."""
    said = evidence.in_jobs(case, re.compile("DUE TO PREEMPTION"))
    return _done(case, Cause.preempted, "Slurm took its nodes for a more important job", said)


def node_failure(case: Case) -> Explanation:
    """A node went down under the run; which one, only the job's output tells."""
    said = evidence.in_jobs(case, re.compile(r"NODE FAILURE|Node failure on|has failed", re.IGNORECASE))
    node = None
    for entry in said:
        if match := re.search(r"Node failure on (\S+)|[Nn]ode (\S+) has failed", entry.lines[-1]):
            node = (match[1] or match[2]).rstrip(",.")
    listed = ", ".join(case.nodes[:4]) + (", ..." if len(case.nodes) > 4 else "")
    which = f": {node}" if node else f", one of {listed}" if listed else ""
    return _done(case, Cause.node_failure, f"a node failed{which}", said, node)


def _done(case: Case, cause: Cause, title: str, said: list[Evidence], node: str | None = None) -> Explanation:
    """Slurm's doing, as the run and Slurm recorded it; ``said`` is in the job's output."""
    lines = [*evidence.recorded(case), *evidence.of_slurm(case), *said]
    return case.explained(cause, title, lines, next_steps(case, cause), node=node)


_BY_STATE: dict[str, Callable[[Case], Explanation]] = {
    "TIMEOUT": time_limit,
    "DEADLINE": time_limit,
    "NODE_FAIL": node_failure,
    "BOOT_FAIL": node_failure,
    "PREEMPTED": preempted,
    "OUT_OF_MEMORY": _out_of_memory,
}
_BY_SYMPTOM: dict[Cause, Callable[[Case], Explanation]] = {
    Cause.time_limit: time_limit,
    Cause.node_failure: node_failure,
    Cause.preempted: preempted,
}
