"""The logs of a run: which there are, and reading one while it grows."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from europa_exp.runs.folder import RunFolder
from europa_exp.runs.status import Status

_CHUNK = 1 << 20


def ranks(run: RunFolder) -> list[int]:
    """The ranks that have a log, in order."""
    names = (re.fullmatch(r"rank_(\d+)\.log", path.name) for path in (run.path / "logs").glob("rank_*.log"))
    return sorted(int(found[1]) for found in names if found)


def spans(numbers: Sequence[int]) -> str:
    """``0-3, 7`` for 0, 1, 2, 3, 7 (in order)."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def job_logs(status: Status, jobs: Sequence[str]) -> list[Path]:
    """What Slurm's jobs of a run wrote themselves, the oldest first: output of the job script, srun and Slurm's daemons."""
    folder = status.extra.get("job_folder")
    if not isinstance(folder, str):
        return []
    found: list[Path] = []
    for job in jobs:
        for end in ("out", "err"):
            # submitit's names: <job>_<task of the step>_log.out, where the job may be the task of an array, as in 123_4.
            name = re.compile(rf"{re.escape(job)}_(\d+)_log\.{end}")
            named = ((m, p) for p in Path(folder).glob(f"{job}_*_log.{end}") if (m := name.fullmatch(p.name)))
            found += [p for _, p in sorted((int(m[1]), p) for m, p in named)]
    return [p for p in dict.fromkeys(found) if p.stat().st_size > 0]


def read(path: Path) -> Iterator[bytes]:
    """The file in pieces, as it is now. Raises OSError."""
    with open(path, "rb") as file:
        while piece := file.read(_CHUNK):
            yield piece


def follow(
    path: Path, over: Callable[[], bool], *, skip_to_last: int | None = None, every: float = 0.5
) -> Iterator[bytes]:
    """The file in pieces, and what is added to it, until ``over()`` is True and all of it was read. The file may come later,
    and may be replaced by another one: then that is read from its beginning.

    ``skip_to_last`` begins with so many lines of what is there already, instead of all of it.
    """
    offset = 0 if skip_to_last is None else _start_of_last(path, skip_to_last)
    identity: int | None = None
    while True:
        last = over()  # asked before reading, so that the last round sees the last line
        try:
            with open(path, "rb") as file:
                found = os.fstat(file.fileno())
                if identity not in (None, found.st_ino) or found.st_size < offset:
                    offset = 0
                identity = found.st_ino
                file.seek(offset)
                while piece := file.read(_CHUNK):
                    offset += len(piece)
                    yield piece
        except FileNotFoundError:
            pass
        if last:
            return
        time.sleep(every)


def _start_of_last(path: Path, lines: int) -> int:
    """Offset of the last so many lines; 0 if the file is not there yet."""
    try:
        with open(path, "rb") as file:
            content = file.read()
    except OSError:
        return 0
    kept = content.splitlines(keepends=True)[-lines:] if lines else []
    return len(content) - sum(map(len, kept))
