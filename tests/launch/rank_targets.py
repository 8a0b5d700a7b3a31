"""Small training entries for tests of the launcher: they run in real ranks, most of them without torch."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time

from europa_exp.runs.metrics import MetricsWriter


def _rank() -> int:
    return int(os.environ["RANK"])


def write_steps(cfg, run, runtime) -> None:
    """Every rank prints; rank 0 logs ``training.steps`` steps."""
    print(f"hello from rank {_rank()} of {os.environ['WORLD_SIZE']}")
    if _rank() == 0:
        with MetricsWriter(run.metrics_file) as writer:
            for step in range(1, cfg.training.steps + 1):
                writer.write(
                    {"loss/global_avg": 1.0 / step, "throughput/tokens_per_second_per_gpu": 10.0}, step
                )


def gloo_sum(cfg, run, runtime) -> None:
    """A sum over all ranks at each step, over the network that real training uses."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    writer = MetricsWriter(run.metrics_file) if _rank() == 0 else None
    for step in range(1, cfg.training.steps + 1):
        value = torch.ones(1)
        dist.all_reduce(value)
        if writer:
            writer.write({"loss/global_avg": float(value)}, step)
    dist.destroy_process_group()


def gloo_fails_on_1(cfg, run, runtime) -> None:
    """Rank 1 raises in step 3 while its peers wait for it in a collective."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for step in range(1, 10):
        if _rank() == 1 and step == 3:
            raise ValueError("the third step is bad")
        dist.all_reduce(torch.ones(1))


def gloo_for_ever(cfg, run, runtime) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    (run.path / f"up_{_rank()}").touch()
    while True:
        dist.all_reduce(torch.ones(1))
        time.sleep(0.01)


def sleep_for_ever(cfg, run, runtime) -> None:
    (run.path / f"up_{_rank()}").touch()
    while True:
        time.sleep(0.1)


def ignore_sigterm(cfg, run, runtime) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sleep_for_ever(cfg, run, runtime)


def fail_when_marked(cfg, run, runtime) -> None:
    """Fails on rank 1 in runs with the seed 13; the others are fine."""
    if cfg.training.seed == 13 and _rank() == 1:
        raise RuntimeError("unlucky seed")
    write_steps(cfg, run, runtime)


def exit_7_on_1(cfg, run, runtime) -> None:
    if _rank() == 1:
        sys.exit(7)
    sleep_for_ever(cfg, run, runtime)


def vanish_on_1(cfg, run, runtime) -> None:
    if _rank() == 1:
        os._exit(3)
    sleep_for_ever(cfg, run, runtime)


def crash_on_1(cfg, run, runtime) -> None:
    if _rank() == 1:
        import ctypes

        ctypes.string_at(0)
    sleep_for_ever(cfg, run, runtime)


def hang_at_exit(cfg, run, runtime) -> None:
    threading.Thread(target=time.sleep, args=(3600,), daemon=False).start()


def leave_a_daemon(cfg, run, runtime) -> None:
    """Rank 0 leaves a grandchild in a session of its own behind."""
    if _rank() == 0 and os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            (run.path / "daemon").write_text(str(os.getpid()))
            time.sleep(3600)
        os._exit(0)


def record_environment(cfg, run, runtime) -> None:
    import json

    keep = {k: v for k, v in os.environ.items() if k != "PATH"}
    (run.path / f"environment_{_rank()}.json").write_text(json.dumps(keep))
    (run.path / f"stdin_{_rank()}").write_text(sys.stdin.read())
    os.write(1, b"raw output\n")


def serve_on_master_port(cfg, run, runtime) -> None:
    """Rank 0 listens where the store of the process group would."""
    if _rank() == 0:
        with socket.socket(socket.AF_INET) as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("", int(os.environ["MASTER_PORT"])))
            server.listen()
            time.sleep(0.5)


def wait_for_go(cfg, run, runtime) -> None:
    (run.path / f"up_{_rank()}").touch()
    while not (run.path / "go").exists():
        time.sleep(0.05)


def sleep_if_first(cfg, run, runtime) -> None:
    if cfg.training.seed == 13:
        sleep_for_ever(cfg, run, runtime)


def record_parent(cfg, run, runtime) -> None:
    (run.path / "parent").write_text(str(os.getppid()))


def stop_when_asked(cfg, run, runtime) -> None:
    """Ends with the code of ranks that were asked to stop, once one of them was; a file stands in for the all-reduce."""
    from europa_exp.runs.attempts import STOPPED

    (run.path / f"up_{_rank()}").touch()
    while not (run.path / "asked").exists():
        if runtime["stop"]():
            (run.path / "asked").touch()
        time.sleep(0.05)
    sys.exit(STOPPED)


def save_when_asked(cfg, run, runtime) -> None:
    """Like ``stop_when_asked``, and leaves what a checkpoint of step 5 would."""
    from europa_exp.runs import checkpoints

    if _rank() == 0:
        place = run.checkpoints / "step-5"
        place.mkdir(parents=True)
        (place / ".metadata").touch()
        checkpoints.note_saved(run, 5)
    stop_when_asked(cfg, run, runtime)


def stop_unless_first(cfg, run, runtime) -> None:
    """The first run of a job takes its time and is done; later ones are asked to stop."""
    if cfg.training.seed == 13:
        stop_when_asked(cfg, run, runtime)
