"""``metrics.jsonl``: one JSON object a logged step, written line by line, read whatever happened to it.

``{"step": 10, "time": "2026-11-29T15:00:00.000+00:00", "loss/global_avg": 2.31, ...}``. Keys besides ``step`` and ``time``
hold numbers. JSON has no word for what is not finite, so those are the strings ``"NaN"``, ``"Infinity"``, ``"-Infinity"``
in the file and floats again after reading: other tools can read every line.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from europa_exp.runs.status import STATUS_FILE, now, write_status

METRICS_FILE = "metrics.jsonl"

_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

log = logging.getLogger(__name__)


class MetricsWriter:
    """Appends to ``metrics.jsonl``. Never raises into training: a full disk is told once, and ``problem`` keeps it.

    A line goes to the system in one write, so a crash of the process can cut no line; a crash of the machine can, and the
    next writer then starts on a line of its own.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.problem: str | None = None
        """Why lines are missing, or None while all were written."""
        self.lost = 0
        """Lines that could not be written."""
        self._handle: int | None = None
        self._torn = False
        self._noted = False
        try:
            self._open()
        except OSError as error:
            self._trouble(error)

    def write(self, metrics: Mapping[str, Any], step: int) -> bool:
        """Append the metrics of one step; False if the line could not be written."""
        line = to_line(metrics, step)
        try:
            if self._handle is None:
                self._open()
            assert self._handle is not None
            data = (("\n" if self._torn else "") + line + "\n").encode()
            written = os.write(self._handle, data)
            self._torn = written < len(data)
            if self._torn:
                raise OSError(f"only {written} of {len(data)} bytes were written")
        except OSError as error:
            self.lost += 1
            self._trouble(error)
            return False
        return True

    def close(self) -> None:
        """Bring the lines to the disk and close the file; lines that are missing are noted in ``status.json``.

        A second call does nothing.
        """
        if self._handle is not None:
            handle, self._handle = self._handle, None
            try:
                os.fsync(handle)
            except OSError as error:
                self._trouble(error)
            finally:
                os.close(handle)
        if self.problem is not None and not self._noted and (self.path.parent / STATUS_FILE).exists():
            with contextlib.suppress(OSError):
                note = {"incomplete": True, "lost_lines": self.lost, "problem": self.problem}
                write_status(self.path.parent, None, metrics=note)
                self._noted = True

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> None:
        self._handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        size = os.fstat(self._handle).st_size
        self._torn = size > 0 and os.pread(self._handle, 1, size - 1) != b"\n"

    def _trouble(self, error: OSError) -> None:
        if self.problem is None:
            self.problem = f"{self.path.name}: {error}"
            log.warning("Metrics are not recorded, training goes on: %s", self.problem)


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
