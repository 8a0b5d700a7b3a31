"""Watch the ranks of one run until the last has ended; one that fails takes the others with it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from signal import SIGKILL, SIGTERM
from typing import Any

from europa_exp.launch import failure
from europa_exp.launch.ranks import Ranks, StartError
from europa_exp.launch.worker import RankSpec
from europa_exp.runs.folder import RunFolder
from europa_exp.runs.status import State

GRACE_S = 5.0
"""Seconds between SIGTERM and SIGKILL."""

SETTLE_S = 2.0
"""Seconds that an echo (a broken connection) waits for the failure that caused it."""


@dataclass(frozen=True)
class Outcome:
    """How a run went. ``error`` is that of ``status.json``; ``exit_codes`` holds the ranks that ran."""

    state: State
    error: dict[str, Any] | None = None
    exit_codes: dict[int, int] = field(default_factory=dict)


class Supervisor:
    """Runs the ranks of one run.

    ``wait(seconds, descriptor)`` sleeps until there may be news; ``stops()`` counts requests to stop (2 and more: at
    once); ``on_running()`` is called when every rank has begun; ``log`` takes one line.
    """

    def __init__(
        self,
        run: RunFolder,
        specs: list[RankSpec],
        ranks: Ranks,
        *,
        wait: Callable[[float, int | None], None],
        stops: Callable[[], int],
        on_running: Callable[[], None],
        log: Callable[[str], None],
    ) -> None:
        self._run, self._specs, self._ranks = run, specs, ranks
        self._wait, self._stops, self._on_running, self._log = wait, stops, on_running, log
        self._codes: dict[int, int] = {}
        self._failures: list[failure.Failure] = []
        self._stopping: set[int] = set()
        """Ranks that were alive when we began to stop them: their end by SIGTERM or SIGKILL is our doing."""
        self._began = False

    def watch(self) -> Outcome:
        """Start the ranks and wait for their end."""
        for spec in self._specs:
            # A job may start twice; yesterday's record must not explain today's failure.
            with contextlib.suppress(OSError):
                self._run.error_file(spec.rank).unlink(missing_ok=True)
        try:
            for spec in self._specs:
                self._ranks.start(spec)
            return self._loop()
        except StartError as error:
            self._stop_all()
            return self._failed(None, "StartError", str(error))

    def _loop(self) -> Outcome:
        settle_until: float | None = None
        while len(self._codes) < len(self._specs):
            if self._stops():
                self._log("stopping: the launcher was told to")
                self._stop_all()
                return Outcome(State.cancelled, exit_codes=self._codes)
            if self._began and not self._run.path.is_dir():
                self._stop_all()
                message = "the run folder was removed while the run was going on"
                return self._failed(None, "RunFolderError", message)
            if self._failures:
                now = time.monotonic()
                settle_until = settle_until or now + SETTLE_S
                if now >= settle_until or not failure.first_cause(self._failures).is_echo:  # type: ignore[union-attr]
                    self._stop_all()
                    break
            self._look(1.0 if settle_until is None else 0.1)
        cause = failure.first_cause(self._failures)
        if cause is None:
            return Outcome(State.completed, exit_codes=self._codes)
        trouble = getattr(self._ranks, "trouble_at_ranks", None)
        if trouble:
            return self._failed(None, "ForkServerError", trouble)
        return Outcome(State.failed, cause.record(), self._codes)

    def _look(self, seconds: float) -> None:
        """Wait for news and take them in. Raises StartError."""
        self._wait(seconds, self._ranks.fileno())
        news = self._ranks.poll()
        if not self._began and len(self._ranks.started()) >= len(self._specs):
            self._began = True
            pids = self._ranks.started()
            self._log("ranks: " + ", ".join(f"{s.rank} is process {pids[s.rank]}" for s in self._specs))
            self._on_running()
        for ended in news:
            self._codes[ended.rank] = ended.code
            ours = ended.rank in self._stopping and ended.code in (-SIGTERM, -SIGKILL)
            found = None if ours else failure.examine(self._run, ended.rank, ended.code)
            if found is not None:
                self._failures.append(found)
            if ended.code or self._stopping:
                how = " (stopped)" if ours else ""
                self._log(f"rank {ended.rank} ended with exit code {ended.code}{how}")

    def _stop_all(self) -> None:
        """SIGTERM, a grace, SIGKILL; returns when no rank is left."""
        if len(self._ranks.started()) < len(self._specs):
            # Ranks that are still to be forked can't be stopped one by one.
            self._ranks.close()
            return
        self._stopping = {spec.rank for spec in self._specs} - set(self._codes)
        begin, patience = time.monotonic(), self._stops()
        for number, limit in ((SIGTERM, GRACE_S), (SIGKILL, GRACE_S)):
            left = [rank for rank in sorted(self._stopping) if rank not in self._codes]
            if left:
                self._log(f"{number.name} to ranks {left}")
            for rank in left:
                self._ranks.signal(rank, number)
            while len(self._codes) < len(self._specs) and time.monotonic() - begin < limit:
                if number == SIGTERM and self._stops() > max(patience, 1):
                    break  # asked once more: no grace
                try:
                    self._look(0.1)
                except StartError:
                    return
            begin = time.monotonic()
        if len(self._codes) < len(self._specs):
            self._log("some ranks don't end; closing all")
            self._ranks.close()

    def _failed(self, rank: int | None, kind: str, message: str) -> Outcome:
        first, _, rest = message.partition("\n")
        if rest:
            first = f"{first} {rest.splitlines()[-1]}"
        error = {"rank": rank, "type": kind, "message": first, "traceback": failure.shorten(rest)}
        return Outcome(State.failed, error, self._codes)
