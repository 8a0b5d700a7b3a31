"""Which stream's memory pool FSDP's buffers come from, on one GPU.

Memory pools and streams are this process's own, whatever the other ranks do, so one process plays rank 0 of four: its process
group is torch's fake one, whose collectives move nothing. FSDP allocates, copies and synchronises as in a run of four.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from europa_exp.comm.bf16_all_to_all import apply_bf16_all_to_all
from europa_exp.comm.compute_stream_gather import apply_compute_stream_gather

WIDTH, LAYERS, RANKS = 4096, 4, 4
GATHERED = WIDTH * WIDTH * 2
"""Bytes of a layer's gathered weights, and of its gradients, in bf16."""


@dataclass(frozen=True)
class Pools:
    """Bytes reserved for streams other than the compute stream, after forward and after backward."""

    forward: int
    backward: int


def step(device: str, gather: bool, receive: bool | None) -> Pools:
    """A forward and a backward; `receive` is the field of the bf16 all-to-all, None a plain reduce-scatter."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    mesh = init_device_mesh(device, (RANKS,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with torch.device(device):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
        x = torch.randn(16, WIDTH)
    for layer in model:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if receive is not None:
        apply_bf16_all_to_all(model, receive_on_compute_stream=receive)
    if gather:
        apply_compute_stream_gather(model)
    loss = model(x).float().mean()
    forward = side_bytes()
    loss.backward()
    pools = Pools(forward, side_bytes())
    dist.destroy_process_group()
    return pools


def side_bytes() -> int:
    """Bytes that the caching allocator has reserved for streams other than the current one."""
    current = torch.cuda.current_stream().cuda_stream
    return sum(part["total_size"] for part in torch.cuda.memory_snapshot() if part["stream"] != current)
