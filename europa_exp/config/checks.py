"""Everything that can be known to be wrong with a configuration before anything is submitted.

Single values first (``rules.values``), then the rules between fields. A rule that reads a field with a problem of its own
is left out, so one mistake gives one message. Nothing here imports torch or leaves anything on disk.
"""

from __future__ import annotations

from europa_exp.config.errors import Problem
from europa_exp.config.rules import (
    Rule,
    checkpoints,
    cluster,
    gradient_norm,
    gradients,
    layout,
    memory,
    names,
    resharding,
)
from europa_exp.config.rules.values import check_values
from europa_exp.config.schema import Config

RULES: list[Rule] = [
    *layout.RULES,
    *names.RULES,
    *checkpoints.RULES,
    *cluster.RULES,
    *gradients.RULES,
    *gradient_norm.RULES,
    *resharding.RULES,
    *memory.RULES,
]


def check(cfg: Config) -> list[Problem]:
    """All problems of a configuration, values before rules, in schema order; an empty list is a configuration that may run."""
    problems = check_values(cfg)
    broken = {p.field for p in problems}
    shape_ok = True
    for rule in RULES:
        if rule in memory.RULES and not shape_ok:
            continue  # bytes a rank mean nothing while the ranks don't fit together
        if rule.applies(broken):
            found = list(rule.find(cfg))
            shape_ok = shape_ok and not (found and rule in layout.RULES)
            problems += found
    return problems
