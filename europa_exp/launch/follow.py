"""The view of a sweep while it runs, from run folders alone: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from europa_exp.runs.folder import RunFolder
from europa_exp.runs.status import State, Status

if TYPE_CHECKING:
    from rich.table import Table

LOSS = "loss/global_avg"
SPEED = "throughput/tokens_per_second_per_gpu"

_COLOURS = {
    "running": "cyan",
    "completed": "green",
    "failed": "red",
    "cancelled": "yellow",
    "loading": "blue",
}


@dataclass
class Row:
    """What is known of one run at this moment. ``state`` is the recorded one, or ``loading`` before its ranks run."""

    run: RunFolder
    steps: int
    """Steps that the run is to make."""

    status: Status = field(default_factory=lambda: Status(State.created))
    step: int | None = None
    loss: float | None = None
    speed: float | None = None
    """Tokens per second and rank."""

    loading: bool = False
    stamps: tuple[Any, ...] = ()

    @property
    def state(self) -> str:
        return "loading" if self.loading else str(self.status.state)

    def refresh(self) -> None:
        """Read what changed since the last call. A folder that is gone reads as ``unknown``."""
        stamps = tuple(
            _stamp(p) for p in (self.run.path / "status.json", self.run.metrics_file, self.run.launcher_log)
        )
        if stamps == self.stamps:
            return
        self.stamps = stamps
        self.status = self.run.status()
        self.loading = self.status.state in (State.created, State.queued) and stamps[2] is not None
        last = last_row(self.run.metrics_file)
        if last is not None:
            self.step = last.get("step")
            self.loss, self.speed = _number(last.get(LOSS)), _number(last.get(SPEED))

    def progress(self) -> str:
        """``12/20``, or nothing before the first logged step."""
        return "" if self.step is None else f"{self.step}/{self.steps}"


class View(Protocol):
    """Where the state of a sweep is shown."""

    def __enter__(self) -> View: ...
    def __exit__(self, *error: object) -> None: ...

    def show(self, rows: Sequence[Row]) -> None:
        """Show the present state."""

    def say(self, text: str) -> None:
        """A message that stays."""


class PlainView:
    """One line at a change of state, one line of progress a run every ``every`` seconds."""

    def __init__(self, every: float = 10.0) -> None:
        self._every = every
        self._states: dict[str, str] = {}
        self._last: dict[str, float] = {}

    def __enter__(self) -> PlainView:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def show(self, rows: Sequence[Row]) -> None:
        for number, row in enumerate(rows, start=1):
            name, now = row.run.name, time.monotonic()
            changed = self._states.get(name) != row.state
            due = row.state == "running" and now - self._last.get(name, now) >= self._every
            news = changed and not (row.state in ("created", "queued") and name not in self._states)
            if news or due:
                self.say(f"[{number}/{len(rows)}] {name}: {row.state}{_details(row)}")
            if changed or due:
                self._last[name] = now
            self._states[name] = row.state

    def say(self, text: str) -> None:
        _print(text)


class LiveView:
    """A table that redraws itself; needs a terminal."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console()
        self._live = Live(console=self._console, auto_refresh=False, vertical_overflow="crop")

    def __enter__(self) -> LiveView:
        self._live.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.__exit__(None, None, None)

    def show(self, rows: Sequence[Row]) -> None:
        self._live.update(table(rows, height=self._console.height), refresh=True)

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def make_view() -> View:
    """The table on a terminal that can redraw, plain lines otherwise."""
    return LiveView() if has_terminal() else PlainView()


def has_terminal() -> bool:
    """Whether standard output is a terminal that can redraw a table."""
    return sys.stdout is not None and sys.stdout.isatty() and os.environ.get("TERM", "") not in ("", "dumb")


