"""Problems of a configuration, and the one message that lists them all."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


class _Short(reprlib.Repr):
    def repr_str(self, x: str, level: int) -> str:
        return super().repr_str(_without_secrets(x), level)  # before it is cut: half a key is hard to tell


_repr = _Short()
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
        """One line (and one for each of ``listed``), without the secrets that somebody typed: messages end in logs."""
        from europa_exp.config.secrets import is_harmless, is_secret_name

        value = show(self.value)
        text = self.value if isinstance(self.value, str) else value
        if is_secret_name(self.field.rpartition(".")[2]) and not is_harmless(text):
            value = "<hidden>"
        way_out = self.way_out.rstrip(". ")
        end = "" if way_out.endswith("?") else "."
        text = f"{self.field}={value}: {self.rule.rstrip('. ')}. {way_out}{end}"
        lines = map(_without_secrets, (text, *self.listed))
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


def _without_secrets(text: str) -> str:
    from europa_exp.config.secrets import redact  # here, as most calls have no message to print

    return redact(text, strict=True)[0]


def _join(labels: list[str], most: int = 8) -> str:
    shown = [_without_secrets(label) or "the composition" for label in labels[:most]]
    rest = len(labels) - len(shown)
    return ", ".join(shown) + (f" and {rest} more" if rest else "")
