"""``metrics.jsonl``: one JSON object a logged step, written line by line, read whatever happened to it.

``{"step": 10, "time": "2026-11-29T15:00:00.000+00:00", "loss/global_avg": 2.31, ...}``. Keys besides ``step`` and ``time``
hold numbers. JSON has no word for what is not finite, so those are the strings ``"NaN"``, ``"Infinity"``, ``"-Infinity"``
in the file and floats again after reading: other tools can read every line.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from europa_exp.runs.lines import LineWriter
from europa_exp.runs.status import now

METRICS_FILE = "metrics.jsonl"

_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class MetricsWriter(LineWriter):
    """Appends to ``metrics.jsonl``; see ``LineWriter``."""

    what = "metrics"

    def write(self, metrics: Mapping[str, Any], step: int) -> bool:
        """Append the metrics of one step; False if the line could not be written."""
        return self.append(to_line(metrics, step))


@dataclass(frozen=True)
class MetricsRead:
    """What a reader found: the rows, whether the last line was cut, and ``(line number, why)`` of lines left out."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    cut: bool = False
    skipped: list[tuple[int, str]] = field(default_factory=list)


def read_metrics(path: str | os.PathLike[str]) -> MetricsRead:
    """Read ``metrics.jsonl``; a missing file has no rows.

    A last line that was cut in the middle is dropped (``cut``); any other line that is no record of a step is left out and
    reported (``skipped``), never passed on half. Raises OSError when the file is there and can't be read.
    """
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        return MetricsRead()
    found = MetricsRead()
    lines = data.split(b"\n")
    whole = lines[-1] == b""
    if whole:
        lines.pop()
    cut = False
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            found.rows.append(_row(line))
        except ValueError as error:
            if number == len(lines) and not whole:
                cut = True
            else:
                found.skipped.append((number, str(error)))
    return MetricsRead(found.rows, cut, found.skipped)


def counted(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows that count, by step, of rows in the order of writing.

    A later attempt goes on from a checkpoint: what an earlier one had logged from there on is done again, or was never
    reached again. Either way it belongs to the attempt that was lost, however far that had come.
    """
    kept: list[dict[str, Any]] = []
    for row in rows:
        while kept and kept[-1]["step"] >= row["step"]:
            kept.pop()
        kept.append(row)
    return kept


def to_line(metrics: Mapping[str, Any], step: int) -> str:
    """One step as a line of ``metrics.jsonl``, without the line end. Values that are no numbers are left out."""
    row: dict[str, Any] = {"step": int(step), "time": now()}
    for key, value in numbers(metrics).items():
        row[key] = value if math.isfinite(value) else _word(value)
    return json.dumps(row, separators=(",", ":"), allow_nan=False)


def numbers(metrics: Mapping[str, Any]) -> dict[str, int | float]:
    """The metrics that are numbers, as Python's own; scalars of array libraries count, None and texts are left out."""
    found: dict[str, int | float] = {}
    for key, value in metrics.items():
        if not isinstance(value, int | float) and hasattr(value, "item"):
            try:
                value = value.item()
            except (RuntimeError, ValueError, TypeError):
                continue
        if isinstance(value, int | float) and key not in ("step", "time"):
            found[str(key)] = value
    return found


def _row(line: bytes) -> dict[str, Any]:
    row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError("the line holds no mapping")
    if not isinstance(row.get("step"), int) or isinstance(row["step"], bool):
        raise ValueError("the line holds no step")
    return {k: _NOT_FINITE.get(v, v) if isinstance(v, str) else v for k, v in row.items()}


def _word(value: float) -> str:
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
