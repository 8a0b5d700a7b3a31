"""What a rank sees of reduced gradients; functions that tests run on several ranks.

Every rank puts gradients of its choice into the sharded model, so that what should come out is known.
"""

from __future__ import annotations

import resource
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from sharded_moe import Case, Model, local, sharded
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from europa_exp.comm.accounting import CollectiveCounter, step_metrics
from europa_exp.comm.bf16_all_to_all import BF16AllToAll, apply_bf16_all_to_all, sum_slices
from europa_exp.comm.fsdp_groups import Group, groups, set_reduce_dtype, set_reduce_scatter

ULP = (
    2.0**-23
)  # of fp32: two orders of a sum of n values differ by (n - 1) ULP of the sum of magnitudes at most


class Watched(ReduceScatter):
    """Notes what FSDP allocates and reduces with `inner`; sees the buffers when another one is asked for."""

    def __init__(self, inner: ReduceScatter, group: Group, seen: list[Watched]) -> None:
        self.inner = inner
        self.group = group
        self.buffers: list[tuple[torch.dtype, int]] = []
        self.reduced: list[tuple[torch.dtype, torch.dtype]] = []
        self.alive: list[tuple[bool, bool]] = []
        self.received_on_reduce_stream: list[bool] = []
        self.received_in_it: list[bool] = []
        self._pairs: list[tuple[weakref.ref, weakref.ref]] = []
        self._all = seen
        seen.append(self)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        for watched in self._all:
            watched.look((True, True), (False, False))
        tensor = self.inner.allocate(size, dtype=dtype, device=device)
        self.buffers.append((tensor.dtype, tensor.numel()))
        receive = getattr(tensor, "receive_buffer", None)
        if receive is not None:
            self._pairs.append((weakref.ref(tensor), weakref.ref(receive)))
            self.received_on_reduce_stream.append(self.group.on_reduce_stream())
        return tensor

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        self.reduced.append((input_tensor.dtype, output_tensor.dtype))
        exchange = dist.all_to_all_single

        def exchanged(output: Tensor, given: Tensor, **kwargs: Any) -> Any:
            self.received_in_it.append(output is getattr(given, "receive_buffer", None))
            return exchange(output, given, **kwargs)

        dist.all_to_all_single = exchanged
        try:
            self.inner(output_tensor, input_tensor, group, op, async_op)
        finally:
            dist.all_to_all_single = exchange

    def look(self, *settled: tuple[bool, bool]) -> None:
        """Note which gradient buffers and which of their receive buffers exist; `settled` is what should come.

        gloo's own threads let go of a call's tensors a little after the call; what they hold is waited for, not noted.
        """
        deadline = time.monotonic() + 2
        while True:
            alive = [(gradients() is not None, receive() is not None) for gradients, receive in self._pairs]
            if set(alive) <= set(settled) or time.monotonic() > deadline:
                break
            time.sleep(0.01)
        self.alive += alive


def give_gradients(model: Model, given: Callable[[str, Tensor], Tensor]) -> None:
    """Replace what the modules compute: the gradient of every gathered parameter becomes `given(name, parameter)`."""

    def products(module: nn.Module, prefix: str) -> Tensor:
        weights = ((name, local(p)) for name, p in module.named_parameters())
        return sum((w * given(prefix + name, w)).sum() for name, w in weights)

    for index, layer in enumerate(model.layers):
        layer.forward = lambda x, layer=layer, index=index: x + products(layer, f"layers.{index}.")
    model.forward = lambda x: model.head(model.layers[1](model.layers[0](x)))
    model.head.forward = lambda x: x + products(model.head, "head.")


def wide(name: str, like: Tensor, *, micro_batch: int = 0) -> Tensor:
    """Values over 17 decades, of one order on all ranks, so that the order of their sum shows."""
    torch.manual_seed(hash_of(name))
    scale = torch.empty(like.shape).uniform_(-20, 20).exp()
    torch.manual_seed(hash_of(name) + 1000 * dist.get_rank() + micro_batch + 1)
    return (torch.randn(like.shape) * scale).to(like.dtype)


def integers(name: str, like: Tensor, *, micro_batch: int = 0) -> Tensor:
    """Small integers, which fp32 sums exactly in any order."""
    torch.manual_seed(hash_of(name) + 1000 * dist.get_rank() + micro_batch + 1)
    return torch.randint(-100, 100, like.shape).to(like.dtype)


def hash_of(name: str) -> int:
    """A number that is the same on every rank."""
    return sum(ord(letter) * 31**index for index, letter in enumerate(name)) % 10**6 * 10**6


KINDS = {"wide": wide, "integers": integers}


