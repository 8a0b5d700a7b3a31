"""Problems of a configuration, and the one message that lists them all."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

_repr = reprlib.Repr()
_repr.maxstring = 200
_repr.maxother = 80
_repr.maxlong = 40
_repr.maxdict = _repr.maxlist = 6


@dataclass(frozen=True)
class Problem:
    """One broken rule: what is wrong, where, and what to do about it."""

    field: str
    """Dotted name of the field, for example ``nccl.max_ctas``."""

    value: Any
    """The value that it has."""

    rule: str
    """The rule that the value breaks, with the numbers that show it."""

    way_out: str
    """What to type instead."""

    listed: tuple[str, ...] = ()
    """What there is to choose from, one a line."""

    def __str__(self) -> str:
        way_out = self.way_out.rstrip(". ")
        end = "" if way_out.endswith("?") else "."
        text = f"{self.field}={show(self.value)}: {self.rule.rstrip('. ')}. {way_out}{end}"
        lines = (text, *self.listed)
        return "\n      ".join(" ".join(part.strip() for part in line.splitlines()) for line in lines)


class ConfigError(Exception):
    """One or more points of a call can't be run.

    ``problems`` holds pairs (label of the point, problem). ``str()`` is the message for all of them: a problem that
    several points share is told once, with the points that have it.
    """

    def __init__(self, problems: Iterable[tuple[str, Problem]]) -> None:
        self.problems: list[tuple[str, Problem]] = list(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        labels_of: dict[str, list[str]] = {}
        for label, problem in self.problems:
            labels = labels_of.setdefault(str(problem), [])
            if label not in labels:
                labels.append(label)
        n = len(labels_of)
        lines = [f"{n} problem{'' if n == 1 else 's'} in the configuration:"]
        several = len({label for label, _ in self.problems}) > 1
        for text, labels in labels_of.items():
            lines.append(f"  - {text}")
            if several or labels != [""]:
                lines.append(f"    in {_join(labels)}")
        return "\n".join(lines)


def show(value: Any) -> str:
    """A value as it would be typed, cut where it is long, always on one line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if hasattr(value, "name") and hasattr(value, "value"):  # an enum is typed by its name
        return str(value.name)
    try:
        return _repr.repr(value)
    except ValueError:  # an integer with more digits than Python prints
        return "<a number too long to print>"


def _join(labels: list[str], most: int = 8) -> str:
    shown = [label or "the composition" for label in labels[:most]]
    rest = len(labels) - len(shown)
    return ", ".join(shown) + (f" and {rest} more" if rest else "")
