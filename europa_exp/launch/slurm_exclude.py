"""Nodes that a sweep must not get again: every submission leaves them out, and so do the jobs of the sweep that wait.

They are kept beside the record of the sweep, each with the reason and the date. Whoever removes an entry, or the file, lets
later submissions have the node again. What ``cluster.exclude`` names is left out besides, and a node that ``cluster.nodelist``
asks for by name is never left out.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from europa_exp.launch import squeue, sweep_record
from europa_exp.runs.files import replace_text
from europa_exp.runs.folder import RunFolder
from europa_exp.runs.slurm_record import node_names
from europa_exp.runs.status import now


def place(runs_dir: Path, stem: str) -> Path:
    """Where the list of a sweep lies; for a single run ``stem`` is its name."""
    return sweep_record.place(runs_dir, stem).with_suffix(sweep_record.EXCLUDE_SUFFIX)


def place_of(run: RunFolder) -> Path:
    """Where the list lies that a run has in common with its sweep."""
    return place(run.path.parent, str(run.provenance().get("sweep") or run.name))


def add(path: Path, bad: Mapping[str, str]) -> list[str]:
    """Add nodes (name -> why) to the list of a sweep and return all that it holds by now. Raises OSError.

    The file holds ``[{"node", "reason", "date"}, ...]``; a node that is there already stays as it is.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path.parent, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        found = entries(path)
        known = {entry["node"] for entry in found}
        found += [
            {"node": node, "reason": why, "date": now()}
            for node, why in sorted(bad.items())
            if node not in known
        ]
        replace_text(path, json.dumps(found, indent=2) + "\n")
    finally:
        os.close(handle)
    return [entry["node"] for entry in found]


def entries(path: Path) -> list[dict[str, str]]:
    """What ``add`` wrote; empty when there is no such file, or it can't be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return [e for e in found if isinstance(e, dict) and "node" in e] if isinstance(found, list) else []


def listed(path: Path) -> list[str]:
    """The names of the nodes in a list; empty without one."""
    return [entry["node"] for entry in entries(path)]


def tell_waiting(run: RunFolder, bad: Collection[str]) -> list[str]:
    """Make the jobs of a run's sweep that wait in the queue leave out these nodes as well; what went wrong, a phrase each.

    A job is the sweep's if its script lies in one of the job folders on record. It keeps what it left out before. Tasks of an
    array that wait are changed at once; those that run can't be, and take the list when they start again.
    """
    folders = _job_folders(run)
    found = _waiting(folders)
    if isinstance(found, squeue.Refused):
        return [f"squeue: {found.text}"]
    changed: dict[str, str] = {}
    for job in found:
        if missing := job.lacks(bad):
            nodes = sorted(job.left_out | missing)
            answer = squeue.run(["scontrol", "update", f"JobId={job.id}", f"ExcNodeList={','.join(nodes)}"])
            changed[job.id] = (
                answer.text if isinstance(answer, squeue.Refused) else "scontrol does not say why"
            )
    # Of an array whose first tasks run, scontrol says that it failed, although the others were changed: so look.
    after = _waiting(folders) if changed else []
    if isinstance(after, squeue.Refused):
        return [f"squeue: {after.text}"]
    return [f"job {job.id}: {changed[job.id]}" for job in after if job.id in changed and job.lacks(bad)]


@dataclass
class _Job:
    """What of a job, or of an array, waits. ``by_all`` are the nodes that all of its tasks leave out, ``left_out`` those that
    some do; ``wanted`` are those that it asks for by name."""

    id: str
    left_out: set[str] = field(default_factory=set)
    by_all: set[str] | None = None
    wanted: set[str] = field(default_factory=set)

    def lacks(self, bad: Collection[str]) -> set[str]:
        """Those of the bad nodes that some of it may still get."""
        return set(bad) - self.wanted - (self.by_all or set())


def _waiting(folders: Collection[str]) -> list[_Job] | squeue.Refused:
    """The jobs with their script in these folders that wait."""
    # The script's path is free text, so it comes last.
    output = squeue.run(["squeue", "--me", "--noheader", "--states=PENDING", "--format=%F|%x|%n|%o"])
    if isinstance(output, squeue.Refused):
        return output
    jobs: dict[str, _Job] = {}
    for line in output.splitlines():
        number, excluded, required, script = (*line.strip().split("|", 3), "", "", "")[:4]
        if os.path.dirname(script) in folders:
            job = jobs.setdefault(number, _Job(number))
            names = set(node_names(excluded))
            job.left_out |= names
            job.by_all = names if job.by_all is None else job.by_all & names
            job.wanted |= set(node_names(required))
    return list(jobs.values())


def _job_folders(run: RunFolder) -> set[str]:
    """The folders of the jobs that the sweep of a run was submitted with."""
    found = {run.status().extra.get("job_folder")}
    sweep = run.provenance().get("sweep")
    if isinstance(sweep, str):
        record = sweep_record.Record.read(sweep_record.place(run.path.parent, sweep))
        found |= {entry.get("folder") for entry in record.runs.values()}
    return {folder for folder in found if isinstance(folder, str)}
