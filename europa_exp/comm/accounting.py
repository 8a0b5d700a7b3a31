"""Bytes that this rank hands to the collectives, by what they are for.

What is counted: the input tensor of every call, as it is when the collective gets it (for FP8 gathers the packed message of
codes and scales). That is this rank's own contribution, not what crosses the network; `sent_bytes` estimates the latter.

- all-gather and reduce-scatter of FSDP: at the innermost communication object of each parameter group, the one that calls
  torch.distributed. An object that changes what travels keeps the one that moves it in `inner` (as `FP8AllGather` does), so
  the count is right in whichever order things are installed. Groups of one rank make no call and count nothing.
- all-reduce across HSDP replicas: FSDP calls it itself with the output of the reduce-scatter, so it is counted there.
- all-to-all of the routed tokens (expert parallelism): at the token dispatcher, forward, recomputation and backward; the few
  counts that are exchanged before are not included.

Scalars that a trainer reduces (loss, gradient norm) are not included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, Comm, ReduceScatter

from .fsdp_groups import Group, groups, set_all_gather, set_reduce_scatter

GIB = 2**30


class Collective(Enum):
    all_gather = "all_gather"
    reduce_scatter = "reduce_scatter"
    all_reduce = "all_reduce"
    all_to_all = "all_to_all"


class Kind(NamedTuple):
    """What one row of the count is about; `role` is expert, dense, mixed or tokens."""

    collective: Collective
    role: str
    dtype: str
    ranks: int


@dataclass
class Traffic:
    """Calls, and bytes of their inputs, of one kind."""

    calls: int = 0
    handed_bytes: int = 0

    def sent_bytes(self, kind: Kind) -> int:
        """Estimate of the bytes that left this rank, with the ring algorithms (for all-to-all: evenly spread tokens).

        Factors of the input: all-gather n-1, reduce-scatter and all-to-all (n-1)/n, all-reduce 2(n-1)/n, for n ranks.
        """
        others = kind.ranks - 1
        if kind.collective is Collective.all_gather:
            return self.handed_bytes * others
        factor = 2 if kind.collective is Collective.all_reduce else 1
        return self.handed_bytes * others * factor // kind.ranks


class CollectiveCounter:
    """Counts from `install` on; `take` hands over what was counted since the last `take` and starts again from zero."""

    def __init__(self, timed: bool = False) -> None:
        self._timed = timed
        self._counts: dict[Kind, Traffic] = {}

    def install(self, model: nn.Module) -> int:
        """Count the collectives of `model`, which is sharded already; returns the number of parameter groups counted."""
        found = groups(model)
        for group in found:
            _wrap_innermost(group.all_gather, lambda leaf, g=group: _CountedAllGather(leaf, g, self),
                            lambda comm, g=group: set_all_gather(g, comm))  # fmt: skip
            _wrap_innermost(group.reduce_scatter, lambda leaf, g=group: _CountedReduceScatter(leaf, g, self),
                            lambda comm, g=group: set_reduce_scatter(g, comm))  # fmt: skip
        for module in model.modules():
            dispatcher = getattr(module, "token_dispatcher", None)
            if dispatcher is not None:
                _count_tokens(dispatcher, self)
        return len(found)

    def add(self, collective: Collective, role: str, tensor: Tensor, ranks: int) -> None:
        """Count one call that this rank hands `tensor` to."""
        kind = Kind(collective, role, str(tensor.dtype).removeprefix("torch."), ranks)
        traffic = self._counts.setdefault(kind, Traffic())
        traffic.calls += 1
        traffic.handed_bytes += tensor.numel() * tensor.element_size()

    def take(self) -> dict[Kind, Traffic]:
        """What was counted since the last call, by kind."""
        counts, self._counts = self._counts, {}
        return counts


def step_metrics(counts: dict[Kind, Traffic]) -> dict[str, float]:
    """`take()` as metrics of a step, in GiB that this rank handed over.

    `comm/all_gather_gib` (parameters), `comm/reduce_gib` (gradients: reduce-scatter and the all-reduce across replicas),
    `comm/all_to_all_gib` (routed tokens). A collective that was not called is absent.
    """
    names = {
        Collective.all_gather: "comm/all_gather_gib",
        Collective.reduce_scatter: "comm/reduce_gib",
        Collective.all_reduce: "comm/reduce_gib",
        Collective.all_to_all: "comm/all_to_all_gib",
    }
    metrics: dict[str, float] = {}
    for kind, traffic in counts.items():
        name = names[kind.collective]
        metrics[name] = metrics.get(name, 0.0) + traffic.handed_bytes / GIB
    return metrics


class _CountedAllGather(AllGather):
    def __init__(self, inner: AllGather, group: Group, counter: CollectiveCounter) -> None:
        self.inner = inner
        self._role = group.role.value
        self._counter = counter

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return self.inner.allocate(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        self._counter.add(Collective.all_gather, self._role, input_tensor, group.size())
        return self.inner(
            output_tensor=output_tensor, input_tensor=input_tensor, group=group, async_op=async_op
        )


class _CountedReduceScatter(ReduceScatter):
    def __init__(self, inner: ReduceScatter, group: Group, counter: CollectiveCounter) -> None:
        self.inner = inner
        self._group = group
        self._role = group.role.value
        self._counter = counter
        self._allocations = 0

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        tensor = self.inner.allocate(size, dtype=dtype, device=device)
        # With one shard FSDP does not call this object, but still allocates here: first the input, then the output that it
        # all-reduces across the replicas.
        if self._group.shards == 1:
            self._allocations += 1
            if self._allocations % 2 == 0:
                self._count_all_reduce(tensor)
        return tensor

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        self._counter.add(Collective.reduce_scatter, self._role, input_tensor, group.size())
        self._count_all_reduce(output_tensor)
        return self.inner(
            output_tensor=output_tensor, input_tensor=input_tensor, group=group, op=op, async_op=async_op
        )

    def _count_all_reduce(self, tensor: Tensor) -> None:
        # Not while gradients accumulate: FSDP then keeps the partial sum for the last micro-batch.
        if self._group.replicas > 1 and self._group.fsdp.all_reduce_grads:
            self._counter.add(Collective.all_reduce, self._role, tensor, self._group.replicas)


def _wrap_innermost(comm: Comm, wrap: Any, set_outermost: Any) -> None:
    """Put `wrap(innermost)` in the place of the innermost of a chain of communication objects."""
    outer: Any = None
    leaf: Any = comm
    while hasattr(leaf, "inner"):
        outer, leaf = leaf, leaf.inner
    if outer is None:
        set_outermost(wrap(leaf))
    else:
        outer.inner = wrap(leaf)


def _count_tokens(dispatcher: Any, counter: CollectiveCounter) -> None:
    """Count what a torchtitan token dispatcher hands to its two exchanges, and their gradients to the reverse exchanges."""

    def counted(exchange: Any) -> Any:
        def exchange_and_count(tokens: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            ranks = dispatcher.ep_mesh.size()
            counter.add(Collective.all_to_all, "tokens", tokens, ranks)
            received = exchange(tokens, *args, **kwargs)
            if received.requires_grad:
                received.register_hook(lambda grad: counter.add(Collective.all_to_all, "tokens", grad, ranks))
            return received

        return exchange_and_count

    for name in ("_dispatch_token_exchange", "_combine_token_exchange"):
        exchange = getattr(dispatcher, name, None)
        if (
            exchange is not None
        ):  # dispatchers over other libraries (DeepEP) move tokens in their own way: not counted
            setattr(dispatcher, name, counted(exchange))
