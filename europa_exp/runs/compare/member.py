"""One run with all that a comparison needs of it, read once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from europa_exp.config.experiment import experiment_of
from europa_exp.config.identity import flatten
from europa_exp.runs.folder import RunFolder
from europa_exp.runs.lookup import Entry, brief

SEEDS = ("training.seed", "data.shuffle_seed")

CLUSTER, CODE, DATA = "cluster.name", "code", "data_fingerprint"
AROUND = (CLUSTER, CODE, DATA)
"""What can change a result and is no field of the configuration that counts for a run's hash."""


@dataclass(frozen=True)
class Member:
    """One run. ``rows`` are its logged steps, ``problems`` what could not be read of it.

    ``fields`` maps dotted fields to values: those that can change a result, and ``AROUND``; None if they can't be read.
    """

    entry: Entry
    fields: dict[str, Any] | None
    rows: list[dict[str, Any]]
    problems: list[str]

    @property
    def completed(self) -> bool:
        return self.entry.state == "completed"

    @property
    def overrides(self) -> list[str]:
        """What was typed for the run; empty without a record of it."""
        found = self.entry.provenance.get("overrides")
        return [text for text in found if isinstance(text, str)] if isinstance(found, list) else []

    @property
    def experiment(self) -> str | None:
        return experiment_of(self.overrides)

    @property
    def seed(self) -> object:
        return tuple((self.fields or {}).get(name) for name in SEEDS)


def read_member(run: RunFolder) -> Member:
    """Read one run. What is missing or broken becomes one of its problems."""
    entry = Entry(run)
    problems = entry.problems()
    fields: dict[str, Any] | None = None
    try:
        cfg = run.config()
        fields = {**flatten(cfg), CLUSTER: cfg.cluster.name}
    except Exception as error:
        if not any("config.yaml" in problem for problem in problems):
            problems.append(f"config.yaml: {brief(error)}")
    if fields is not None:
        code = entry.provenance.get("code")
        fields[CODE] = _code(code) if isinstance(code, dict) else None
        fields[DATA] = entry.provenance.get("data_fingerprint")
    rows: list[dict[str, Any]] = []
    try:
        read = run.read_metrics()
        rows = read.rows
        if read.skipped:
            problems.append(f"{len(read.skipped)} unreadable lines of metrics.jsonl are left out")
    except Exception as error:
        problems.append(str(error))
    return Member(entry, fields, rows, problems)


def _code(code: dict[str, Any]) -> str | None:
    """Commit and, with uncommitted changes, the start of their fingerprint; equal only for equal code."""
    commit = str(code.get("commit") or "")[:8]
    mark = str(code.get("fingerprint") or "")[:6]
    if code.get("dirty") or not commit:
        return "+".join(part for part in (commit, mark) if part) or None
    return commit