@contextmanager
def calls_of(names: Sequence[str]) -> Any:
    """Bytes that this rank gives to these functions of torch.distributed, by name and dtype."""
    seen: Counter[tuple[str, str]] = Counter()
    originals = {name: getattr(dist, name) for name in names}

    def spy(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            given = kwargs.get("input", args[min(len(args) - 1, 1)] if args else None)
            seen[name, str(given.dtype).removeprefix("torch.")] += given.numel() * given.element_size()
            return originals[name](*args, **kwargs)

        return call

    for name in names:
        setattr(dist, name, spy(name))
    try:
        yield seen
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def prepared(case: Case, mode: str, **options: Any) -> Model:
    """A sharded model that reduces in `mode`: fp32 or bf16 with FSDP's reduce-scatter, or a2a."""
    model, _ = sharded(case)
    if mode == "a2a":
        apply_bf16_all_to_all(model, **options)
    for group in groups(model):
        if mode == "bf16":
            set_reduce_dtype(group, torch.bfloat16)
    return model


def backward(
    model: Model, kind: str, micro_batches: int = 1, replicas: int = 1, magnitudes: bool = False
) -> None:
    """Give gradients, or their magnitudes, and reduce them, once for every micro-batch."""
    for batch in range(micro_batches):
        if replicas > 1:
            model.set_requires_all_reduce(batch == micro_batches - 1)

        def given(name: str, like: Tensor, batch: int = batch) -> Tensor:
            gradient = KINDS[kind](name, like, micro_batch=batch)
            return gradient.abs() if magnitudes else gradient

        give_gradients(model, given)
        model(torch.zeros((), dtype=torch.bfloat16, requires_grad=True)).backward()


def compared(
    case: Case, kind: str, micro_batches: int = 1, modes: Sequence[str] = ("a2a",), **options: Any
) -> dict:
    """Gradients of every mode against FSDP's fp32 reduce-scatter: tensors that differ in a bit, elements beyond the bound."""
    reduced: dict[str, dict[str, Tensor]] = {}
    seen: dict[str, dict[str, Any]] = {}
    terms: dict[str, int] = {}
    for mode in ("fp32", "magnitudes", *modes):
        model = prepared(case, mode, **(options if mode == "a2a" else {}))
        counter = CollectiveCounter()
        counter.install(model)
        watched: list[Watched] = []
        for group in groups(model):
            set_reduce_scatter(group, Watched(group.reduce_scatter, group, watched))
        with calls_of(("reduce_scatter_single", "all_to_all_single", "all_reduce")) as calls:
            backward(model, kind, micro_batches, case.replicas, mode == "magnitudes")
        for watch in watched:
            watch.look((False, False))
        counts = counter.take()
        reduced[mode] = {name: local(p.grad) for name, p in model.named_parameters()}
        seen[mode] = {
            "calls": dict(calls),
            "buffers": [watch.buffers for watch in watched],
            "reduced": [watch.reduced for watch in watched],
            "alive": [watch.alive for watch in watched],
            "received_on_reduce_stream": [watch.received_on_reduce_stream for watch in watched],
            "received_in_it": {inside for watch in watched for inside in watch.received_in_it},
            "rows": {
                (kind.collective.value, kind.role, kind.dtype, kind.ranks): traffic.handed_bytes
                for kind, traffic in counts.items()
                if kind.collective.value != "all_gather"
            },
            "metrics": step_metrics(counts),
        }
        for group in groups(model):
            ranks = group.shards * group.replicas * micro_batches
            terms |= {param._module_info.param_name: ranks for param in group.fsdp.fsdp_params}
    for mode in modes:
        beyond = 0
        for name, grad in reduced[mode].items():
            expected = reduced["fp32"][name].double()
            bound = (terms[name.split(".")[-1]] - 1) * ULP * reduced["magnitudes"][name].double()
            beyond += int(((grad.double() - expected).abs() > bound).sum())
        seen[mode] |= {"different": differing(reduced[mode], reduced["fp32"]), "beyond": beyond}
    return seen


def compared_on_both_kinds(case: Case, micro_batches: int = 1, **options: Any) -> dict[str, dict]:
    """`compared` for values whose sum depends on the order, with a reduce-scatter in bf16 beside, and for integers."""
    return {
        "wide": compared(case, "wide", micro_batches, ("a2a", "bf16"), **options),
        "integers": compared(case, "integers", micro_batches, **options),
    }


def differing(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    """Names of tensors that differ in a bit."""
    return [name for name, tensor in ours.items() if not torch.equal(tensor, theirs[name])]


def after_an_exception(case: Case, **options: Any) -> list[str]:
    """The copy of gradients into the buffer fails once, then a step follows: gradients that differ between the modes."""

    def fail(*args: Any) -> None:
        raise RuntimeError("no copy")

    copy_in = _fsdp_collectives.foreach_reduce_scatter_copy_in
    results: dict[str, dict[str, Tensor]] = {}
    for mode in ("fp32", "a2a"):
        model = prepared(case, mode, **(options if mode == "a2a" else {}))
        failures = []  # with their tracebacks, and so with the gradient buffer that was never reduced
        _fsdp_collectives.foreach_reduce_scatter_copy_in = fail
        try:
            backward(model, "integers")
        except RuntimeError as error:
            failures.append(error)
        finally:
            _fsdp_collectives.foreach_reduce_scatter_copy_in = copy_in
        assert [str(error) for error in failures] == ["no copy"]
        model.reset_iter_state()
        backward(model, "integers")
        results[mode] = {name: local(p.grad) for name, p in model.named_parameters()}
    assert all(grad.dtype == torch.float32 for grad in results["a2a"].values())
    return differing(results["a2a"], results["fp32"])


def divided(case: Case, factor: float | None) -> list[str]:
    """Gradients that differ between the modes when FSDP divides them by `factor`, or by the number of ranks."""
    results = {}
    for mode in ("fp32", "a2a"):
        model = prepared(case, mode)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(factor)
        backward(model, "integers")
        results[mode] = {name: local(p.grad) for name, p in model.named_parameters()}
    return differing(results["a2a"], results["fp32"])


def installed(case: Case, keep: Sequence[str], experts_only: bool = False) -> dict[str, Any]:
    """What `apply_bf16_all_to_all` changes; twice, and with a counter in between."""
    model, _ = sharded(case)
    for group in groups(model):
        group.module.set_force_sum_reduction_for_comms(False)  # as FSDP begins on CUDA
    changed = apply_bf16_all_to_all(model, keep=keep, experts_only=experts_only)
    forced = [group.fsdp.force_sum_reduction_for_comms for group in groups(model)]
    for group in groups(model):
        group.module.set_force_sum_reduction_for_comms(True)  # gloo knows sums only
    comms = [group.reduce_scatter for group in groups(model)]
    CollectiveCounter().install(model)
    again = apply_bf16_all_to_all(model, keep=keep, experts_only=experts_only)
    backward(model, "integers")  # FSDP has read its settings afterwards
    return {
        "changed": changed,
        "again": again,
        "a2a": [
            (group.name, group.role.value)
            for group, comm in zip(groups(model), comms)
            if isinstance(comm, BF16AllToAll)
        ],
        "dtypes": [str(group.fsdp._reduce_dtype) for group in groups(model)],
        "forced": forced,
    }


def applied_after_a_step(case: Case) -> list[str]:
    """Gradients that differ when the all-to-all is applied to a model that has trained already."""
    results = {}
    for mode in ("fp32", "a2a"):
        model = prepared(case, "fp32")
        backward(model, "wide")
        model.zero_grad()
        if mode == "a2a":
            apply_bf16_all_to_all(model)
        backward(model, "integers")
        results[mode] = {name: local(p.grad) for name, p in model.named_parameters()}
        dtypes = {str(group.fsdp._reduce_dtype) for group in groups(model)}
        assert dtypes == {"torch.float32" if mode == "fp32" else "None"}
    return differing(results["a2a"], results["fp32"])


def refusals() -> dict[str, str]:
    """What is refused on one rank, and in which words."""
    messages = {}
    attempts: dict[str, tuple[Case, float, Sequence[str]]] = {
        "fp32": (Case(ep=0, param_dtype=None), 1.0, ()),
        "unknown": (Case(ep=0), 1.0, ("layers.7", "head")),
        "divided": (Case(ep=0), 2.0, ()),
    }
    for name, (case, factor, keep) in attempts.items():
        model, _ = sharded(case)
        model.layers[1].set_gradient_divide_factor(factor)
        try:
            apply_bf16_all_to_all(model, keep=keep)
        except ValueError as error:
            messages[name] = str(error)
        assert not any(isinstance(group.reduce_scatter, BF16AllToAll) for group in groups(model))
    try:
        apply_bf16_all_to_all(fully_shard(nn.Linear(4, 4)), experts_only=True)
    except ValueError as error:
        messages["no experts"] = str(error)
    apply_bf16_all_to_all(model, keep=[name for name, _ in model.named_modules()])
    model, _ = sharded(Case(ep=0))
    apply_bf16_all_to_all(model)
    comm = groups(model)[0].reduce_scatter
    output = torch.empty(2)
    for name, dtype, op in (
        ("average", torch.bfloat16, dist.ReduceOp.AVG),
        ("fp32 gradients", torch.float32, dist.ReduceOp.SUM),
    ):
        try:
            comm(output, torch.ones(2, dtype=dtype), dist.group.WORLD, op)
        except (ValueError, TypeError) as error:
            messages[name] = f"{type(error).__name__}: {error}"
    return messages


def memory_of_a_sum(ranks: int, numel: int) -> tuple[int, int]:
    """Bytes that the process grew by at most while it summed slices, and bytes of an fp32 copy of the slices."""
    slices = torch.ones(ranks, numel, dtype=torch.bfloat16)
    output = torch.ones(numel)
    sum_slices(slices[:, :1000], output[:1000])  # what torch itself needs once
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sum_slices(slices, output)
    assert (output == ranks).all()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024, 4 * ranks * numel
