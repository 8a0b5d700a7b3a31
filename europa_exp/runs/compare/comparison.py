"""A comparison as data; ``europa_exp.runs.table.render`` makes text of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from europa_exp.runs.compare.member import Member
from europa_exp.runs.quantities import Quantity
from europa_exp.runs.statistics import Estimate, Verdict


class CompareError(Exception):
    """What was asked for can't be compared; the message says why and what can."""


@dataclass(frozen=True)
class Column:
    """One column of what differs: a field, or several fields of a group in one."""

    title: str
    fields: tuple[str, ...]


@dataclass(frozen=True)
class Row:
    """One experiment. ``fields`` holds the differing fields (None-valued where it has none), ``estimates`` and ``verdicts``
    go by the keys of the quantities; a verdict is None for the baseline itself and where a value is absent."""

    label: str
    members: tuple[Member, ...]
    fields: dict[str, Any]
    estimates: dict[str, Estimate] = field(default_factory=dict)
    verdicts: dict[str, Verdict | None] = field(default_factory=dict)
    baseline: bool = False

    @property
    def completed(self) -> int:
        return sum(m.completed for m in self.members)

    @property
    def used(self) -> tuple[Member, ...]:
        """The runs that the numbers come from."""
        return tuple(m for m in self.members if m.completed) or self.members

    @property
    def state(self) -> str:
        """``completed``, ``running``, ``2 completed, 1 failed``, ..."""
        count = Counter(m.entry.state for m in self.members)
        if len(count) == 1:
            return next(iter(count))
        return ", ".join(f"{n} {state}" for state, n in sorted(count.items()))


@dataclass(frozen=True)
class Comparison:
    """All of it. ``implied`` are differing fields without a column of their own, because the experiment of a row says them."""

    title: str
    columns: tuple[Column, ...]
    quantities: tuple[Quantity, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    warmup: int | None
    implied: tuple[str, ...] = ()

    @property
    def baseline(self) -> Row | None:
        return next((row for row in self.rows if row.baseline), None)
