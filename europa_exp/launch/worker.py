"""One rank: a process with its environment, its log, its error record, and an exit that can't hang.

The same function serves ranks that a fork server made (torch is loaded there already) and ranks of their own
(``python -m europa_exp.launch.worker SPEC``). Nothing here imports torch; the training entry does.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, NoReturn

from europa_exp.launch import environment, processes
from europa_exp.runs.attempts import STOPPED
from europa_exp.runs.files import replace_text
from europa_exp.runs.folder import RunFolder
from europa_exp.runs.status import now

TRAIN = "europa_exp.training:train"
"""The training entry, ``module:function``; called as ``train(cfg, run, runtime)``."""

_LONGEST_MESSAGE = 4000


@dataclass(frozen=True)
class RankSpec:
    """What a rank's process is told; everything else it reads from the run folder."""

    run: str
    """Path of the run folder."""

    rank: int
    master_port: int
    parent: int
    """Id of the process that starts this one; the rank does not outlive it."""

    master_addr: str = "127.0.0.1"
    devices: list[str] = field(default_factory=list)
    """Accelerators of the machine; empty on CPU."""

    notes: list[str] = field(default_factory=list)
    """Remarks for ``runtime.json``."""

    entry: str = TRAIN

    on_slurm: bool = False
    """A task of a Slurm job: ``devices`` are those of its own node, and signals ask it to save and stop."""

    start: str | None = None
    """Which start of which Slurm job this is; error records carry it, so that an old one explains no new failure."""

    header: str | None = None
    """First line of this process in the log, which holds all attempts of the rank."""

    record: dict[str, Any] = field(default_factory=dict)
    """More for ``runtime.json``."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RankSpec:
        return cls(**json.loads(text))


class StopRequest:
    """Whether somebody asked this rank to save what it has and stop. Slurm's USR2 asks; SIGTERM does not end the rank by
    itself: the process that watches over it knows whether that means a preemption or the end."""

    def __init__(self) -> None:
        self._asked = False
        signal.signal(signal.SIGUSR2, self._ask)
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.signal(signal.SIGCONT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2, signal.SIGTERM})

    def __call__(self) -> bool:
        return self._asked

    def _ask(self, *_: object) -> None:
        self._asked = True


def run_rank(spec: RankSpec, *, preloaded: bool) -> NoReturn:
    """Be this rank and end the process: exit code 0 after the training, 1 after an exception (or SystemExit's own code).

    ``STOPPED`` is the code of a rank that was asked to stop and did; that is no failure and leaves no record.
    """
    stop = StopRequest() if spec.on_slurm else None
    # A session of its own: Ctrl-C in the terminal is the launcher's to handle, and the rank's helpers (W&B, data
    # loaders) can be signalled together with it.
    with contextlib.suppress(OSError):
        os.setsid()
    processes.die_with_parent(spec.parent)
    processes.set_name(f"rank{spec.rank}")
    run = RunFolder(spec.run)
    try:
        _redirect(run, spec.rank)
    except OSError as error:
        _complain(f"rank {spec.rank}: {run.log(spec.rank)} can't be written: {error}")
        os._exit(1)
    if spec.header:
        print("\n".join([spec.header, *spec.notes]), flush=True)
    code = 0
    try:
        _train(spec, run, preloaded, stop)
    except SystemExit as error:
        code = _exit_code(error)
        if code not in (0, STOPPED):
            record_error(run, spec.rank, error, start=spec.start)
    except BaseException as error:
        code = 1
        record_error(run, spec.rank, error, start=spec.start)
    leave(code)


def _train(spec: RankSpec, run: RunFolder, preloaded: bool, stop: StopRequest | None) -> None:
    cfg = run.config()
    notes = list(spec.notes)
    if spec.on_slurm:
        where, more = environment.place_on_node(
            cfg, spec.rank, master_addr=spec.master_addr, master_port=spec.master_port, devices=spec.devices
        )
        notes += more
    else:
        where = environment.place(
            cfg, spec.rank, master_addr=spec.master_addr, master_port=spec.master_port, devices=spec.devices
        )
    nccl_log = run.nccl_log(spec.rank)
    if cfg.nccl.record:
        with contextlib.suppress(OSError):
            nccl_log.unlink(missing_ok=True)  # an earlier attempt's must not pass for this one's
    variables = environment.of_rank(cfg, where, nccl_log)
    os.environ.update(variables)
    runtime: dict[str, Any] = {
        "environment": dict(sorted(variables.items())),
        "preloaded": preloaded,
        "world_size": where.world_size,
        "notes": notes,
        **spec.record,
    }
    if spec.rank == 0:
        # Written before torch is imported: a run that dies there has its environment on record as well.
        run.write_runtime(runtime)
    if stop is not None:
        runtime["stop"] = stop
    load(spec.entry)(cfg, run, runtime)


def load(entry: str) -> Callable[..., Any]:
    """The function that ``module:function`` names."""
    module, _, function = entry.partition(":")
    return getattr(importlib.import_module(module), function)


def _redirect(run: RunFolder, rank: int) -> None:
    """Send this process's output, and that of C++ code in it, to the log of the rank; nothing to read on stdin."""
    log = os.open(run.log(rank), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((log, 1), (log, 2), (nothing, 0)):
        os.dup2(source, target)
    for descriptor in (log, nothing):
        if descriptor > 2:
            os.close(descriptor)
    sys.stdout = open(1, "w", buffering=1, closefd=False, errors="backslashreplace")  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False, errors="backslashreplace")  # noqa: SIM115
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    faulthandler.enable(file=2, all_threads=True)
    # `kill -USR1` shows where a rank is; for runs that seem to hang.
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)


def _exit_code(error: SystemExit) -> int:
    if error.code is None:
        return 0
    return error.code & 0xFF if isinstance(error.code, int) else 1


def record_error(run: RunFolder, rank: int, error: BaseException, *, start: str | None = None) -> None:
    """Leave the traceback in the log and, for the launcher, as a file. A full disk takes neither from the other."""
    when = now()
    begin = error.__traceback__
    while begin is not None and begin.tb_frame.f_code.co_filename == __file__:
        begin = begin.tb_next  # our own frames explain nothing
    text = "".join(traceback.format_exception(type(error), error, begin or error.__traceback__))
    _complain(text)
    record = {
        "rank": rank,
        "type": type(error).__name__,
        "message": str(error)[:_LONGEST_MESSAGE],
        "traceback": text,
        "time": when,
    }
    if start is not None:
        record |= {"start": start, "node": os.environ.get("SLURMD_NODENAME")}
    try:
        replace_text(run.error_file(rank), json.dumps(record, indent=2) + "\n")
    except OSError as trouble:
        _complain(f"{run.error_file(rank)} can't be written: {trouble}")


def _complain(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def leave(code: int) -> NoReturn:
    """End the process now. A thread that never ends, or a destructor that waits for a peer, must not keep it."""
    with contextlib.suppress(Exception):
        logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def main() -> NoReturn:
    """A rank in a process of its own; the one argument is the specification as JSON."""
    run_rank(RankSpec.from_json(sys.argv[1]), preloaded=False)


if __name__ == "__main__":
    main()
