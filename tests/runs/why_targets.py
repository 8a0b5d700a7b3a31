"""Training entries that fail for real, each in another way; run in ranks by test_why.py, not a test itself."""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path


def _rank() -> int:
    return int(os.environ["RANK"])


def _others_wait() -> None:
    if _rank() != 1:
        time.sleep(600)


def raise_on_1(cfg, run, runtime) -> None:
    _others_wait()
    raise ValueError("the third step is bad")


def bad_configuration_on_1(cfg, run, runtime) -> None:
    from europa_exp.config.errors import ConfigError, Problem

    _others_wait()
    raise ConfigError([("run", Problem("model.layers", 0, "must be at least 1", "Give more layers"))])


def memory_error_on_1(cfg, run, runtime) -> None:
    import resource

    _others_wait()
    resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
    bytearray(8 << 30)


def allocator_on_1(cfg, run, runtime) -> None:
    import torch

    _others_wait()
    torch.empty(1 << 50, dtype=torch.uint8)


def segmentation_fault_on_1(cfg, run, runtime) -> None:
    import ctypes

    _others_wait()
    ctypes.string_at(0)


def bus_error_on_1(cfg, run, runtime) -> None:
    """The page of a mapped file that is no longer there: what a lack of huge pages or of shared memory looks like, too."""
    import mmap

    _others_wait()
    path = run.path / "mapped"
    path.write_bytes(b"x" * 8192)
    with open(path, "r+b") as file:
        view = mmap.mmap(file.fileno(), 8192)
        file.truncate(0)
        print(view[5000])


def killed_on_1(cfg, run, runtime) -> None:
    _others_wait()
    os.kill(os.getpid(), signal.SIGKILL)


def abort_of_cpp_on_1(cfg, run, runtime) -> None:
    _others_wait()
    os.abort()


def vanish_on_1(cfg, run, runtime) -> None:
    print("the last that was heard of it", flush=True)
    _others_wait()
    os._exit(3)


def disk_full_on_1(cfg, run, runtime) -> None:
    _others_wait()
    with open(Path(os.environ["SMALL_DISK"]) / "file", "wb") as file:
        for _ in range(100):
            file.write(b"x" * 65536)


def checkpoint_on_full_disk_on_1(cfg, run, runtime) -> None:
    import torch

    _others_wait()
    torch.save(torch.zeros(1 << 20), Path(os.environ["SMALL_DISK"]) / "checkpoint.pt")


def _join(seconds: float) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))
    dist.all_reduce(torch.ones(1))


def rank_1_misses_a_collective(cfg, run, runtime) -> None:
    import torch
    import torch.distributed as dist

    _join(3)
    if _rank() == 1:
        print("busy with something else", flush=True)
        time.sleep(600)
    dist.all_reduce(torch.ones(1))


def rank_1_misses_a_barrier(cfg, run, runtime) -> None:
    import torch.distributed as dist

    _join(60)
    if _rank() == 1:
        time.sleep(600)
    dist.monitored_barrier(timeout=timedelta(seconds=3))


def rank_1_never_comes(cfg, run, runtime) -> None:
    if _rank() == 1:
        print("not yet", flush=True)
        time.sleep(600)
    _join(3)


def rank_1_vanishes_from_a_collective(cfg, run, runtime) -> None:
    import torch
    import torch.distributed as dist

    _join(60)
    if _rank() == 1:
        os._exit(0)
    dist.all_reduce(torch.ones(1))


def exit_on_1(cfg, run, runtime) -> None:
    _others_wait()
    sys.exit("it can't go on like this")
