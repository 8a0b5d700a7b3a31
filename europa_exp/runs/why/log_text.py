"""The end of a log as numbered lines, to look for symptoms in and to quote from."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from europa_exp.runs.why.explanation import MOST_LINES, Evidence, shorten

_TAIL = 64 * 1024
_ATTEMPT = "======== "
"""Begins the first line of an attempt in a rank's log; on Slurm that names the job and how often it was restarted."""
_OF_JOB = re.compile(r"======== \S+ job (\S+?)(?:, restart (\d+))?, rank ")


@dataclass(frozen=True)
class LogText:
    """Lines of a log. ``name`` is what evidence calls it; ``offset`` bytes and then ``skipped`` lines come before them."""

    path: Path
    name: str
    lines: list[str]
    offset: int = 0
    skipped: int = 0

    @classmethod
    def end_of(cls, path: Path, root: Path) -> LogText:
        """The last 64 KiB of ``path``, called by its path under ``root``; without lines if it can't be read."""
        name = str(path.relative_to(root) if path.is_relative_to(root) else path)
        try:
            with open(path, "rb") as file:
                offset = max(0, file.seek(0, 2) - _TAIL)
                file.seek(offset)
                data = file.read()
        except OSError:
            return cls(path, name, [])
        if offset:
            cut = data.find(b"\n") + 1
            offset, data = offset + cut, data[cut:]
        return cls(
            path, name, data.decode(errors="replace").removesuffix("\n").split("\n") if data else [], offset
        )

    def last_attempt(self) -> LogText:
        """What the last of several attempts wrote; everything where no attempt is marked."""
        begins = [i for i, line in enumerate(self.lines) if line.startswith(_ATTEMPT)]
        if not begins:
            return self
        return replace(self, lines=self.lines[begins[-1] :], skipped=self.skipped + begins[-1])

    @property
    def begun_by(self) -> tuple[str, int] | None:
        """The job, and how often it was restarted, that the first line says; None where it is no such line."""
        found = _OF_JOB.match(self.lines[0]) if self.lines else None
        return (found[1], int(found[2] or 0)) if found else None

    def find(self, pattern: re.Pattern[str]) -> int | None:
        """Index of the last line that fits: what is said last, the end was about."""
        return next((i for i in range(len(self.lines) - 1, -1, -1) if pattern.search(self.lines[i])), None)

    def around(self, index: int, before: int = 0, after: int = 0) -> list[Evidence]:
        """Lines around one, with the number of the first in the whole file."""
        first = max(index - before, 0)
        chosen = self.lines[first : index + after + 1][:MOST_LINES]
        while len(chosen) > 1 and not chosen[-1].strip():
            chosen.pop()
        return [Evidence(f"{self.name}:{self._number(first)}", tuple(shorten(line) for line in chosen))]

    def last(self, count: int = MOST_LINES) -> list[Evidence]:
        """The last lines that say something, with the number of the first of them."""
        kept = [i for i, line in enumerate(self.lines) if line.strip()][-count:]
        if not kept:
            return []
        return [Evidence(f"{self.name}:{self._number(kept[0])}", tuple(shorten(self.lines[i]) for i in kept))]

    def _number(self, index: int) -> int:
        number = 1 + self.skipped + index
        if self.offset:
            with open(self.path, "rb") as file:
                left = self.offset
                while left > 0 and (piece := file.read(min(left, 1 << 20))):
                    number += piece.count(b"\n")
                    left -= len(piece)
        return number
