"""A comparison for programs: JSON-able data and CSV, with every digit."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from typing import Any

from europa_exp.runs.cells import field_text
from europa_exp.runs.compare.comparison import Comparison, Row
from europa_exp.runs.quantities import Quantity
from europa_exp.runs.statistics import Estimate, Verdict


def as_data(comparison: Comparison) -> dict[str, Any]:
    """The comparison as JSON-able data with full precision; what is not finite is the string ``"NaN"``, ``"Infinity"``, ..."""
    base = comparison.baseline
    return {
        "title": comparison.title,
        "baseline": base.label if base else None,
        "warmup": comparison.warmup,
        "fields": _field_names(comparison),
        "metrics": [q.key for q in comparison.quantities],
        "rows": [_row_data(row, comparison.quantities) for row in comparison.rows],
        "notes": list(comparison.notes),
    }


def _field_names(comparison: Comparison) -> list[str]:
    """All that differs, also where the table lets the experiment say it."""
    return [*(name for column in comparison.columns for name in column.fields), *comparison.implied]


def _row_data(row: Row, quantities: Sequence[Quantity]) -> dict[str, Any]:
    return {
        "label": row.label,
        "baseline": row.baseline,
        "n": len(row.used),
        "state": row.state,
        "runs": [
            {
                "name": m.entry.name,
                "path": str(m.entry.run.path),
                "identity": m.entry.identity,
                "state": m.entry.state,
            }
            for m in row.members
        ],
        "fields": row.fields,
        "metrics": {
            q.key: _measured(row.estimates[q.key], row.verdicts[q.key], q)
            for q in quantities
            if row.estimates[q.key].value is not None
        },
    }


def _measured(estimate: Estimate, verdict: Verdict | None, q: Quantity) -> dict[str, Any]:
    return {
        "value": _json(estimate.value),
        "taken_as": str(q.value),
        "spread": _json(estimate.spread),
        "spread_over": estimate.over,
        "values": [_json(v) for v in estimate.values],
        "steps": [len(s.used) for s in estimate.samples],
        "difference": _json(verdict.difference) if verdict else None,
        "difference_percent": _json(verdict.percent) if verdict else None,
        "noise_percent": _json(verdict.margin) if verdict else None,
        "verdict": verdict.word if verdict else None,
        "better": verdict.better if verdict else None,
        "outside_noise": verdict.outside_noise if verdict else None,
        "basis": verdict.basis if verdict else None,
    }


def _json(value: float | None) -> float | str | None:
    if value is None or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")


def as_csv(comparison: Comparison) -> str:
    """A row a line, without a line end after the last; a cell without a value is empty."""
    names = _field_names(comparison)
    header = ["label", "baseline", "n", "state", "runs", *names]
    parts = ("", ":spread", ":difference_percent", ":noise_percent", ":verdict")
    for q in comparison.quantities:
        header += [q.key + part for part in parts]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(header)
    for row in comparison.rows:
        line: list[Any] = [row.label, str(row.baseline).lower(), len(row.used), row.state]
        line.append(" ".join(m.entry.name for m in row.members))
        line += ["" if row.fields[name] is None else field_text(row.fields[name]) for name in names]
        for q in comparison.quantities:
            estimate, verdict = row.estimates[q.key], row.verdicts[q.key]
            line += [estimate.value, estimate.spread]
            line += [verdict.percent, verdict.margin, verdict.word] if verdict else [None, None, None]
        writer.writerow(["" if cell is None else cell for cell in line])
    return out.getvalue().rstrip("\n")
