"""What the collectives of a step carry, by what they are for: calls, bytes and, on CUDA, time.

What is counted: the input tensor of every call, as it is when the collective gets it (for FP8 gathers the packed message of
codes and scales). That is this rank's own contribution, not what crosses the network; `sent_bytes` estimates the latter.

- all-gather and reduce-scatter of FSDP: at the innermost communication object of each parameter group, the one that calls
  torch.distributed. An object that changes what travels keeps the one that moves it in `inner` (as `FP8AllGather` does), so
  the count is right in whichever order things are installed. One that reduces gradients by another collective names it in a
  class attribute `collective` (as `BF16AllToAll` does). Groups of one rank make no call and count nothing.
- all-reduce across HSDP replicas: FSDP calls it itself with the output of the reduce-scatter, so it is counted there.
- all-to-all of the routed tokens (expert parallelism): at the token dispatcher, forward, recomputation and backward; the few
  counts that are exchanged before are not included. In compiled layers the exchange is part of the compiled graph and not
  counted; a warning says so.

Not included: scalars that a trainer reduces (loss, gradient norm, whether to stop), and what checkpoints and logging exchange.

Time, see `collective_timer`: of a gather that FSDP waits for later, until that wait, and so with what its stream computes in
between; of the routed tokens, with the copies that torchtitan makes around the exchange; of a bf16 all-to-all of gradients, with
the owner's fp32 sum. Quantising and dequantising of FP8 gathers is outside of a synchronous gather's time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, Comm, ReduceScatter

from .collective_timer import CollectiveTimer, cuda_event
from .fsdp_groups import Group, add_all_reduce_hook, chain, groups, set_all_gather, set_reduce_scatter
from .traffic import TOKENS, Collective, Kind, Tally, Traffic, group_name, step_metrics
from .work import FinishingWork

__all__ = ["Collective", "CollectiveCounter", "Kind", "Traffic", "step_metrics"]

logger = logging.getLogger(__name__)


class CollectiveCounter(Tally):
    """Counts from `install` on; `take` hands over what was counted since the last `take` and starts again from zero.

    Args:
        timed: also measure times, if the model is on CUDA.
        new_event: what to measure times with on any device, see `CollectiveTimer`.
    """

    def __init__(self, timed: bool = False, new_event: Callable[[], Any] | None = None) -> None:
        super().__init__()
        self._timed = timed
        self._new_event = new_event

    def install(self, model: nn.Module) -> int:
        """Count the collectives of `model`, which is sharded already; returns the number of parameter groups counted."""
        found = groups(model)
        if self._timed and self._new_event is None and any(group.device.type == "cuda" for group in found):
            self._new_event = cuda_event
        if self._timed and self._new_event is not None:
            self.timer = CollectiveTimer(self._new_event)
        for group in found:
            _wrap_innermost(group.all_gather, lambda leaf, g=group: _CountedAllGather(leaf, g, self),
                            partial(set_all_gather, group))  # fmt: skip
            _wrap_innermost(group.reduce_scatter, lambda leaf, g=group: _CountedReduceScatter(leaf, g, self),
                            partial(set_reduce_scatter, group))  # fmt: skip
        self._install_tokens(model)
        return len(found)

    def _install_tokens(self, model: nn.Module) -> None:
        compiled = {
            inside for module in model.modules() if module._compiled_call_impl for inside in module.modules()
        }
        left_out = False
        for module in model.modules():
            dispatcher = getattr(module, "token_dispatcher", None)
            if dispatcher is None:
                continue
            if module in compiled:
                left_out = True
            else:
                _count_tokens(dispatcher, self)
        if left_out:
            logger.warning(
                "The all-to-all of routed tokens is not counted: it is part of compiled layers. "
                "training.compile=false counts it"
            )


class _Counted:
    """What the counted communication objects of a parameter group share."""

    def __init__(self, inner: Any, group: Group, counter: CollectiveCounter) -> None:
        self.inner = inner
        self._group = group
        self._role = group.role.value
        self._counter = counter
        self._names: dict[dist.ProcessGroup, str] = {}

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return self.inner.allocate(size, dtype=dtype, device=device)

    def _count(self, collective: Collective, tensor: Tensor, process_group: dist.ProcessGroup) -> Kind:
        name = self._names.get(process_group)
        if name is None:
            name = self._group.dimension(process_group) or group_name(process_group)
            self._names[process_group] = name
        return self._counter.add(collective, self._role, tensor, process_group.size(), name)


class _CountedAllGather(_Counted, AllGather):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        kind = self._count(Collective.all_gather, input_tensor, group)
        timer = self._counter.timer
        start = None if timer is None else timer.start()
        work = self.inner(
            output_tensor=output_tensor, input_tensor=input_tensor, group=group, async_op=async_op
        )
        if timer is None:
            return work
        if isinstance(work, dist.Work):
            return FinishingWork(work, partial(timer.stop, kind, start))
        timer.stop(kind, start)
        return None


class _CountedReduceScatter(_Counted, ReduceScatter):
    def __init__(self, inner: ReduceScatter, group: Group, counter: CollectiveCounter) -> None:
        super().__init__(inner, group, counter)
        self._collective = Collective(getattr(inner, "collective", "reduce_scatter"))
        self._all_reducing: tuple[Kind, Any] | None = None
        if counter.timer is not None and group.replicas > 1:
            add_all_reduce_hook(group, self._all_reduced)

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        tensor = super().allocate(size, dtype=dtype, device=device)
        # With one shard FSDP does not call this object, but still allocates here: the input on the compute stream, the output,
        # which it all-reduces across the replicas, on its reduce stream.
        if self._group.shards == 1 and self._group.on_reduce_stream():
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
        kind = self._count(self._collective, input_tensor, group)
        timer = self._counter.timer
        start = None if timer is None else timer.start()
        work = self.inner(
            output_tensor=output_tensor, input_tensor=input_tensor, group=group, op=op, async_op=async_op
        )
        if timer is not None:
            timer.stop(kind, start)
        self._count_all_reduce(output_tensor)
        return work

    def _count_all_reduce(self, tensor: Tensor) -> None:
        # Not while gradients accumulate: FSDP then keeps the partial sum for the last micro-batch.
        replicas = self._group.replicate_group
        if replicas is None or self._group.replicas == 1 or not self._group.fsdp.all_reduce_grads:
            return
        kind = self._count(Collective.all_reduce, tensor, replicas)
        timer = self._counter.timer
        if timer is not None:
            # As FSDP is about to do; so the time does not hold the wait for the reduction over the shards.
            stream = self._group.all_reduce_stream
            stream.wait_stream(torch.get_device_module(tensor.device).current_stream())
            self._all_reducing = kind, timer.start(stream)

    def _all_reduced(self, reduced: Tensor) -> None:
        if self._all_reducing is not None and self._counter.timer is not None:
            self._counter.timer.stop(*self._all_reducing)
            self._all_reducing = None


def _wrap_innermost(comm: Comm, wrap: Any, set_outermost: Any) -> None:
    """Put `wrap(innermost)` in the place of the innermost of a chain of communication objects."""
    *outer, leaf = chain(comm)
    if outer:
        outer[-1].inner = wrap(leaf)
    else:
        set_outermost(wrap(leaf))


def _count_tokens(dispatcher: Any, counter: CollectiveCounter) -> None:
    """Count what a torchtitan token dispatcher hands to its two exchanges, and their gradients to the reverse exchanges."""

    def counted(exchange: Any) -> Any:
        def exchange_and_count(tokens: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            mesh, timer = dispatcher.ep_mesh, counter.timer
            where = mesh.size(), mesh.mesh_dim_names[0]
            kind = counter.add(Collective.all_to_all, TOKENS, tokens, *where)
            start = None if timer is None else timer.start()
            received = exchange(tokens, *args, **kwargs)
            if timer is not None:
                timer.stop(kind, start)
            if received.requires_grad:
                _count_gradients(received.grad_fn, where)
            return received

        return exchange_and_count

    def _count_gradients(reverse: Any, where: tuple[int, str]) -> None:
        started: list[Any] = []

        def before(gradients: tuple[Tensor, ...]) -> None:
            kind = counter.add(Collective.all_to_all, TOKENS, gradients[0], *where)
            if counter.timer is not None:
                started.append((kind, counter.timer.start()))

        def after(*_: Any) -> None:
            while started:
                counter.timer.stop(*started.pop())

        reverse.register_prehook(before)
        if counter.timer is not None:
            reverse.register_hook(after)

    for name in ("_dispatch_token_exchange", "_combine_token_exchange"):
        exchange = getattr(dispatcher, name, None)
        if (
            exchange is not None
        ):  # dispatchers over other libraries (DeepEP) move tokens in their own way: not counted
            setattr(dispatcher, name, counted(exchange))
