"""Runs side by side: what differs between them, what they measured, and which differences are more than noise.

One row is one experiment: a run, or its repeats. Repeats are runs with the same configuration, code and data; runs that
differ only in a seed (``training.seed``, ``data.shuffle_seed``) are repeats too, because a result that hangs on the seed is
luck. They get rows of their own when seeds are all that differs, when ``by`` names a seed, or with ``each=True``.

Numbers come from the completed runs of a row. A row without one shows what its unfinished runs logged so far, and no verdict.

In the order of reading: ``member`` (one run, read), ``comparison`` (what comes out), ``fields`` (what differs), ``columns``,
``rows``, ``measures`` (quantities, estimates, verdicts), ``notes``.
"""

from __future__ import annotations

from collections.abc import Sequence

from europa_exp.runs.compare.columns import columns_of
from europa_exp.runs.compare.comparison import Column, CompareError, Comparison, Row
from europa_exp.runs.compare.fields import differences
from europa_exp.runs.compare.measures import choose, measured
from europa_exp.runs.compare.member import read_member
from europa_exp.runs.compare.notes import notes_on
from europa_exp.runs.compare.rows import rows_of
from europa_exp.runs.folder import RunFolder

__all__ = ["Column", "CompareError", "Comparison", "Row", "compare"]


def compare(
    runs: Sequence[RunFolder],
    *,
    by: Sequence[str] = (),
    metrics: Sequence[str] = (),
    baseline: Sequence[RunFolder] = (),
    warmup: int | None = None,
    each: bool = False,
    title: str = "",
) -> Comparison:
    """Compare ``runs`` (the order of the rows is theirs).

    ``by``: fields, groups or unique ends of field names that make the columns; without them all fields that differ.
    ``metrics``: keys of ``metrics.jsonl`` or parts of keys, ``all`` for every one; without them the usual ones that the runs
    have. ``baseline``: the run (or repeats) that differences refer to; added if it is not among ``runs``. Without it, the row
    with most differing fields at their ``off`` value, the first of several. ``warmup``: logged steps to leave out; without
    it max(2, 10%). Raises CompareError.
    """
    wanted = list(dict.fromkeys([*(run for run in baseline if run not in set(runs)), *runs]))
    if not wanted:
        raise CompareError("there are no runs to compare")
    if warmup is not None and warmup < 0:
        raise CompareError(f"warmup={warmup}: must be at least 0, a number of logged steps")
    by = [token.strip() for token in by if token.strip()]
    members = [read_member(run) for run in wanted]
    differ = differences(members, by, each)
    columns = columns_of(differ, members, by)
    quantities = choose(members, metrics)
    told = [*(name for column in columns for name in column.fields), *differ.implied]
    rows = rows_of(members, told, differ.merged, each=each, baseline=baseline)
    rows = measured(rows, quantities, warmup)
    notes = notes_on(rows, columns, quantities, differ)
    return Comparison(
        title, tuple(columns), tuple(quantities), tuple(rows), tuple(notes), warmup, tuple(differ.implied)
    )
