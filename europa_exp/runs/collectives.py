"""``collectives.jsonl``: what the collectives of parameters, gradients and routed tokens carried in each logged step.

Written when ``profiling.collectives`` is true. The all-reduces of loss and gradient norm and the exchange of token counts
are not in it.

One JSON object a logged step::

    {"step": 10, "time": "2026-11-29T15:00:00.000+00:00", "steps": 1, "world": 4, "rows": [
      {"collective": "all_gather", "role": "expert", "group": "efsdp", "ranks": 2, "dtype": "uint8", "calls": 8,
       "bytes": 4325376, "sent_bytes": 4325376, "max_bytes": 4325376, "seconds": 0.0124, "max_seconds": 0.0131}, ...]}

All values are per step: averages over the ``steps`` steps since the line before. ``bytes`` are those that rank 0 handed over,
``sent_bytes`` an estimate of what left it; ``max_*`` are the largest of any rank. ``seconds`` add up the calls of rank 0, from
the moment when it is ready for one until the result is there; times are absent where none are measured (on a CPU).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from europa_exp.runs import commands
from europa_exp.runs.folder import RunFolder, RunFolderError
from europa_exp.runs.lines import LineWriter
from europa_exp.runs.lookup import LookupFailed
from europa_exp.runs.metrics import counted, read_metrics
from europa_exp.runs.status import now

COLLECTIVES_FILE = "collectives.jsonl"


@dataclass(frozen=True)
class Row:
    """One kind of collective; the fields are those of the record, see the module's text."""

    collective: str
    role: str
    group: str
    ranks: int
    dtype: str
    calls: float
    bytes: float
    sent_bytes: float
    max_bytes: float
    seconds: float | None = None
    max_seconds: float | None = None

    def as_data(self) -> dict[str, Any]:
        """The row as JSON-able data, without the times that were not measured."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class Table:
    """The collectives of one logged step: values per step, averaged over ``steps`` steps, of a run on ``world`` ranks."""

    step: int
    steps: int
    world: int
    rows: tuple[Row, ...]
    time: str = ""

    def as_data(self) -> dict[str, Any]:
        """The table as it is recorded."""
        return {
            "step": self.step,
            "time": self.time,
            "steps": self.steps,
            "world": self.world,
            "rows": [row.as_data() for row in self.rows],
        }


class CollectivesWriter(LineWriter):
    """Appends to ``collectives.jsonl``; see ``LineWriter``."""

    what = "collectives"

    def write(self, step: int, steps: int, world: int, rows: Sequence[Row]) -> bool:
        """Append the table of one step; False if it could not be written."""
        table = Table(step, steps, world, tuple(rows), now())
        return self.append(json.dumps(table.as_data(), separators=(",", ":")))


def collectives_file(run: RunFolder) -> Path:
    """Where the tables of a run are."""
    return run.path / COLLECTIVES_FILE


def table(run: RunFolder, step: int | None = None) -> Table:
    """The table of a logged step of ``run``, by default of the newest; what a later attempt did again counts
    as it did it (``metrics.counted``).

    Raises:
        LookupFailed: the run recorded no tables, or none of that step.
        RunFolderError: the record can't be read.
    """
    found = {table.step: table for table in _tables(collectives_file(run))}
    if not found:
        raise LookupFailed(_why_none(run))
    if step is None:
        return list(found.values())[-1]
    if step not in found:
        steps = sorted(found)
        known = f"{len(steps)} steps from {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"
        raise LookupFailed(
            f"step={step}: {run.name} recorded the collectives of {known}, and not of this one"
        )
    return found[step]


def _tables(path: Path) -> list[Table]:
    try:
        lines = counted(read_metrics(path).rows)
    except OSError as error:
        raise RunFolderError(f"{path} can't be read: {error.strerror or error}") from error
    names = {field.name for field in fields(Row)}
    found = []
    for line in lines:
        try:
            rows = tuple(Row(**{k: v for k, v in row.items() if k in names}) for row in line["rows"])
            found.append(Table(line["step"], line["steps"], line["world"], rows, line.get("time", "")))
        except (KeyError, TypeError, AttributeError):
            continue  # no table: as read_metrics leaves out what is no record of a step
    return found


def _why_none(run: RunFolder) -> str:
    try:
        asked = run.config().profiling.collectives
    except Exception:  # `europa show` tells what is wrong with the configuration
        asked = False
    if asked:
        if run.status().ended:
            return f"{run.name} ended, and {_without_tables(collectives_file(run))}"
        return f"{run.name} has recorded no collectives yet: no step is logged. `europa status` tells how it goes"
    return (
        f"{run.name} recorded no collectives: profiling.collectives was false. Run it again with them: "
        + commands.rerun(run, "profiling.collectives=true")
    )


def _without_tables(path: Path) -> str:
    """What is wrong with a record that holds no table."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return f"{path} is missing: it was never written, or deleted since"
    if size == 0:
        return f"{path} is empty: no step was logged, or no line could be written"
    return f"{path} is unreadable: none of its lines is a table of collectives"
