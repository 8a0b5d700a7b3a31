"""Writing small files so that a reader, a crash or a full disk never meets half of one."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import tempfile
from pathlib import Path
from typing import Any

_SMALLEST_BLOCK = 4096


def write_text(path: Path, text: str) -> None:
    """Write a new file and bring it to the disk (quotas and network file systems report a full disk only then)."""
    with open(path, "x", encoding="utf-8", errors="surrogateescape", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def replace_text(path: Path, text: str) -> None:
    """Replace ``path`` by ``text`` in one move: afterwards it is the old file or the new one. Raises OSError.

    On a full disk there is no room for a second file. What a file system's smallest block holds anyway is then written in
    place, in one write: how a run ended is known even if it ended because the disk was full.
    """
    try:
        _replace(path, text)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not _overwrite(path, text):
            raise


def _overwrite(path: Path, text: str) -> bool:
    """Write over a small file in place; whether that worked."""
    data = text.encode("utf-8", errors="surrogateescape")
    try:
        with open(path, "r+b", buffering=0) as file:
            before = os.fstat(file.fileno()).st_size
            if not 0 < before <= _SMALLEST_BLOCK or len(data) > _SMALLEST_BLOCK:
                return False
            # Blanks cover what the old text leaves, so that a reader never meets its end behind the new one.
            whole = data.ljust(before)
            written = file.write(whole)
            if written == len(whole):
                file.truncate(len(data))
            return written == len(whole)
    except OSError:
        return False


def _replace(path: Path, text: str) -> None:
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="surrogateescape", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def append_line(path: Path, line: str) -> None:
    """Append one line to a file that many processes, on several nodes, append to. Raises OSError."""
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        # On some network file systems appending is safe on one node only; some have no locks.
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        os.write(handle, f"{line}\n".encode())
    finally:
        os.close(handle)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The mappings in a file of JSON lines; empty without one. A line that is cut or no mapping is left out."""
    found = []
    with contextlib.suppress(OSError):
        for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                line = json.loads(text)
                if isinstance(line, dict):
                    found.append(line)
    return found


def sync_folder(path: Path) -> None:
    """Bring the entries of a folder to the disk; file systems that can't are left alone."""
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _umask() -> int:
    # mkstemp makes files for the owner alone; colleagues in the same group must be able to read a run.
    with contextlib.suppress(OSError, StopIteration, ValueError):
        line = next(s for s in Path("/proc/self/status").read_text().splitlines() if s.startswith("Umask:"))
        return int(line.split()[1], 8)
    return 0o022
