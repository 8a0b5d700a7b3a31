"""Steps of one rank under the recorder of streams; functions that tests run in a process of their own.

Streams and memory are a process's own, whatever the other ranks do. So one process plays rank 0 of several, in torch's fake
process group, whose collectives move nothing and keep no reference. All of FSDP's streams, buffers and waits are as among real
ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from sharded_moe import Case, Model, sharded
from stream_order import StreamRecorder
from torch import Tensor, nn
from torch.distributed.device_mesh import _get_device_handle
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.testing._internal.distributed.fake_pg import FakeStore

from europa_exp.comm import bf16_all_to_all
from europa_exp.comm.bf16_all_to_all import apply_bf16_all_to_all
from europa_exp.comm.compute_stream_gather import apply_compute_stream_gather
from europa_exp.comm.fp8_all_gather import apply_fp8_all_gather
from europa_exp.comm.fsdp_groups import add_all_reduce_hook, groups
from europa_exp.comm.gradient_norm import GradientNorm

APPLIED: dict[str, Callable[[nn.Module], Any]] = {
    "a2a": apply_bf16_all_to_all,
    "a2a, receive on compute stream": partial(apply_bf16_all_to_all, receive_on_compute_stream=True),
    "fp8": apply_fp8_all_gather,
    "gather on compute stream": apply_compute_stream_gather,
}


@dataclass
class Seen:
    """(stream whose memory it is, stream that may still use it), and (stream that waits, stream that it waits for)."""

    hazards: list[tuple[str, str]]
    waits: list[tuple[str, str]]
    what: list[str]


def steps(
    case: Case,
    ranks: int = 4,
    lag: int | None = None,
    norm: bool = True,
    applied: tuple[str, ...] = (),
    fault: str = "",
) -> Seen:
    """Two steps of rank 0 with these mechanisms, or with a `fault` of FAULTS put into one of them."""
    model = _model(case, ranks)
    for name in applied:
        APPLIED[name](model)
    with FAULTS[fault](model) if fault else nullcontext():
        watched = GradientNorm(lag)
        if norm:
            watched.install(model)
        with StreamRecorder() as recorder:
            for _ in range(2):
                with watched.step() if norm else nullcontext():
                    _backward(model, case)
                    if norm:
                        watched.clip_(model.parameters(), 1.0)
                model.zero_grad()
    return _named(recorder, model)


def each(case: Case, *several: dict[str, Any]) -> list[Seen]:
    """`steps` of the same case with these options, one after another in one process."""
    seen = []
    for options in several:
        seen.append(steps(case, **options))
        dist.destroy_process_group()
    return seen


def broken_off(case: Case, lag: int | None) -> Seen:
    """A step whose backward pass raises after some gradients were reduced; then the reduce stream gets new memory."""
    model = _model(case, 4)
    norm = GradientNorm(lag)
    norm.install(model)

    def break_off(grad: Tensor) -> None:
        raise KeyError("broken off")

    model.layers[0].register_forward_hook(lambda m, i, out: out.register_hook(break_off) and None)
    with StreamRecorder() as recorder:
        raised = False
        try:
            with norm.step():
                _backward(model, case)
        except KeyError:
            raised = True
        assert raised
        assert not recorder.hazards
        with torch.cpu.stream(groups(model)[0].reduce_stream):
            torch.empty(1)
    return _named(recorder, model)


def _model(case: Case, ranks: int) -> Model:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    return sharded(case)[0]


def _backward(model: Model, case: Case) -> None:
    # Without a gradient of its input, FSDP would reduce the first layer's at the end of the backward pass.
    x = torch.randn(16, case.width, dtype=case.param_dtype, requires_grad=True)
    model(x).float().pow(2).mean().backward()


def _named(recorder: StreamRecorder, model: Model) -> Seen:
    context = groups(model)[0].fsdp.comm_ctx
    names = {
        stream: name.removesuffix("_stream")
        for name, stream in vars(context).items()
        if name.endswith("_stream")
    }

    def name(stream: Any) -> str:
        return names.get(stream, "compute")

    return Seen(
        [(name(hazard.pool), name(hazard.user)) for hazard in recorder.hazards],
        [(name(wait.waiter), name(wait.source)) for wait in recorder.waits],
        [f"{hazard.was} -> {hazard.becomes}" for hazard in recorder.hazards],
    )


# ---------------------------------------------------------------------------------------------------------------- faults


@contextmanager
def _hook_without_reference(model: nn.Module) -> Any:
    """What an all-reduce hook does to FSDP when nobody keeps the buffer that it is given."""
    for group in groups(model):
        add_all_reduce_hook(group, lambda buffer: torch.linalg.vector_norm(buffer) and None)
    yield


@contextmanager
def _receive_buffer_freed_after_the_call(model: nn.Module) -> Any:
    call = bf16_all_to_all.BF16AllToAll.__call__

    def freed(self: Any, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        call(self, output_tensor, input_tensor, *args, **kwargs)
        del input_tensor.receive_buffer

    with mock.patch.object(bf16_all_to_all.BF16AllToAll, "__call__", freed):
        yield


@contextmanager
def _message_of_the_compute_stream(model: nn.Module) -> Any:
    allocate = _fsdp_collectives.DefaultAllGather.allocate
    compute = torch.cpu.current_stream()

    def allocated(self: Any, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        with _get_device_handle(device.type).stream(compute):
            return allocate(self, size, dtype=dtype, device=device)

    with mock.patch.object(_fsdp_collectives.DefaultAllGather, "allocate", allocated):
        yield


FAULTS: dict[str, Callable[[nn.Module], Any]] = {
    "hook without reference": _hook_without_reference,
    "receive buffer freed after the call": _receive_buffer_freed_after_the_call,
    "message of the compute stream": _message_of_the_compute_stream,
}
