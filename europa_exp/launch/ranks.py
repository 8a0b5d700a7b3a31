"""Two ways to start ranks on this machine, one interface: forked from a server, or a fresh process each."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from europa_exp.launch import processes
from europa_exp.launch.worker import RankSpec


class StartError(Exception):
    """No rank can be started this way; the message says why."""


@dataclass(frozen=True)
class Ended:
    """A rank's process has ended; ``code`` is its exit code, negative for a signal."""

    rank: int
    code: int


class Ranks(Protocol):
    """Starts the ranks of one run after the other and tells when they end."""

    def start(self, spec: RankSpec) -> None:
        """Start a rank. Raises StartError."""

    def fileno(self) -> int | None:
        """A descriptor that becomes readable with news, if there is one; SIGCHLD tells of the rest."""

    def poll(self) -> list[Ended]:
        """The ranks that ended since the last call; never waits. Raises StartError when ranks can't be started at all."""

    def started(self) -> dict[int, int]:
        """Rank -> process id of the ranks that have begun to run."""

    def signal(self, rank: int, number: int) -> None:
        """Signal a rank and its helpers; one that ended already is fine."""

    def close(self) -> None:
        """Kill what runs and leave no process."""


class FreshRanks:
    """A process for each rank, with its own import of torch."""

    def __init__(self, environ: Mapping[str, str], log: Path) -> None:
        self._environ = dict(environ)
        self._log = log
        self._alive: dict[int, subprocess.Popen[bytes]] = {}
        self._started: dict[int, int] = {}

    def start(self, spec: RankSpec) -> None:
        command = [sys.executable, "-m", "europa_exp.launch.worker", spec.to_json()]
        # Until the worker has opened its own log, its output goes to the supervisor's.
        with open(self._log, "ab") as log:
            try:
                process = subprocess.Popen(
                    command, env=self._environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log
                )
            except OSError as error:
                raise StartError(f"rank {spec.rank} can't be started: {error}") from error
        self._alive[spec.rank] = process
        self._started[spec.rank] = process.pid

    def fileno(self) -> int | None:
        return None

    def poll(self) -> list[Ended]:
        news = [Ended(r, p.returncode) for r, p in self._alive.items() if p.poll() is not None]
        for ended in news:
            del self._alive[ended.rank]
        return news

    def started(self) -> dict[int, int]:
        return dict(self._started)

    def signal(self, rank: int, number: int) -> None:
        process = self._alive.get(rank)
        if process is not None and process.poll() is None:
            processes.send(process.pid, number)
            processes.send(process.pid, number, group=True)

    def close(self) -> None:
        for rank in list(self._alive):
            self.signal(rank, signal.SIGKILL)
        for process in self._alive.values():
            process.wait()
        self._alive.clear()


class ForkedRanks:
    """Ranks from a fork server. The server begins to load torch when this object is made; ``start`` does not wait for it."""

    def __init__(self, environ: Mapping[str, str], log: Path, preload: str) -> None:
        """``environ`` must hold what torch reads when it is imported: every rank of this server shares that import."""
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "europa_exp.launch.forkserver"]
        arguments = [str(theirs.fileno()), str(os.getpid()), preload]
        with theirs, open(log, "ab") as output:
            try:
                self._server = subprocess.Popen(
                    command + arguments,
                    env=dict(environ),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=[theirs.fileno()],
                    # Out of the terminal's reach, like its ranks.
                    start_new_session=True,
                )
            except OSError as error:
                ours.close()
                raise StartError(f"the fork server can't be started: {error}") from error
        self._stream = ours
        self._stream.setblocking(False)
        self._log = log
        self._buffer = b""
        self._pids: dict[int, int] = {}
        self._alive: set[int] = set()
        self._trouble: str | None = None
        self.trouble_at_ranks: str | None = None
        """Why the ranks died with their server, when they did."""
        self.load_seconds: float | None = None
        """Seconds that loading took, once it is done."""

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._server.pid

    def start(self, spec: RankSpec) -> None:
        self._pids.pop(spec.rank, None)
        self._tell({"start": asdict(spec)})

    def fileno(self) -> int | None:
        return None if self._trouble else self._stream.fileno()

    def poll(self) -> list[Ended]:
        news: list[Ended] = []
        while self._trouble is None:
            try:
                data = self._stream.recv(65536)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self._trouble = self._last_words()
                break
            *lines, self._buffer = (self._buffer + data).split(b"\n")
            for line in lines:
                news += self._take(json.loads(line))
        if self._trouble is None:
            return news
        if not self._alive:
            if news:
                return news  # what the server said last comes before its own end
            raise StartError(self._trouble)
        # The kernel kills the ranks with their server.
        self.trouble_at_ranks = self._trouble
        news += [Ended(rank, -signal.SIGKILL) for rank in sorted(self._alive)]
        self._alive.clear()
        return news

    def started(self) -> dict[int, int]:
        return dict(self._pids)

    def signal(self, rank: int, number: int) -> None:
        if rank in self._alive:
            self._tell({"signal": number, "pid": self._pids[rank]})

    def close(self) -> None:
        """End the server with its ranks. While it still loads it hears nothing, so it is killed then."""
        self._stream.close()
        if self.load_seconds is None:
            self._server.kill()
        try:
            self._server.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()

    def _take(self, event: dict) -> list[Ended]:
        match event["event"]:
            case "ready":
                self.load_seconds = event["seconds"]
            case "broken":
                self._trouble = f"the modules for training can't be loaded:\n{event['error'].strip()}"
            case "started":
                self._pids[event["rank"]] = event["pid"]
                self._alive.add(event["rank"])
            case "ended":
                self._alive.discard(event["rank"])
                return [Ended(event["rank"], event["code"])]
        return []

    def _tell(self, message: dict) -> None:
        # A server that is gone is found by poll(), which reads its last words first.
        with contextlib.suppress(OSError):
            self._stream.setblocking(True)
            self._stream.sendall(json.dumps(message).encode() + b"\n")
        self._stream.setblocking(False)

    def _last_words(self) -> str:
        try:
            code = self._server.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            return f"the fork server closed its stream; see {self._log}"
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return f"the fork server {how}; see {self._log}"
