"""Appending to a record of a run line by line, without ever raising into training."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from types import TracebackType
from typing import Self

from europa_exp.runs.status import STATUS_FILE, write_status

log = logging.getLogger(__name__)


class LineWriter:
    """Appends lines to a file. Never raises into training: a full disk is told once, and ``problem`` keeps it.

    A line goes to the system in one write, so a crash of the process can cut no line; a crash of the machine can, and the
    next writer then starts on a line of its own.
    """

    what = "lines"
    """What the lines hold: the key of the note in ``status.json`` about lines that are missing."""

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

    def append(self, line: str) -> bool:
        """Append one line, given without its end; False if it could not be written."""
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
                write_status(self.path.parent, None, **{self.what: note})
                self._noted = True

    def __enter__(self) -> Self:
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
            log.warning("%s are not recorded, training goes on: %s", self.what.capitalize(), self.problem)
