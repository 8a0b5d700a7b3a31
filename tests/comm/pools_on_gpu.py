"""Which stream's memory pool FSDP's buffers come from: on a GPU as its allocator says, on a CPU as the recorder of streams does.

Memory pools and streams are this process's own, whatever the other ranks do, so one process plays rank 0 of four: its process
group is torch's fake one, whose collectives move nothing. FSDP allocates, copies and synchronises as in a run of four.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from stream_order import StreamRecorder
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from europa_exp.comm.bf16_all_to_all import apply_bf16_all_to_all
from europa_exp.comm.compute_stream_gather import apply_compute_stream_gather
from europa_exp.comm.fp8_all_gather import apply_fp8_all_gather
from europa_exp.comm.fp8_format import BLOCK, SCALE_BYTES
from europa_exp.comm.fp8_quant import dequantise, quantise
from europa_exp.comm.gradient_norm import GradientNorm

LAYERS, RANKS = 4, 4
WIDTH = {"cuda": 4096, "cpu": 256}
"""Of the layers. On a GPU each buffer is large enough for a segment of its own; the recorder counts bytes of any size."""
GATHERED = {device: width**2 * 2 for device, width in WIDTH.items()}
"""Bytes of a layer's gathered weights, and of its gradients, in bf16."""
REDUCED = {device: width**2 * 4 // RANKS for device, width in WIDTH.items()}
"""Bytes of this rank's reduced gradient of a layer, in fp32."""
MESSAGE = {device: width**2 + SCALE_BYTES * width**2 // BLOCK for device, width in WIDTH.items()}
"""Bytes of a layer's gathered weights in FP8, with their scales."""


@dataclass(frozen=True)
class Mechanisms:
    """What a step is taken with: `receive` is the field of the bf16 all-to-all, None a plain reduce-scatter; `norm` takes the
    norm in backward, of gradients that go to the host, with this `lag`."""

    gather: bool = False
    receive: bool | None = None
    fp8: bool = False
    norm: bool = False
    lag: int | None = None


@dataclass(frozen=True)
class Pools:
    """Bytes reserved for streams other than the compute stream, after forward and after backward; whether this rank's part of
    all gathered weights was what it should be."""

    forward: int
    backward: int
    weights: bool


class Layer(nn.Module):
    """A linear layer whose weight is that of eight experts."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.w1_EFD = nn.Parameter(torch.randn(8, width // 8, width))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.w1_EFD.flatten(0, 1))


def step(device: str, mechanisms: Mechanisms) -> Pools:
    """A forward and a backward."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    offload = CPUOffloadPolicy(pin_memory=device == "cuda") if mechanisms.norm else OffloadPolicy()
    policy: dict[str, Any] = {
        "mesh": init_device_mesh(device, (RANKS,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "offload_policy": offload,
    }
    width = WIDTH[device]
    with torch.device(device):
        model = nn.Sequential(*(Layer(width) for _ in range(LAYERS)))
        x = torch.randn(16, width, requires_grad=True)
    for layer in model:
        fully_shard(layer, **policy)
    fully_shard(model, **policy)
    if mechanisms.receive is not None:
        apply_bf16_all_to_all(model, receive_on_compute_stream=mechanisms.receive)
    if mechanisms.fp8:
        apply_fp8_all_gather(model)
    if mechanisms.gather:
        apply_compute_stream_gather(model)
    norm = GradientNorm(mechanisms.lag)
    if mechanisms.norm:
        norm.install(model)
    expected = [_own_rows(layer, mechanisms.fp8) for layer in model]
    with StreamRecorder() if device == "cpu" else nullcontext() as recorder:
        with norm.step() if mechanisms.norm else nullcontext():
            used = []
            for layer in model:
                layer.register_forward_pre_hook(
                    lambda layer, _: used.append(layer.w1_EFD.detach()[: 8 // RANKS].clone())
                )
            loss = model(x).float().mean()
            forward = side_bytes(recorder)
            loss.backward()
        backward = side_bytes(recorder)
    assert recorder is None or recorder.hazards == []
    weights = all(torch.equal(its.to(device), mine) for its, mine in zip(expected, used, strict=True))
    dist.destroy_process_group()
    return Pools(forward, backward, weights)


def _own_rows(layer: Layer, fp8: bool) -> Tensor:
    rows = layer.w1_EFD.to_local().detach().bfloat16()
    return dequantise(*quantise(rows)) if fp8 else rows


def side_bytes(recorder: StreamRecorder | None) -> int:
    """Bytes for streams other than the current one: of a GPU those that the caching allocator has reserved, of a CPU the most
    that was referred to at once, stream by stream."""
    if recorder is not None:
        current = torch.cpu.current_stream()
        return sum(nbytes for stream, nbytes in recorder.highest.items() if stream is not current)
    current = torch.cuda.current_stream().cuda_stream
    return sum(part["total_size"] for part in torch.cuda.memory_snapshot() if part["stream"] != current)
