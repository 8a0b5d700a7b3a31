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

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RankSpec:
        return cls(**json.loads(text))


def run_rank(spec: RankSpec, *, preloaded: bool) -> NoReturn:
    """Be this rank and end the process: exit code 0 after the training, 1 after an exception (or SystemExit's own code)."""
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
    code = 0
    try:
        _train(spec, run, preloaded)
    except SystemExit as error:
        code = _exit_code(error)
        if code:
            _record(run, spec.rank, error)
    except BaseException as error:
        code = 1
        _record(run, spec.rank, error)
    _leave(code)


def _train(spec: RankSpec, run: RunFolder, preloaded: bool) -> None:
    cfg = run.config()
    where = environment.place(
        cfg, spec.rank, master_addr=spec.master_addr, master_port=spec.master_port, devices=spec.devices
    )
    variables = environment.of_rank(cfg, where)
    os.environ.update(variables)
    runtime: dict[str, Any] = {
        "environment": dict(sorted(variables.items())),
        "preloaded": preloaded,
        "world_size": where.world_size,
        "notes": list(spec.notes),
    }
    if spec.rank == 0:
        # Written before torch is imported: a run that dies there has its environment on record as well.
        run.write_runtime(runtime)
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


def _record(run: RunFolder, rank: int, error: BaseException) -> None:
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
    try:
        replace_text(run.error_file(rank), json.dumps(record, indent=2) + "\n")
    except OSError as trouble:
        _complain(f"{run.error_file(rank)} can't be written: {trouble}")


def _complain(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def _leave(code: int) -> NoReturn:
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
