"""Verbs that show what a run recorded beyond its metrics: collectives."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from europa_exp.cli.base import ABSENT, RUNS, RunsDir, command, print_table

if TYPE_CHECKING:
    from europa_exp.runs.collectives import Row


@command()
def collectives(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A folder, a name, a unique prefix, or a hash.")],
    runs_dir: RunsDir = RUNS,
    step: Annotated[
        int | None, typer.Option("--step", metavar="N", help="A logged step. Default: the newest.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="As JSON, in bytes and seconds with every digit.")
    ] = False,
) -> None:
    """Show the collectives of parameters, gradients and routed tokens in a step.

    For each: process group, dtype, calls, bytes and, on CUDA, time. The run has to record them: profiling.collectives=true.
    """
    from europa_exp.runs.collectives import table
    from europa_exp.runs.lookup import find

    folder = find(runs_dir, run)
    found = table(folder, step)
    if as_json:
        print(json.dumps({"run": folder.name, **found.as_data()}, indent=2))
        return
    average = f", average of {found.steps} steps" if found.steps > 1 else ""
    print(f"{folder.name}, step {found.step}{average}: what rank 0 of {found.world} handed over in a step\n")
    timed = any(row.max_seconds is not None for row in found.rows)
    header = ["collective", "role", "group", "ranks", "dtype", "calls", "bytes", "most", "sent, about"]
    rows = sorted(found.rows, key=lambda row: row.sent_bytes, reverse=True)
    lines = [_line(row) for row in rows]
    if timed:
        header += ["time", "longest"]
        lines = [[*line, _time(row.seconds), _time(row.max_seconds)] for line, row in zip(lines, rows)]
    calls, handed, sent = (
        sum(getattr(row, name) for row in rows) for name in ("calls", "bytes", "sent_bytes")
    )
    total = ["sum", "", "", "", "", f"{calls:g}", _size(handed), "", _size(sent)]
    total += [""] * (len(header) - len(total))
    print_table(header, [*lines, total], [], styles={})
    print("\nmost, longest: of any rank. Sent: estimated for rings and evenly spread tokens.")
    if not timed:
        print("No times: they are measured on CUDA.")


def _line(row: "Row") -> list[str]:
    names = [row.collective, row.role, row.group, str(row.ranks), row.dtype]
    return [*names, f"{row.calls:g}", _size(row.bytes), _size(row.max_bytes), _size(row.sent_bytes)]


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1000:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return ABSENT
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"
