"""Bytes that four ranks send each other, by the kernel's counter of the loopback, beside the estimates of the accounting.

python tests/comm/loopback.py      prints JSON; in a network namespace of its own nobody else's bytes are counted
"""

from __future__ import annotations

import fcntl
import json
import socket
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accounting_on_ranks import MECHANISMS
from ranks import run_ranks
from sharded_moe import Case, sharded
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from europa_exp.comm.accounting import CollectiveCounter

RANKS = 4
SIZES = {"width": 256, "hidden": 512}
STEPS: dict[str, tuple[Case, Sequence[str]]] = {
    "fp32 gradients": (Case(**SIZES), ()),
    "node": (Case(**SIZES), ("node", "a2a")),
    "fp8 and bf16": (Case(**SIZES), ("fp8", "a2a")),
    "asynchronous": (Case(**SIZES, unshard_async=True), ("fp8", "a2a")),
    "replicas": (Case(**SIZES, replicas=2), ("a2a",)),
}
IDLE_S = 0.5


def loopback_bytes() -> int:
    """Bytes that went out over `lo` in this process's network namespace."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[8])
    raise RuntimeError("there is no loopback interface")


def seen(action: Callable[[], Any]) -> tuple[int, float]:
    """Bytes on the loopback, and seconds, while all ranks do `action`."""
    dist.barrier()
    before, start = loopback_bytes(), time.perf_counter()
    dist.barrier()  # nobody begins before everybody has read
    action()
    dist.barrier()
    return loopback_bytes() - before, time.perf_counter() - start


def measured(counter: CollectiveCounter, action: Callable[[], Any]) -> dict[str, Any]:
    """What the counter of this rank says of `action`, and what the loopback saw of all ranks."""
    action()  # connections are made
    counter.take()
    total, seconds = seen(action)
    sent: dict[str, int] = {}
    for kind, traffic in counter.take().items():
        sent[kind.collective.value] = sent.get(kind.collective.value, 0) + traffic.sent_bytes(kind)
    return {"seen": total, "seconds": seconds, "sent": sent}


def step(case: Case, mechanisms: Sequence[str], backward: bool = True) -> dict[str, Any]:
    """Forward, and backward, of the small mixture of experts."""
    model, _ = sharded(case)
    for name in mechanisms:
        MECHANISMS[name](model)
    counter = CollectiveCounter()
    counter.install(model)
    x = torch.randn(16, case.width, dtype=case.param_dtype)

    def run() -> None:
        with torch.set_grad_enabled(backward):
            loss = model(x).float().sum()
        if backward:
            loss.backward()

    return measured(counter, run)


def tokens() -> dict[str, Any]:
    """Evenly spread tokens to the experts of four ranks and back, with their gradients, by torchtitan's dispatcher."""
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

    dist.init_process_group("gloo")
    model = nn.Module()
    model.token_dispatcher = dispatcher = AllToAllTokenDispatcher(
        AllToAllTokenDispatcher.Config(num_experts=8, top_k=2)
    )
    dispatcher.wire_meshes(ep_mesh=init_device_mesh("cpu", (RANKS,), mesh_dim_names=("ep",)))
    counter = CollectiveCounter()
    counter.install(model)
    group, splits = dispatcher.ep_mesh.get_group(), [1000] * RANKS
    x = torch.randn(sum(splits), 256, dtype=torch.bfloat16, requires_grad=True)

    def there_and_back() -> None:
        received = dispatcher._dispatch_token_exchange(x, group, splits, splits)
        dispatcher._combine_token_exchange(received, group, splits, splits).sum().backward()

    return measured(counter, there_and_back)


def idle() -> float:
    """Bytes a second on the loopback that are not ours."""
    before = loopback_bytes()
    time.sleep(IDLE_S)
    return (loopback_bytes() - before) / IDLE_S


def bring_up() -> None:
    """Start the loopback, which a new network namespace has down; see netdevice(7)."""
    read_flags, write_flags, up_and_running = 0x8913, 0x8914, 0x1 | 0x40
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        answer = fcntl.ioctl(any_socket, read_flags, struct.pack("16sh14x", b"lo", 0))
        (flags,) = struct.unpack("16xh14x", answer)
        if not flags & 0x1:
            fcntl.ioctl(any_socket, write_flags, struct.pack("16sh14x", b"lo", flags | up_and_running))


def main() -> None:
    """Measure everything and print it."""
    bring_up()
    noise = [idle()]
    found = {"forward": run_ranks(RANKS, step, Case(**SIZES), (), False)}
    for name, (case, mechanisms) in STEPS.items():
        found[name] = run_ranks(RANKS, step, case, mechanisms)
        noise.append(idle())
    found["tokens"] = run_ranks(RANKS, tokens)
    noise.append(idle())
    print(json.dumps({"noise": max(noise), "found": found}))


if __name__ == "__main__":
    main()
