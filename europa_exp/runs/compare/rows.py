"""The rows: which runs share one, what it is called, and which one the others are held against."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

from europa_exp.config.experiment import EXPERIMENT
from europa_exp.runs.compare.comparison import Row
from europa_exp.runs.compare.fields import off_values
from europa_exp.runs.compare.member import Member
from europa_exp.runs.folder import RunFolder


def rows_of(
    members: Sequence[Member],
    fields: Sequence[str],
    merged: set[str],
    *,
    each: bool = False,
    baseline: Collection[RunFolder] = (),
) -> list[Row]:
    """The rows, in the order of their first members, one of them marked as the baseline.

    ``fields`` are those that a row tells; members that differ in nothing but ``merged`` share one, unless ``each`` has its own.
    """
    rows = _labelled(_grouped(members, merged, each), fields)
    index = _baseline(rows, fields, baseline)
    return [replace(row, baseline=i == index) for i, row in enumerate(rows)]


def _grouped(members: Sequence[Member], merged: set[str], each: bool) -> list[list[Member]]:
    groups: dict[str, list[Member]] = {}
    for m in members:
        if each or m.fields is None:
            key = str(m.entry.run.path)
        else:
            kept = {k: v for k, v in m.fields.items() if k not in merged}
            key = json.dumps(kept, sort_keys=True, default=str)
        groups.setdefault(key, []).append(m)
    return list(groups.values())


def _labelled(groups: Sequence[list[Member]], fields: Sequence[str]) -> list[Row]:
    """Rows with short names that differ: the hash where that is enough, else with the suffix of the folder, else the name."""
    off = off_values()
    hashes = [group[0].entry.identity for group in groups]
    rows: list[Row] = []
    for group, found in zip(groups, hashes, strict=True):
        name = group[0].entry.name
        label = name
        if found:
            unique = hashes.count(found) == 1
            tail = name.rpartition(found)[2] if found in name else ""
            label = found if unique else f"{found}{tail}"
        values = group[0].fields
        told = {n: None if values is None else values.get(n, off.get(n)) for n in fields}
        if EXPERIMENT in told:
            experiments = dict.fromkeys(m.experiment for m in group if m.experiment is not None)
            told[EXPERIMENT] = ", ".join(experiments) or None
        rows.append(Row(label, tuple(group), told))
    seen = Counter(row.label for row in rows)
    return [replace(r, label=r.members[0].entry.name) if seen[r.label] > 1 else r for r in rows]


def _baseline(rows: Sequence[Row], fields: Sequence[str], named: Collection[RunFolder]) -> int:
    """The row of a named run; else of those with a completed run the first with most fields at their off value."""
    for index, row in enumerate(rows):
        if any(m.entry.run in named for m in row.members):
            return index
    off = off_values()

    def score(index: int) -> tuple[bool, int, int]:
        row = rows[index]
        at_off = sum(name in off and row.fields[name] == off[name] for name in fields)
        return bool(row.completed), at_off if row.members[0].fields is not None else -1, -index

    return max(range(len(rows)), key=score)
