"""The table of points that ``launch.preview=true`` prints: nothing is submitted, nothing is written."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TextIO

from europa_exp.config.errors import show as shown
from europa_exp.launch.fields import schema_order

if TYPE_CHECKING:
    from europa_exp.launch.expand import Plan
    from europa_exp.launch.points import Point

COLUMNS = ("name", "hash", "what differs", "ranks", "runs")


def show(plan: Plan, stream: TextIO | None = None) -> None:
    """Print one row a point: a table in a terminal, plain lines elsewhere."""
    stream = stream or sys.stdout
    rows = table(plan)
    common = _words(_common([p for p in plan.points if p.repeat == 0]))
    if stream.isatty():
        _rich(rows, stream)
    else:
        _plain(rows, stream)
    if len(rows) > 1 and common:
        print(f"all: {common}", file=stream)
    left_out = f", {plan.excluded} left out by the sweep file" if plan.excluded else ""
    runs = "1 run" if len(plan.points) == 1 else f"{len(plan.points)} runs"
    sweep = f" of sweep {plan.sweep}" if plan.sweep else ""
    print(f"Preview of {runs}{sweep}{left_out}; nothing was submitted.", file=stream)


def table(plan: Plan) -> list[tuple[str, ...]]:
    """Rows of `COLUMNS`. What differs is relative to the other points, for a single point to the default composition."""
    points = [p for p in plan.points if p.repeat == 0]
    common = _common(points) if len(points) > 1 else {}
    names = {k for p in points for k in p.delta if k not in common}
    fields = sorted(names, key=schema_order)
    rows: list[tuple[str, ...]] = []
    for point in points:
        differs = {k: point.delta.get(k, _value(point, k)) for k in fields}
        p = point.cfg.parallelism
        rows.append(
            (
                point.name,
                point.identity,
                _words(differs) or "nothing (the default composition)",
                str(p.nodes * p.gpus_per_node),
                str(point.cfg.launch.repeat),
            )
        )
    return rows


def _common(points: list[Point]) -> dict[str, Any]:
    """What all points have in common that the default composition doesn't have."""
    first = points[0].delta
    return {k: v for k, v in first.items() if all(k in p.delta and p.delta[k] == v for p in points)}


def _value(point: Point, dotted: str) -> Any:
    value: Any = point.cfg
    for part in dotted.split("."):
        value = value.get(part) if isinstance(value, dict) else getattr(value, part)
    return value


def _words(fields: dict[str, Any], most: int = 12) -> str:
    """Fields as they would be typed; a model's name stands for its fields."""
    if "model.flavor" in fields:
        fields = {k: v for k, v in fields.items() if k == "model.flavor" or not k.startswith("model.")}
    words = [f"{k}={v if isinstance(v, str) else shown(v)}" for k, v in fields.items()]
    rest = len(words) - most
    return " ".join(words[:most]) + (f" and {rest} more" if rest > 0 else "")


def _plain(rows: list[tuple[str, ...]], stream: TextIO) -> None:
    lines = [COLUMNS, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(COLUMNS))]
    for line in lines:
        print("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip(), file=stream)


def _rich(rows: list[tuple[str, ...]], stream: TextIO) -> None:
    from rich.console import Console
    from rich.table import Table

    out = Table()
    for column in COLUMNS:
        out.add_column(column, overflow="fold", justify="right" if column in ("ranks", "runs") else "left")
    for row in rows:
        out.add_row(*(cell.replace("[", r"\[") for cell in row))
    Console(file=stream).print(out)