def table(rows: Sequence[Row], *, height: int) -> Table:
    """The rows as a table of at most ``height`` lines: what runs or failed stays in sight, the rest is counted."""
    from rich.table import Table
    from rich.text import Text

    room = max(height - 6, 3)
    shown = list(rows)
    if len(shown) > room:
        order = {"running": 0, "loading": 0, "failed": 1, "unknown": 1, "completed": 3, "cancelled": 3}
        best = sorted(range(len(rows)), key=lambda i: (order.get(rows[i].state, 2), i))[:room]
        shown = [rows[i] for i in sorted(best)]
    out = Table(expand=False)
    out.add_column("run", no_wrap=True, overflow="ellipsis", ratio=1)
    out.add_column("state", no_wrap=True)
    for name in ("step", "loss", "tok/s/rank"):
        out.add_column(name, justify="right", no_wrap=True)
    for row in shown:
        out.add_row(
            Text(row.run.name),
            Text(row.state, style=_COLOURS.get(row.state, "")),
            row.progress(),
            _text(row.loss, ".4f"),
            _text(row.speed, ",.0f"),
        )
    if len(shown) < len(rows):
        out.caption = f"{len(rows) - len(shown)} more: {count_states(rows)}"
    return out


def count_states(rows: Sequence[Row]) -> str:
    """``5 completed, 1 failed``."""
    counts: dict[str, int] = {}
    for row in rows:
        counts[row.state] = counts.get(row.state, 0) + 1
    return ", ".join(f"{n} {state}" for state, n in counts.items())


def follow(
    rows: Sequence[Row],
    view: View,
    *,
    active: Callable[[], bool],
    tick: Callable[[], None],
    interval: float = 0.25,
) -> None:
    """Show ``rows`` until ``active()`` is False: the process behind them has ended. ``tick`` is called in every round.

    A run that fails is told in full when it does, not at the end of the sweep.
    """
    told: set[str] = set()
    with view:
        while True:
            going_on = active()  # asked before reading, so that the last round sees the last word
            for row in rows:
                row.refresh()
            for row in rows:
                if row.status.state is State.failed and row.run.name not in told:
                    told.add(row.run.name)
                    view.say(failure_text(row))
            view.show(rows)
            if not going_on:
                return
            tick()
            time.sleep(interval)


def failure_text(row: Row) -> str:
    """Why a run failed, for the screen: the rank, the error, the end of its traceback, where the rest is."""
    error = row.status.error or {}
    rank = error.get("rank")
    kind, message = error.get("type", "failed"), _first_line(str(error.get("message") or ""))
    if rank is None:
        head = f"{row.run.name} failed: {message or kind}"
        log = row.run.launcher_log
    else:
        what = message if kind in ("Killed", "Exited") else f"rank {rank}: {kind}: {message}"
        head = f"{row.run.name} failed: {what}"
        log = row.run.log(rank)
    lines = [head, *(f"    {line}" for line in str(error.get("traceback") or "").splitlines())]
    if log.exists():
        lines.append(f"  log: {_relative(log)}")
    return "\n".join(lines)


def last_row(path: Path, size: int = 16384) -> dict[str, Any] | None:
    """The last whole line of ``metrics.jsonl``; a long file is read at its end only."""
    try:
        with open(path, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - size))
            lines = file.read().split(b"\n")
    except OSError:
        return None
    for line in reversed(lines[:-1]):  # what follows the last line end is not whole yet
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            return row
    return None


def _details(row: Row) -> str:
    parts = []
    if row.step is None and row.state == "running":
        parts.append("no step logged yet")
    if row.step is not None:
        parts.append(f"step {row.progress()}")
    if row.loss is not None:
        parts.append(f"loss {row.loss:.4f}")
    if row.speed is not None:
        parts.append(f"{row.speed:,.0f} tok/s/rank")
    return "  " + "  ".join(parts) if parts else ""


def _number(value: Any) -> float | None:
    try:
        return float(value)  # "NaN" and "Infinity" are written as words
    except (TypeError, ValueError):
        return None


def _text(value: float | None, form: str) -> str:
    if value is None:
        return ""
    return format(value, form) if math.isfinite(value) else str(value)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _first_line(text: str, longest: int = 300) -> str:
    line = text.strip().partition("\n")[0]
    return line if len(line) <= longest else line[:longest] + "..."


def _relative(path: Path) -> str:
    text = os.path.relpath(path)
    return str(path) if text.startswith("..") else text


def _print(text: str) -> None:
    # A reader that has gone away (`| head`) must not stop the runs.
    try:
        print(text, flush=True)
    except (OSError, ValueError):
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
