"""A comparison as text: a table for people, Markdown for documents, CSV and JSON with every digit for programs."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Sequence

from europa_exp.config.experiment import EXPERIMENT
from europa_exp.runs.cells import ABSENT, field_text, value_text, verdict_text
from europa_exp.runs.compare import Column, Comparison, Row
from europa_exp.runs.compare.data import as_csv, as_data
from europa_exp.runs.quantities import Quantity
from europa_exp.runs.statistics import Verdict

FORMATS = ("table", "markdown", "csv", "json")
_GAP = 3
_WIDEST_FIELD = 28
_LONGEST_CELL = 56
_FLAVOR = "model.flavor"


def render(
    comparison: Comparison, format: str = "table", *, width: int | None = None, color: bool = False
) -> str:
    """``comparison`` as text in one of ``FORMATS``, without a line end.

    ``width`` (table only) is that of the terminal: quantities that don't fit continue in a further table below. Without it
    the table is plain, a row a line however long. ``color`` marks better and worse. Raises ValueError for another format.
    """
    if format == "table":
        return _plain(comparison) if width is None else _terminal(comparison, width, color)
    if format == "markdown":
        return _markdown(comparison)
    if format == "csv":
        return as_csv(comparison)
    if format == "json":
        return json.dumps(as_data(comparison), indent=2, ensure_ascii=False, allow_nan=False)
    raise ValueError(f"format={format}: must be one of {', '.join(FORMATS)}")


def show(comparison: Comparison, format: str = "table") -> None:
    """Print to standard output: in colours and as wide as the terminal if there is one, plain otherwise."""
    if format == "table" and sys.stdout.isatty():
        from rich.console import Console

        console = Console()
        text = render(comparison, width=console.width, color=console.color_system is not None)
    else:
        text = render(comparison, format)
    print(text)


# -------------------------------------------------------------------------------------------------------- cells


def column_text(column: Column, row: Row, base: Row | None) -> str:
    """One cell of what differs. A column of several fields tells those that differ from the baseline, as far as they fit."""
    if row.members[0].fields is None:
        return "?"
    if column.fields == (EXPERIMENT,):
        return row.fields[EXPERIMENT] or ABSENT
    if len(column.fields) == 1:
        return field_text(row.fields[column.fields[0]])
    other = {} if base is None or base.members[0].fields is None else base.fields
    changed = [name for name in column.fields if name not in other or row.fields[name] != other[name]]
    if row.baseline or not changed:
        # A model has a name that stands for all its numbers.
        return field_text(row.fields[_FLAVOR]) if _FLAVOR in column.fields else "as baseline"
    if _FLAVOR in changed:
        return field_text(row.fields[_FLAVOR])
    pairs = [f"{name.removeprefix(column.title + '.')}={field_text(row.fields[name])}" for name in changed]
    text = pairs[0]
    for index, pair in enumerate(pairs[1:], start=1):
        if len(text) + len(pair) > _LONGEST_CELL:
            return f"{text} +{len(pairs) - index}"
        text += f" {pair}"
    return text


# -------------------------------------------------------------------------------------------------------- tables


def _fixed(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """Header and cells of everything but the quantities: run, n, state, what differs."""
    rows, base = comparison.rows, comparison.baseline
    several = any(len(row.members) > 1 for row in rows)
    states = any(row.state != "completed" for row in rows)
    header = ["run", *(["n"] if several else []), *(["state"] if states else [])]
    header += [column.title for column in comparison.columns]
    cells: list[list[str]] = []
    for row in rows:
        line = [row.label]
        if several:
            line.append(str(len(row.used)))
        if states:
            line.append(row.state)
        cells.append(line + [column_text(column, row, base) for column in comparison.columns])
    return header, cells


def _head(comparison: Comparison) -> str:
    base = comparison.baseline
    against = f"differences to {base.label}" if base is not None and len(comparison.rows) > 1 else ""
    if against and base is not None and comparison.columns:
        told = [f"{c.title}={column_text(c, base, base)}" for c in comparison.columns if len(c.fields) == 1]
        against += f" ({', '.join(told)})" if told else ""
    warm = comparison.warmup
    skip = "warm-up left out: max(2, 10%) of the steps" if warm is None else f"warm-up left out: {warm} steps"
    return "; ".join(part for part in (comparison.title, against, skip) if part)


def _compared(row: Row, q: Quantity) -> str:
    return (
        "baseline"
        if row.baseline and row.estimates[q.key].value is not None
        else verdict_text(row.verdicts[q.key])
    )


def _plain(comparison: Comparison) -> str:
    header, cells = _fixed(comparison)
    right = [False] * len(header)
    for q in comparison.quantities:
        header += [q.title, "vs. baseline"]
        right += [True, False]
        for row, line in zip(comparison.rows, cells, strict=True):
            line += [value_text(row.estimates[q.key]), _compared(row, q)]
    widths = [max(len(line[i]) for line in [header, *cells]) for i in range(len(header))]
    lines = [
        "  ".join(
            t.rjust(w) if r else t.ljust(w) for t, w, r in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in [header, ["-" * w for w in widths], *cells]
    ]
    return "\n".join([_head(comparison), *lines, *comparison.notes])


def _terminal(comparison: Comparison, width: int, color: bool) -> str:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    header, cells = _fixed(comparison)
    # Long names of fields wrap in the header; the cells decide the width.
    widths = [
        min(max(11 * (len(header[i]) > 11), *(len(line[i]) for line in cells)), _WIDEST_FIELD)
        for i in range(len(header))
    ]
    widths = [max(w, min(len(name), 11)) for w, name in zip(widths, header, strict=True)]
    widths[0] = max(len(line[0]) for line in cells)
    needs = {
        q.key: _GAP
        + max(
            len(q.title),
            *(len(t) for r in comparison.rows for t in (value_text(r.estimates[q.key]), _compared(r, q))),
        )
        for q in comparison.quantities
    }
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=color, color_system="standard" if color else None)
    console.print(Text(_head(comparison), style="bold"))
    for block in _blocks(comparison.quantities, needs, width - sum(widths) - _GAP * len(widths)):
        table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
        for i, name in enumerate(header):
            table.add_column(name, no_wrap=i == 0, overflow="fold", max_width=widths[i])
        for q in block:
            table.add_column(q.title, justify="right", no_wrap=True)
        for row, line in zip(comparison.rows, cells, strict=True):
            measured = []
            for q in block:
                verdict = row.verdicts[q.key]
                cell = Text(value_text(row.estimates[q.key]) + "\n")
                cell.append(_compared(row, q), style=_style(verdict))
                measured.append(cell if row.estimates[q.key].value is not None else Text(ABSENT))
            table.add_row(*(Text(t) for t in line), *measured)
        console.print(table)
        console.print()
    for note in comparison.notes:
        console.print(Text(note, style="dim"))
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip("\n").split("\n"))


def _blocks(quantities: Sequence[Quantity], needs: dict[str, int], room: int) -> list[list[Quantity]]:
    """Quantities that fit side by side; at least one a block, and one empty block if there are none."""
    blocks: list[list[Quantity]] = [[]]
    left = room
    for q in quantities:
        if blocks[-1] and needs[q.key] > left:
            blocks.append([])
            left = room
        blocks[-1].append(q)
        left -= needs[q.key]
    return blocks


def _style(verdict: Verdict | None) -> str:
    if verdict is None or not verdict.outside_noise:
        return "dim"
    return {True: "green", False: "red", None: "bold"}[verdict.better]


def _markdown(comparison: Comparison) -> str:
    header, cells = _fixed(comparison)
    rule = ["---"] * len(header)
    for q in comparison.quantities:
        header += [q.title, "vs. baseline"]
        rule += ["---:", "---"]
        for row, line in zip(comparison.rows, cells, strict=True):
            line += [value_text(row.estimates[q.key]), _compared(row, q)]
    table = ["| " + " | ".join(_escaped(t) for t in line) + " |" for line in (header, *cells)]
    table.insert(1, "| " + " | ".join(rule) + " |")
    notes = [f"- {_escaped(note)}" for note in comparison.notes]
    return "\n".join([_escaped(_head(comparison)), "", *table, *(["", *notes] if notes else [])])


def _escaped(text: str) -> str:
    for sign in "\\|*_`<[":
        text = text.replace(sign, "\\" + sign)
    return " ".join(text.split())
