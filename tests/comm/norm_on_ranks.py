"""The gradient norm in backward beside torchtitan's `clip_grad_norm_`; functions that tests run on several ranks."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from sharded_moe import Case, Model, sharded
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.debug import CommDebugMode
from torchtitan.distributed.utils import clip_grad_norm_

from europa_exp.comm.fsdp_groups import groups
from europa_exp.comm.gradient_norm import GradientNorm

MAX_NORM = 0.01


@dataclass(frozen=True)
class Step:
    """How a step is run on the model of a case."""

    micro_batches: int = 1
    declared: bool = True
    """Whether `install` is told of more than one micro-batch."""
    lag: int | None = None
    divide: float | None = 1.0
    skipped_layers: tuple[int, ...] = ()
    only_dense: bool = False
    scale: float = 1.0
    broken: float | None = None
    """Put into one weight's gradient of rank 0, before it is reduced."""


@dataclass
class Seen:
    """Ours and upstream's norm of the same gradients, whether clipping left the same, and the collectives of each."""

    ours: float
    theirs: float
    clipped_alike: bool
    clipped: bool
    our_collectives: int
    their_collectives: int
    alive: list[int] = field(default_factory=list)
    alive_after: int = 0


def runs(*several: tuple[Case, tuple[Step, ...]]) -> list[list[Seen]]:
    """`steps` of each model, in the same processes."""
    return [steps(case, *its) for case, its in several]


def steps(case: Case, *several: Step) -> list[Seen]:
    """Run the steps one after another on one model; the first one says how the norm is installed."""
    model, _ = sharded(case)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                group.gradient_divide_factor = several[0].divide
    norm = GradientNorm(several[0].lag)
    norm.install(model, accumulates=several[0].declared and several[0].micro_batches > 1)
    watch = _watch_buffers(model)
    return [_step(model, norm, case, step, watch) for step in several]


def _step(model: Model, norm: GradientNorm, case: Case, step: Step, watch: _Watch) -> Seen:
    watch.clear()
    params = list(model.parameters())
    with norm.step():
        model.zero_grad()
        for micro_batch in range(step.micro_batches):
            if case.replicas > 1:
                model.set_requires_all_reduce(micro_batch == step.micro_batches - 1)
            _backward(model, case, step, micro_batch)
        gradients = [p.grad._local_tensor.clone() if p.grad is not None else None for p in params]
        with CommDebugMode() as comms:
            ours = norm.clip_(params, MAX_NORM, foreach=True)
    alive_after = sum(tensor() is not None for tensor in watch.tensors)
    our_clipped = [p.grad._local_tensor.clone() for p in params if p.grad is not None]
    for param, gradient in zip(params, gradients):
        if gradient is not None:
            param.grad._local_tensor.copy_(gradient)
    with CommDebugMode() as their_comms:
        theirs = clip_grad_norm_(params, MAX_NORM, foreach=True, ep_enabled=case.ep > 0)
    their_clipped = [p.grad._local_tensor for p in params if p.grad is not None]
    return Seen(
        ours=ours.item(),
        theirs=theirs.item(),
        clipped_alike=all(
            torch.allclose(a, b, rtol=1e-5, equal_nan=True) for a, b in zip(our_clipped, their_clipped)
        ),
        clipped=any(
            not torch.equal(a, b) for a, b in zip(our_clipped, (g for g in gradients if g is not None))
        ),
        our_collectives=comms.get_total_counts(),
        their_collectives=their_comms.get_total_counts(),
        alive=list(watch.alive),
        alive_after=alive_after,
    )


def _backward(model: Model, case: Case, step: Step, micro_batch: int) -> None:
    torch.manual_seed(100 + dist.get_rank() + 10 * micro_batch)
    x = torch.randn(16, case.width, dtype=case.param_dtype) * step.scale
    changed = []
    for index, layer in enumerate(model.layers):
        if index in step.skipped_layers:
            layer.forward = lambda x: x
            changed.append(layer)
        elif step.only_dense:
            layer.forward = lambda x, layer=layer: x + layer.dense(x)
            changed.append(layer)
    try:
        out = model(x).float()
        if step.broken is not None and dist.get_rank() == 0:
            out.register_hook(lambda grad: torch.full_like(grad, step.broken))
        out.pow(2).mean().backward()
    finally:
        for layer in changed:
            del layer.forward


class _Watch:
    """Which reduced buffers are alive at each call of an all-reduce hook, the one of that call included."""

    def __init__(self) -> None:
        self.tensors: list[weakref.ref[Tensor]] = []
        self.alive: list[int] = []

    def clear(self) -> None:
        self.tensors, self.alive = [], []

    def __call__(self, hook: Callable[[Tensor], None], buffer: Tensor) -> None:
        self.tensors.append(weakref.ref(buffer))
        self.alive.append(sum(tensor() is not None for tensor in self.tensors))
        hook(buffer)


def _watch_buffers(model: Model) -> _Watch:
    watch = _Watch()
    for group in groups(model):
        hook = group.fsdp._all_reduce_hook
        if hook is not None:
            group.fsdp._all_reduce_hook = lambda buffer, hook=hook: watch(hook, buffer)
    return watch


def a_step_that_raises(case: Case) -> dict[str, Any]:
    """A step breaks off in its backward pass; then a good one."""
    model, _ = sharded(case)
    norm = GradientNorm()
    norm.install(model)
    watch = _watch_buffers(model)

    class BrokenOff(Exception):
        pass

    def break_off(grad: Tensor) -> None:
        raise BrokenOff

    first = model.layers[0].register_forward_hook(lambda m, i, out: out.register_hook(break_off) and None)
    raised = False
    try:
        with norm.step():
            _backward(model, case, Step(), 0)
    except BrokenOff:
        raised = True
    first.remove()
    seen_before = len(watch.tensors)
    alive_after = sum(tensor() is not None for tensor in watch.tensors)
    model.reset_iter_state()
    good = _step(model, norm, case, Step(), watch)
    return {"raised": raised, "seen_before": seen_before, "alive_after": alive_after, "good": good}


def refused(case: Case) -> str:
    """What `install` says about a model with a parameter that FSDP does not shard."""
    model, _ = sharded(case)
    model.register_parameter("loose", torch.nn.Parameter(torch.zeros(3)))
    try:
        GradientNorm().install(model)
    except ValueError as error:
        return str(error)
    return ""


def norms_of_all_ranks(case: Case) -> list[float]:
    """The norm as each rank has it."""
    seen = steps(case, Step())[0].ours
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, seen)
    return everyone


def warnings_at_install(case: Case, micro_batches: int) -> list[str]:
    """What is logged when a norm with a lag is installed."""
    model, _ = sharded(case)
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("europa_exp.comm.gradient_norm").addHandler(handler)
    GradientNorm(2).install(model, accumulates=micro_batches > 1)
    return said
