"""What the rows measured, and whether it differs from the baseline by more than noise."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import replace

from europa_exp.runs import statistics
from europa_exp.runs.compare.comparison import CompareError, Row
from europa_exp.runs.compare.fields import names
from europa_exp.runs.compare.member import DATA, Member
from europa_exp.runs.quantities import DEFAULT, QUANTITIES, Quantity, Value, quantity
from europa_exp.runs.statistics import Estimate, Verdict

_SAME_DATA = (
    "data.",
    "training.seq_len",
    "training.local_batch_size",
    "training.global_batch_size",
    "parallelism.nodes",
    "parallelism.gpus_per_node",
    "parallelism.data_parallel_",
)
"""Begins of the fields that decide which tokens a step sees."""


def choose(members: Sequence[Member], wanted: Sequence[str]) -> list[Quantity]:
    """The quantities that ``wanted`` names (see ``compare``), or the usual ones. Raises CompareError for an unknown one."""
    present = dict.fromkeys(
        key
        for m in members
        for row in m.rows
        for key, value in row.items()
        if key not in ("step", "time") and isinstance(value, int | float)
    )
    tokens = [t.strip() for t in wanted if t.strip()]
    if not tokens:
        keys = [key for key in DEFAULT if key in present]
        if "memory/peak_reserved_gib" in keys and "memory/peak_host_gib" in keys:
            keys.remove("memory/peak_host_gib")
        return [quantity(key) for key in keys]
    chosen = [key for token in tokens for key in _named(token, list(present))]
    return [quantity(key) for key in dict.fromkeys(chosen)]


def _named(token: str, present: list[str]) -> list[str]:
    """The keys that ``token`` is, or is a group or a part of."""
    if token == "all":
        return present
    pool = [*present, *(key for key in QUANTITIES if key not in present)]
    fitting = [k for k in pool if k == token] or [k for k in pool if names(token, k.replace("/", "."))]
    fitting = fitting or [k for k in present if token in k]
    if not fitting:
        close = difflib.get_close_matches(token, pool, n=3, cutoff=0.4)
        hint = f"; did you mean {' or '.join(close)}?" if close else "."
        have = f"These runs have {', '.join(present)}" if present else "These runs have logged nothing yet"
        raise CompareError(f"metrics={token}: no such quantity{hint} {have}")
    return fitting


def measured(rows: Sequence[Row], quantities: Sequence[Quantity], warmup: int | None) -> list[Row]:
    """The rows with their estimates, and with verdicts against the baseline among them."""
    rows = [replace(row, estimates=_estimates(row, quantities, warmup)) for row in rows]
    base = next(row for row in rows if row.baseline)
    questions = {q.key: sum(_asks(row, q) for row in rows) for q in quantities}
    return [
        replace(
            row,
            verdicts={
                q.key: None if row.baseline else _verdict(q, row, base, questions[q.key]) for q in quantities
            },
        )
        for row in rows
    ]


def _estimates(row: Row, quantities: Sequence[Quantity], warmup: int | None) -> dict[str, Estimate]:
    return {
        q.key: statistics.estimate([statistics.sample(m.rows, q, warmup, seed=m.seed) for m in row.used], q)
        for q in quantities
    }


def _asks(row: Row, q: Quantity) -> bool:
    """Whether the row asks for a verdict: the more do, the more one of them may be luck."""
    return not row.baseline and row.completed > 0 and row.estimates[q.key].value is not None


def _verdict(q: Quantity, row: Row, base: Row, questions: int) -> Verdict | None:
    one, two = row.estimates[q.key], base.estimates[q.key]
    found = statistics.judge(q, one, two, paired=_same_data(row, base), questions=questions)
    if found is None or (row.completed and base.completed):
        return found
    if q.value is not Value.median or found.difference is None:
        return Verdict("unfinished")  # an end, a peak or a total of half a run says nothing
    return Verdict("unfinished", found.difference, found.percent)


def _same_data(row: Row, base: Row) -> bool:
    """Whether both saw the same tokens at the same steps."""
    one, two = row.used[0].fields, base.used[0].fields
    if one is None or two is None or one.get(DATA) != two.get(DATA):
        return False
    deciding = {n for n in {*one, *two} if n.startswith(_SAME_DATA)}
    return all(one.get(n) == two.get(n) for n in deciding)
