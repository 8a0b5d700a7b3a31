"""What the operating system offers so that no process is left behind: parent-death signals, adoption, process tables.

On Linux the kernel does the work. Elsewhere (macOS) the functions do what they can and say so by their return value.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent ends, however that ends. ``parent``: the expected parent's id.

    The parent may have died before the call; then this process ends at once.
    """
    if not _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL):
        threading.Thread(target=_watch_parent, args=(parent,), daemon=True).start()
    if os.getppid() != parent:
        os._exit(1)


def set_name(name: str) -> None:
    """Name this process in ``ps`` and ``top`` (15 characters)."""
    buffer = ctypes.create_string_buffer(name.encode()[:15])
    _prctl(_PR_SET_NAME, ctypes.addressof(buffer))


def adopt_orphans() -> bool:
    """Become the parent of every descendant whose own parent ends; returns whether the system can."""
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1)


@contextlib.contextmanager
def held_back(*numbers: int) -> Iterator[None]:
    """Hold signals back: this process takes them afterwards, and those that it starts meanwhile don't take them at all."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def children() -> dict[int, str]:
    """The living children of this process: process id -> command name. Empty where there is no /proc."""
    mine, found = os.getpid(), {}
    for entry in Path("/proc").glob("[0-9]*"):
        # A process may end while it is looked at.
        with contextlib.suppress(OSError, ValueError, IndexError):
            head, _, tail = (entry / "stat").read_text().rpartition(")")
            state, parent = tail.split()[:2]
            if int(parent) == mine and state not in "ZX":
                found[int(entry.name)] = head.partition("(")[2]
    return found


def start_time(pid: int) -> str | None:
    """When a process started, in clock ticks since boot; tells a process from a later one with the same id."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None


def is_alive(pid: int, started: str | None = None) -> bool:
    """Whether process ``pid`` (the one that began at ``started``) is there and not a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return False  # ours would be ours to signal: the id belongs to somebody else now
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return not Path("/proc/self").exists()
    return fields[0] not in "ZX" and started in (None, fields[19])


def send(pid: int, number: int, *, group: bool = False) -> None:
    """Send a signal to a process, or to its whole group; one that is gone already is fine."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if group:
            os.killpg(pid, number)
        else:
            os.kill(pid, number)


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9; the number itself where it has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def keep_standard_streams() -> None:
    """Open /dev/null in place of a closed standard stream: the next file opened would otherwise take its number."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _prctl(option: int, argument: int) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.prctl(option, ctypes.c_ulong(argument), 0, 0, 0) == 0)
