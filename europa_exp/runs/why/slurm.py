"""Causes that Slurm tells: its record of the job, and what its daemons wrote into the job's output."""

from __future__ import annotations

import re
from collections.abc import Callable

from europa_exp.runs.why import evidence, symptoms
from europa_exp.runs.why.advice import next_steps, where_to_look
from europa_exp.runs.why.case import Case
from europa_exp.runs.why.explanation import IN_WORDS, Cause, Evidence, Explanation

_BY_STATE = {
    "TIMEOUT": Cause.time_limit,
    "DEADLINE": Cause.time_limit,
    "NODE_FAIL": Cause.node_failure,
    "BOOT_FAIL": Cause.node_failure,
    "PREEMPTED": Cause.preempted,
}


def from_slurm(case: Case) -> Explanation | None:
    """What Slurm did to the job, if it did anything."""
    state = case.slurm.state if case.slurm is not None else ""
    if (cause := _BY_STATE.get(state)) is not None:
        return DONE_BY_SLURM[cause](case)
    if state == "OUT_OF_MEMORY":
        return case.explained(
            Cause.host_memory,
            "the host's memory ran out: Slurm's limit of the job was reached",
            [*evidence.of_slurm(case), *evidence.in_jobs(case, symptoms.OOM_KILL)],
            next_steps(case, Cause.host_memory),
        )
    for symptom in symptoms.IN_JOBS:
        if found := evidence.in_jobs(case, symptom.pattern):
            done = DONE_BY_SLURM.get(symptom.cause)
            return done(case) if done is not None else _said(case, symptom.cause, found)
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


def _time_limit(case: Case) -> Explanation:
    said = evidence.in_jobs(case, re.compile("DUE TO TIME LIMIT"))
    return case.explained(
        Cause.time_limit,
        "Slurm's time limit was reached",
        [*evidence.recorded(case), *evidence.of_slurm(case), *said],
        next_steps(case, Cause.time_limit),
    )


def _node_failure(case: Case) -> Explanation:
    said = evidence.in_jobs(case, re.compile(r"NODE FAILURE|Node failure on|has failed", re.IGNORECASE))
    node = None
    for entry in said:
        if match := re.search(r"Node failure on (\S+)|[Nn]ode (\S+) has failed", entry.lines[-1]):
            node = (match[1] or match[2]).rstrip(",.")
    listed = ", ".join(case.nodes[:4]) + (", ..." if len(case.nodes) > 4 else "")
    return case.explained(
        Cause.node_failure,
        f"a node failed: {node}" if node else f"a node failed{f', one of {listed}' if listed else ''}",
        [*evidence.recorded(case), *evidence.of_slurm(case), *said],
        next_steps(case, Cause.node_failure),
        node=node,
    )


def _preempted(case: Case) -> Explanation:
    said = evidence.in_jobs(case, re.compile("DUE TO PREEMPTION"))
    return case.explained(
        Cause.preempted,
        "Slurm took its nodes for a more important job",
        [*evidence.recorded(case), *evidence.of_slurm(case), *said],
        next_steps(case, Cause.preempted),
    )


DONE_BY_SLURM: dict[Cause, Callable[[Case], Explanation]] = {
    Cause.time_limit: _time_limit,
    Cause.node_failure: _node_failure,
    Cause.preempted: _preempted,
}
"""What Slurm does to runs that did nothing wrong."""
