"""What a rank sees of an FP8 all-gather; functions that tests run on several ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from sharded_moe import EXPERTS, Case, coordinates, local, sharded
from torch import Tensor

from europa_exp.comm.accounting import CollectiveCounter, step_metrics
from europa_exp.comm.fp8_all_gather import FP8AllGather, apply_fp8_all_gather
from europa_exp.comm.fp8_quant import dequantise, quantise
from europa_exp.comm.fsdp_groups import groups


def expected_expert(full: Tensor, case: Case) -> Tensor:
    """This rank's expert weights, each FSDP shard quantised by itself, from the full fp32 weights."""
    shards, _, ep_rank = coordinates(case)
    mine = full.to(case.param_dtype or full.dtype).chunk(max(case.ep, 1))[ep_rank]
    if shards == 1:
        return mine  # not gathered, so not quantised
    size = -(-mine.size(case.expert_dim) // shards)
    pieces = mine.split(size, dim=case.expert_dim)
    return torch.cat([dequantise(*quantise(p.contiguous()), mine.dtype) for p in pieces], dim=case.expert_dim)


def weights_in_use(case: Case) -> dict[str, Any]:
    """Run a step in FP8 and compare every weight, as forward and backward see it, with what it should be."""
    model, full = sharded(case)
    changed = apply_fp8_all_gather(model)
    again = apply_fp8_all_gather(model)
    dense, expert = [], []

    def look(module: Any) -> None:
        prefix = f"layers.{list(model.layers).index(module)}."
        for name in EXPERTS:
            weight = local(getattr(module, name)).detach()
            expert.append(torch.equal(weight, expected_expert(full[prefix + name], case)))
        exact = full[prefix + "dense.weight"].to(case.param_dtype or torch.float32)
        dense.append(torch.equal(module.dense.weight.detach(), exact))

    for layer in model.layers:
        layer.watch = look
    torch.manual_seed(100 + dist.get_rank())
    x = torch.randn(16, case.width, dtype=case.param_dtype, requires_grad=True)
    losses = []
    for _ in range(2):  # the second step uses reused buffers, and the same weights
        model.zero_grad()
        loss = model(x).float().pow(2).mean()
        loss.backward()
        losses.append(loss.item())
    grads = {name: local(param.grad) for name, param in model.named_parameters()}
    return {
        "changed": changed,
        "again": again,
        "comms": [(group.role.value, isinstance(group.all_gather, FP8AllGather)) for group in groups(model)],
        "expert": expert,
        "dense": dense,
        "losses": losses,
        "grads": {name: grad.float().numpy() for name, grad in grads.items()},
        "grad_dtypes": {str(grad.dtype) for grad in grads.values()},
        "state_dtypes": {str(tensor.dtype) for tensor in model.state_dict().values()},
    }


def losses_after_steps(case: Case, fp8: bool, steps: int) -> list[float]:
    """Losses of a short training of this rank, in FP8 or not."""
    model, _ = sharded(case)
    if fp8:
        apply_fp8_all_gather(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(100 + dist.get_rank())
    x, y = torch.randn(64, case.width, dtype=torch.bfloat16), torch.randn(64, 8)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(x).float() - y).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def step_with_a_broken_weight(case: Case, value: float) -> dict[str, Any]:
    """One weight of one rank's shard is not finite: what the output and that weight's block become on all ranks."""
    model, _ = sharded(case)
    apply_fp8_all_gather(model)
    with torch.no_grad():
        if dist.get_rank() == 0:
            local(model.layers[1].w1_EFD)[0, 0, 5] = value
    seen = []
    model.layers[1].register_forward_pre_hook(
        lambda module, _: seen.append(local(module.w1_EFD).detach().isnan().sum())
    )
    out = model(torch.randn(16, case.width, dtype=torch.bfloat16))
    return {"nan_weights": int(seen[0]), "finite": bool(out.isfinite().all())}


def counted(case: Case, fp8: bool, count_first: bool = False, micro_batches: int = 1) -> dict[str, Any]:
    """Bytes that a step hands to the collectives, as counted and as calls of torch.distributed show them."""
    model, _ = sharded(case)
    counter = CollectiveCounter()
    if count_first:
        counter.install(model)
    if fp8:
        apply_fp8_all_gather(model)
    if not count_first:
        counter.install(model)

    calls: dict[str, int] = {}
    originals = {
        name: getattr(dist, name) for name in ("all_gather_single", "reduce_scatter_single", "all_reduce")
    }

    def spy(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            given = kwargs.get(
                "input", kwargs.get("input_tensor", args[min(len(args) - 1, 1)] if args else None)
            )
            calls[name] = calls.get(name, 0) + given.numel() * given.element_size()
            return originals[name](*args, **kwargs)

        return call

    for name in originals:
        setattr(dist, name, spy(name))
    try:
        x = torch.randn(16, case.width, dtype=case.param_dtype)
        for batch in range(micro_batches):
            if case.replicas > 1:
                model.set_requires_all_reduce(batch == micro_batches - 1)
            model(x).float().sum().backward()
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
    counts = counter.take()
    return {
        "calls": calls,
        "rows": {
            (kind.collective.value, kind.role, kind.dtype, kind.ranks): (
                t.calls,
                t.handed_bytes,
                t.sent_bytes(kind),
            )
            for kind, t in counts.items()
        },
        "metrics": step_metrics(counts),
        "left": len(counter.take()),
    }
