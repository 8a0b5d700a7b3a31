"""The global gradient norm, summed up while gradients are reduced instead of from all of them after the backward pass.

Each rank adds up the squares of the gradient shards that it owns, at the point where FSDP has reduced them. After the
backward pass one all-reduce of one number remains, where torchtitan's `clip_grad_norm_` reads every gradient again,
wherever it lies by then (with CPU offload: on the host, with the host's cores and gloo), and reduces once a mesh
dimension of the experts and once for the rest. Source: the EUROPA post, 0.43 s of norms and 0.19 s of all-reduces a
step.

Where a shard's share is taken:

- Shards that stay on the device: in a post-accumulate hook of each parameter, from its `grad`. FSDP calls it after each
  reduction, on the stream of that reduction, with the divisions and the earlier micro-batches included. A later call
  replaces the earlier share: the norm of a sum is not the sum of norms.
- Shards that FSDP copies to the host: in the all-reduce hook of their group, from the reduced buffer, before the copy.
  (A post-accumulate hook would see the copy, and make FSDP wait for it.) The buffer's padding is zero. FSDP divides
  later, so the hook does it for its share.
- Shards that FSDP copies to the host and accumulates there over micro-batches: after the backward pass, on the host,
  where the sum is.

The last is also what happens to any gradient that no hook has seen as it is in the end: nothing is left out of the
norm.

The all-reduce hook and memory. With such a hook, FSDP does what follows a reduction (the hook, the copies to the host)
on the all-reduce stream, but the buffer comes from the reduce-scatter stream's memory pool. Without HSDP, torch 2.14
drops its last reference when those kernels are queued; the next reduce-scatter may then get the same memory while they
still read it. So we keep a reference. With `release_lag=None` all buffers are kept until the backward pass is over: a
second copy of all gradients of this rank, on the device (in the EUROPA post 74 hooks held 9 GiB). With `release_lag=n`
the buffers of a layer are released n layers later, once the reduce-scatter stream has been made to wait until the hooks
and the copies of that layer are done. With HSDP, FSDP itself keeps the buffers that it all-reduces until the backward pass
is over; we neither keep those nor let a stream wait for them.

Accuracy: norms of shards, their squares and the sum are fp32, as upstream's: a non-finite gradient gives a non-finite
norm, and squares overflow where upstream's do, from norms of 1.8e19 on. fp64 for the sum would add no digit: it has
some hundred terms, which are fp32 themselves.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .fsdp_groups import Group, add_all_reduce_hook, groups

logger = logging.getLogger(__name__)


class GradientNorm:
    """The norm of all gradients of a step, over all ranks.

    Use it as `with norm.step(): <zero gradients, backward passes>; norm.clip_(parameters, max_norm)`.

    Args:
        release_lag: `comm.gradient_release_lag`, see the module's text.
    """

    def __init__(self, release_lag: int | None = None) -> None:
        self._buffers = _Buffers(release_lag)
        self._shares: list[_Shares] = []

    def install(self, model: nn.Module, *, accumulates: bool = False) -> None:
        """Watch the gradients of `model`, whose parameters are all sharded with FSDP and have their memory.

        All ranks of the default process group hold the model together, as shards, experts or replicas.

        Args:
            accumulates: whether a step has several backward passes. The norm is right in either case; with CPU offload
                this decides where it is computed.

        Raises:
            ValueError: nothing is sharded with FSDP, or not everything.
        """
        found = groups(model)
        watched = {id(param) for group in found for param in group.parameters}
        missing = [name for name, param in model.named_parameters() if id(param) not in watched]
        if missing or not found:
            raise ValueError(
                "optimizer.grad_norm: in_backward takes the norm where FSDP reduces gradients, and FSDP does not shard "
                f"{', '.join(missing[:5]) or 'any parameter'}; use optimizer.grad_norm=after_backward"
            )
        squares = torch.zeros(sum(1 + len(group.parameters) for group in found), device=found[0].device)
        # Replicas hold the same reduced gradient, and each of them adds it.
        weights = [w for group in found for w in [1 / group.replicas] * (1 + len(group.parameters))]
        self._squares, self._weights = squares, squares.new_tensor(weights)
        self._shares = [
            _Shares(group, part)
            for group, part in zip(found, squares.split([1 + len(group.parameters) for group in found]))
        ]
        buffered = False
        for shares in self._shares:
            if not shares.group.offloaded:
                for index, param in enumerate(shares.group.parameters):
                    param.register_post_accumulate_grad_hook(partial(shares.take, index))
            elif not accumulates:
                buffered = buffered or shares.group.replicas == 1
                add_all_reduce_hook(shares.group, partial(self._reduced, shares))
        if self._buffers.lag is not None and not buffered:
            logger.warning(
                "comm.gradient_release_lag has no effect: it is about reduced gradients that are copied to the host "
                "(offload.fsdp_cpu) without replicas and without gradient accumulation"
            )

    @contextmanager
    def step(self) -> Iterator[None]:
        """Start from zero; at the end, also of a step that raises, no reduced gradient is kept."""
        self._squares.zero_()
        for shares in self._shares:
            shares.start()
        try:
            yield
        finally:
            self._buffers.release_all()

    @torch.no_grad()
    def total(self) -> Tensor:
        """The norm, an fp32 scalar on the device, the same on all ranks. All ranks call it, after the backward pass."""
        for shares in self._shares:
            shares.complete()
        total = (self._squares * self._weights).sum()
        dist.all_reduce(total)
        self._buffers.release_all()
        return total.sqrt()

    @torch.no_grad()
    def clip_(self, parameters: Iterable[Any], max_norm: float, *, foreach: bool | None = None) -> Tensor:
        """Scale the gradients of `parameters` (DTensors) down to `max_norm` as torchtitan's `clip_grad_norm_` does; returns
        `total()`."""
        total = self.total()
        by_mesh: dict[Any, list[Any]] = {}  # a fused multiplication takes DTensors of one mesh only
        for param in parameters:
            by_mesh.setdefault(param.device_mesh, []).append(param)
        for same_mesh in by_mesh.values():
            nn.utils.clip_grads_with_norm_(same_mesh, max_norm, total, foreach)
        return total

    @torch.no_grad()
    def _reduced(self, shares: _Shares, buffer: Tensor) -> None:
        """FSDP's all-reduce hook: runs on the all-reduce stream, which has waited for the reduction."""
        group = shares.group
        if group.replicas == 1:
            current = torch.get_device_module(buffer.device).current_stream()
            self._buffers.keep(buffer, group.module, current, group.reduce_stream)
        shares.add(buffer)


