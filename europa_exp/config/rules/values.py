"""Rules for one value at a time: it is there, has its type, lies in its range, is finite, can be written down."""

from __future__ import annotations

import enum
import math
import re
import typing
from collections.abc import Iterator
from dataclasses import Field, dataclass, fields, is_dataclass
from typing import Any

from omegaconf import MISSING

from europa_exp.config.errors import Problem
from europa_exp.config.io import Invalid, convert, hints, plain
from europa_exp.config.schema import NEVER_OFF

_INTERVAL = re.compile(r"([\[(])\s*([^,\s]+)\s*,\s*([^,\s]+)\s*([\])])")
_INT_LIMIT = 2**63


@dataclass(frozen=True)
class Interval:
    """A range of numbers, read from its usual notation: ``[1, 64]``, ``(0, inf)``."""

    low: float
    high: float
    with_low: bool
    with_high: bool

    @classmethod
    def parse(cls, text: str) -> Interval:
        """Raises ValueError for text that is no interval."""
        match = _INTERVAL.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"{text!r} is no interval such as [1, 64] or (0, inf)")
        return cls(float(match[2]), float(match[3]), match[1] == "[", match[4] == "]")

    def __contains__(self, value: float) -> bool:
        above = value >= self.low if self.with_low else value > self.low
        return above and (value <= self.high if self.with_high else value < self.high)

    def __str__(self) -> str:
        low = f"{'at least' if self.with_low else 'more than'} {self.low:g}"
        if math.isinf(self.high):
            return low
        if self.with_low and self.with_high:
            return f"{self.low:g} to {self.high:g}"
        return f"{low} and {'at most' if self.with_high else 'less than'} {self.high:g}"


def check_values(cfg: Any, prefix: str = "") -> list[Problem]:
    """Problems of the single values of a configuration or of one of its groups."""
    problems: list[Problem] = []
    for f in fields(cfg):
        dotted, value, hint = f"{prefix}{f.name}", getattr(cfg, f.name), hints(type(cfg))[f.name]
        if is_dataclass(hint):
            if is_dataclass(value):
                problems += check_values(value, f"{dotted}.")
            else:
                problems.append(Problem(dotted, value, "the group is missing", f"Choose {dotted}=<option>"))
        else:
            problems += _check_field(f, dotted, value, hint)
    return problems


def _check_field(f: Field[Any], dotted: str, value: Any, hint: Any) -> Iterator[Problem]:
    optional = type(None) in typing.get_args(hint)
    if isinstance(value, str) and value == MISSING:
        yield Problem(dotted, value, "every run needs a value here", f"Give {dotted}=<value>")
        return
    if isinstance(value, str) and value.strip().lower() in ("none", "null") and _is_text(hint):
        way_out = f"Type {dotted}=null" if optional else f"Give {dotted}=<text>"
        yield Problem(dotted, value, "this is the word, not the absence of a value", way_out)
        return
    try:
        convert(plain(value), hint)
    except Invalid as e:
        yield Problem(dotted, value, e.rule, e.way_out)
        return
    if isinstance(hint, enum.EnumMeta) and not isinstance(value, hint):
        yield Problem(dotted, value, "is text where the enum is meant", f"Take {hint.__name__}.{value}")
    elif isinstance(value, float) and not math.isfinite(value):
        yield Problem(dotted, value, "must be a finite number", f"Give {dotted}=<number>")
    elif isinstance(value, int) and not isinstance(value, bool) and not -_INT_LIMIT <= value < _INT_LIMIT:
        yield Problem(dotted, value, "must fit in 64 bits", f"Give {dotted}=<less than 2^63>")
    elif isinstance(value, (int, float)) and (within := f.metadata.get("within")):
        interval = Interval.parse(within)
        if value not in interval:
            yield Problem(dotted, value, f"must be {interval}", _give(f, dotted, interval))
    for where, text in _texts(dotted, value):
        yield from _check_text(where, text)


def _give(f: Field[Any], dotted: str, interval: Interval) -> str:
    off = f.metadata["off"]
    leave = "" if off == NEVER_OFF else f", or {dotted}={'null' if off is None else off} to leave it out"
    return f"Give {dotted}=<{interval}>{leave}"


def _is_text(hint: Any) -> bool:
    return hint is str or (str in typing.get_args(hint) and typing.get_origin(hint) not in (dict, list))


def _texts(dotted: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield dotted, value
    elif isinstance(value, list):
        yield from ((dotted, v) for v in value)
    elif isinstance(value, dict):
        for k, v in value.items():
            yield f"{dotted}.{k}", k
            yield f"{dotted}.{k}", v


def _check_text(dotted: str, text: str) -> Iterator[Problem]:
    allowed = "\n\t" if dotted == "tracking.notes" else ""
    odd = sorted({c for c in text if not c.isprintable()} - set(allowed))
    if odd:
        names = ", ".join(f"U+{ord(c):04X}" for c in odd[:4])
        yield Problem(dotted, text, f"holds characters that don't print ({names})", "Leave them out")
