"""The process that runs a sweep on one machine: it takes run after run, starts the ranks, and records what came of it.

It lives in a session of its own and outlasts the command that was typed: closing the terminal, or killing the command,
stops no run. It imports no torch.

Environment of the ranks: import-time variables are in place in the fork server before it loads torch, so a server serves
the runs that agree in them and is replaced when they change. ``NCCL_*`` and ``RANK`` are set in each rank.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from europa_exp.config.schema import Config
from europa_exp.launch import environment, processes
from europa_exp.launch.agents import STOP_FILE, AgentRecord, cancel_file
from europa_exp.launch.ranks import ForkedRanks, FreshRanks, Ranks
from europa_exp.launch.supervise import Outcome, Supervisor
from europa_exp.launch.worker import RankSpec
from europa_exp.runs.folder import RunFolder
from europa_exp.runs.status import State, now

_WAITING = (State.created, State.queued)
_ORPHAN_GRACE_S = 5.0


class Agent:
    """Runs ``runs``, one after the other. ``job_folder`` is the job's own folder; ``preload`` names the module that a fork
    server loads ("" for none)."""

    def __init__(self, runs: Sequence[RunFolder], job_folder: Path, *, entry: str, preload: str) -> None:
        self._runs = list(runs)
        self._folder = job_folder
        self._entry, self._preload = entry, preload
        self._stops = 0
        self._ranks: Ranks | None = None
        self._key: object = None
        self._orphans: dict[int, float] = {}
        self._wake_in, self._wake_out = os.pipe()
        if "CUDA_VISIBLE_DEVICES" in os.environ:
            del os.environ["CUDA_VISIBLE_DEVICES"]  # submitit's; the caller's own comes with another name
        visible = os.environ.get(environment.HOME_VARIABLE)
        self._base, left_out = environment.inherited(os.environ)
        if visible is not None:
            self._base["CUDA_VISIBLE_DEVICES"] = visible
        self._devices = environment.accelerators(self._base)
        self._notes = [
            f"{name} of the calling shell was left out: settings come from the configuration"
            for name in left_out
        ]

    def work(self) -> dict[str, str]:
        """Run everything; returns run -> state. Whatever happens to one run, the next one gets its turn."""
        self._settle_in()
        outcome: dict[str, str] = {}
        try:
            for run in self._runs:
                outcome[run.name] = str(self._one(run))
        finally:
            self._close_ranks()
            self._sweep_up(final=True)
        return outcome

    # ---------------------------------------------------------------------------------------------- one run

    def _one(self, run: RunFolder) -> State:
        if self._stops:
            self._record(run, Outcome(State.cancelled))
            return State.cancelled
        if run.status().state not in _WAITING:
            # Ended or cancelled by somebody else, or this job was started twice.
            with contextlib.suppress(OSError):
                cancel_file(run).unlink(missing_ok=True)
            return run.status().state
        try:
            outcome = self._attempt(run)
        except Exception as error:
            text = traceback.format_exc()
            self._log(run, text)
            self._close_ranks()
            record = {"rank": None, "type": type(error).__name__, "message": str(error), "traceback": text}
            outcome = Outcome(State.failed, record)
        self._log(run, f"{outcome.state}; exit codes {outcome.exit_codes}")
        self._record(run, outcome)
        self._sweep_up(final=False)
        return outcome.state

    def _attempt(self, run: RunFolder) -> Outcome:
        cfg = run.config()
        world = cfg.parallelism.nodes * cfg.parallelism.gpus_per_node
        ranks = self._ranks_for(cfg)
        preloaded = isinstance(ranks, ForkedRanks)
        parent = ranks.pid if isinstance(ranks, ForkedRanks) else os.getpid()
        with _reserved_port() as port:
            self._log(run, f"{world} ranks, port {port}, {'forked' if preloaded else 'fresh'} processes")
            specs = [
                RankSpec(
                    run=str(run.path),
                    rank=rank,
                    master_port=port,
                    parent=parent,
                    devices=self._devices,
                    notes=self._notes,
                    entry=self._entry,
                )
                for rank in range(world)
            ]
            supervisor = Supervisor(
                run,
                specs,
                ranks,
                wait=self._wait,
                stops=lambda: max(self._stops, int(cancel_file(run).exists())),
                on_running=lambda: self._note_running(run),
                log=lambda line: self._log(run, line),
            )
            outcome = supervisor.watch()
        if outcome.state is not State.completed and (
            not preloaded or len(ranks.started()) < world or getattr(ranks, "trouble_at_ranks", None)
        ):
            self._close_ranks()
        return outcome

    def _ranks_for(self, cfg: Config) -> Ranks:
        # A CUDA context does not survive a fork, and macOS' own libraries don't either.
        forked = cfg.cluster.preload and not self._devices and sys.platform.startswith("linux")
        key = (forked, environment.at_import(cfg))
        if self._ranks is not None and key == self._key:
            return self._ranks
        self._close_ranks()
        environ = self._base | environment.at_import(cfg)
        if forked:
            self._ranks = ForkedRanks(environ, self._folder / "fork_server.log", self._preload)
        else:
            self._ranks = FreshRanks(environ, self._folder / "ranks.log")
        self._key = key
        return self._ranks

    def _close_ranks(self) -> None:
        if self._ranks is not None:
            self._ranks.close()
        self._ranks = self._key = None

    # ------------------------------------------------------------------------------------------- recording

    def _note_running(self, run: RunFolder) -> None:
        try:
            run.set_state(State.running, pid=os.getpid())
        except OSError as error:
            self._log(run, f"the state can't be recorded: {error}")

    def _record(self, run: RunFolder, outcome: Outcome) -> None:
        fields: dict[str, Any] = {}
        if outcome.error is not None:
            fields["error"] = outcome.error
        if outcome.exit_codes:
            fields["exit_codes"] = {str(rank): code for rank, code in sorted(outcome.exit_codes.items())}
        for attempt in range(3):
            try:
                run.set_state(outcome.state, **fields)
                cancel_file(run).unlink(missing_ok=True)
                return
            except OSError as error:
                # A full disk may have room again in a moment. A folder that is gone stays gone.
                self._log(run, f"the state {outcome.state} can't be recorded: {error}")
                if attempt == 2 or not run.path.is_dir():
                    return
                time.sleep(0.5)

    def _log(self, run: RunFolder, text: str) -> None:
        line = f"{now()} {text}\n"
        try:
            with open(run.launcher_log, "a", encoding="utf-8") as file:
                file.write(line)
        except OSError:
            print(f"{run.name}: {line}", end="", file=sys.stderr, flush=True)

    # --------------------------------------------------------------------------------- signals and processes

    def _settle_in(self) -> None:
        processes.keep_standard_streams()
        with contextlib.suppress(OSError):
            os.setsid()
        processes.adopt_orphans()
        for end in (self._wake_in, self._wake_out):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self._wake_out, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_stop)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
        with contextlib.suppress(OSError):
            AgentRecord.of_this_process(self._runs).write(self._folder)
        # Only after the file is there: a stop either finds the file or is found here.
        if (self._folder / STOP_FILE).exists():
            self._stops = 1

    def _on_stop(self, *_: object) -> None:
        self._stops += 1

    def _wait(self, seconds: float, descriptor: int | None) -> None:
        watched = [self._wake_in] if descriptor is None else [self._wake_in, descriptor]
        ready, _, _ = select.select(watched, [], [], seconds)
        if self._wake_in in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_in, 4096)

    def _sweep_up(self, *, final: bool) -> None:
        """End what ranks left behind (helpers that daemonised, W&B's process). Each gets some seconds to go by itself."""
        deadline = time.monotonic() + _ORPHAN_GRACE_S
        while True:
            self._reap()
            server = self._ranks.pid if isinstance(self._ranks, ForkedRanks) else None
            present = {pid: name for pid, name in processes.children().items() if pid != server}
            self._orphans = {p: self._orphans.get(p, time.monotonic()) for p in present}
            for pid, seen in self._orphans.items():
                if time.monotonic() - seen >= _ORPHAN_GRACE_S or self._stops > 1:
                    print(f"killing {present[pid]} (process {pid}), left by a rank", flush=True)
                    processes.send(pid, signal.SIGKILL)
            if not final or not present or time.monotonic() > deadline + 2:
                return
            time.sleep(0.1)

    def _reap(self) -> None:
        """Collect orphans that ended; the server's and the ranks' own ends are left to those who wait for them."""
        for pid in list(self._orphans):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


@contextlib.contextmanager
def _reserved_port():  # type: ignore[no-untyped-def]
    """A free port of 127.0.0.1 that nobody else is given while it is held.

    The socket is bound but does not listen, and allows reuse: the system hands the number to nobody who asks for any
    free port, while rank 0's store, which allows reuse as well, can bind it. Two launchers at once never collide.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]