class _Shares:
    """What this rank adds to the norm for one parameter group.

    Args:
        squares: 1 + number of parameters; the first is for reduced buffers of the whole group, the others for parameters.
    """

    def __init__(self, group: Group, squares: Tensor) -> None:
        self.group = group
        self._squares = squares
        self.start()

    def start(self) -> None:
        """Forget the step before."""
        self._added = 0
        self._taken: set[int] = set()

    def add(self, buffer: Tensor) -> None:
        """Add a reduced buffer; FSDP may reduce a group in parts (the final norm and the LM head with a chunked loss)."""
        norm = torch.linalg.vector_norm(buffer, dtype=torch.float32) / self.group.division_to_come(
            buffer.dtype
        )
        self._squares[0] += norm.square()
        self._added += buffer.numel()

    @torch.no_grad()
    def take(self, index: int, param: Any) -> None:
        """Let the share of the parameter `index` be that of its gradient as it is now."""
        norm = torch.linalg.vector_norm(param.grad.to_local(), dtype=torch.float32)
        self._squares[1 + index] = norm.square()
        self._taken.add(index)

    def complete(self) -> None:
        """Take what no hook has seen as it is now: gradients that were reduced more than once, or without us."""
        if self._added == self.group.reduced_numel():
            return
        self._squares[0] = 0
        for index, param in enumerate(self.group.parameters):
            if param.grad is not None and index not in self._taken:
                self.take(index, param)


@dataclass
class _Unit:
    """Buffers of one FSDP unit (a layer), of its groups one after another."""

    module: Any
    buffers: list[Tensor]
    passed: Any = None  # event of the all-reduce stream, after its last use of the buffers


class _Buffers:
    """Reduced gradients that the all-reduce stream may still read, in the order of their reduction."""

    def __init__(self, lag: int | None) -> None:
        self.lag = lag
        self._kept: deque[_Unit] = deque()
        self._streams: tuple[Any, Any] | None = None

    def keep(self, buffer: Tensor, module: Any, current: Any, reduce_stream: Any) -> None:
        """Keep `buffer` of the unit `module`, and release those of the unit `lag` units before.

        Called before the first use of `buffer` on `current`, the all-reduce stream. FSDP queues the copies to the host after
        the hook, so only the next call can mark the point at which a buffer is no longer needed.
        """
        self._streams = current, reduce_stream
        passed = current.record_event()
        if self._kept:
            self._kept[-1].passed = passed
        if self._kept and self._kept[-1].module is module:
            self._kept[-1].buffers.append(buffer)
        else:
            self._kept.append(_Unit(module, [buffer]))
        if self.lag is not None and len(self._kept) > self.lag:
            reduce_stream.wait_event(self._kept.popleft().passed)

    def release_all(self) -> None:
        """Release what is left, once the all-reduce stream is done with it: FSDP waits for all reductions at the end of a
        backward pass only, which one that raises does not reach."""
        if self._kept and self._streams is not None:
            current, reduce_stream = self._streams
            reduce_stream.wait_stream(current)
        self._kept.clear()
