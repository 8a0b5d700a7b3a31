"""Run a function on several real ranks (processes with gloo) and get back what each returns."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 300) -> list[Any]:
    """Call ``function(*args)`` on every rank, with the environment that torch.distributed reads.

    Ranks are forked from a process that has torchtitan loaded already, one for all tests. ``function`` has to be a
    function of a module; it starts its process group itself (torchtitan's trainer does).

    Raises:
        AssertionError: a rank raised, died or did not end in time; the message holds its traceback.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["europa_exp.training.preload"])
    port = _free_port()
    ranks = []
    for rank in range(world_size):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(
            target=_rank, args=(sender, rank, world_size, port, function, args), daemon=True
        )
        process.start()
        sender.close()
        ranks.append((process, receiver))
    results: dict[int, Any] = {}
    failures: list[str] = []
    pending: dict[Connection, int] = {receiver: rank for rank, (_, receiver) in enumerate(ranks)}
    try:
        while pending and not failures:
            ready = wait(list(pending), timeout)
            if not ready:
                failures.append(f"ranks {sorted(pending.values())} did not end within {timeout} s")
            for connection in ready:
                rank = pending.pop(connection)  # type: ignore[arg-type]
                try:
                    error, results[rank] = connection.recv()  # type: ignore[union-attr]
                except EOFError:
                    error = "died without a word"
                if error:
                    failures.append(f"rank {rank}: {error}")
    finally:
        for process, _ in ranks:
            if failures:
                process.kill()
            process.join()
    assert not failures, "\n".join(failures)
    return [results[rank] for rank in range(world_size)]


def _rank(
    sender: Connection,
    rank: int,
    world_size: int,
    port: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
    )
    import torch

    torch.set_num_threads(1)
    try:
        result = function(*args)
    except BaseException:
        sender.send((traceback.format_exc(), None))
    else:
        sender.send((None, result))
    finally:
        sender.close()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
