"""Training entries that fail in their job's first attempt and succeed in the next one."""

from __future__ import annotations

import ctypes
import os
import time

from slurm_targets import attempt, rank, write_steps


def crash_once_on_1(cfg, run, runtime) -> None:
    if attempt() == 0:
        if rank() == 1:
            ctypes.string_at(0)
        time.sleep(600)
    write_steps(cfg, run, runtime)


def crash_when_told(cfg, run, runtime) -> None:
    """Rank 1 dies of a segmentation fault once a file says so; its peer waits for it, as it would in a collective."""
    if attempt() == 0:
        (run.path / f"up_{rank()}").touch()
        while rank() != 1 or not (run.path / "go").exists():
            time.sleep(0.1)
        ctypes.string_at(0)
    write_steps(cfg, run, runtime)


def stay_once(cfg, run, runtime) -> None:
    """Say that the rank is up, with its own and its task's process id, and stay; the next attempt does not."""
    if attempt() == 0:
        (run.path / f"up_{rank()}").write_text(f"{os.getpid()} {os.getppid()}")
        time.sleep(600)
    write_steps(cfg, run, runtime)


def stop_when_asked(cfg, run, runtime) -> None:
    """Stops as ranks do that agreed to; a file stands in for the agreement."""
    from europa_exp.runs.attempts import STOPPED

    if attempt() == 0:
        (run.path / f"up_{rank()}").touch()
        while not (run.path / "asked").exists():
            if runtime["stop"]():
                (run.path / "asked").touch()
            time.sleep(0.1)
        raise SystemExit(STOPPED)
    write_steps(cfg, run, runtime)
