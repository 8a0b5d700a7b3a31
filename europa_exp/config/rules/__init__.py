"""Rules between fields, a module a subject. A rule is a function from a configuration to the problems that it finds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from europa_exp.config.errors import Problem
from europa_exp.config.schema import Config


@dataclass(frozen=True)
class Rule:
    """A rule and the fields or groups that it reads; it is left out while one of these has a problem of its own."""

    find: Callable[[Config], Iterable[Problem]]
    reads: tuple[str, ...]

    def applies(self, broken: Iterable[str]) -> bool:
        """Whether none of the ``broken`` fields is one that the rule reads."""
        return not any(_overlap(name, other) for name in self.reads for other in broken)


def reads(*names: str) -> Callable[[Callable[[Config], Iterable[Problem]]], Rule]:
    """Decorator: make a rule of a function that reads these fields or groups."""
    return lambda find: Rule(find, names)


def _overlap(a: str, b: str) -> bool:
    return a == b or a.startswith(f"{b}.") or b.startswith(f"{a}.")
