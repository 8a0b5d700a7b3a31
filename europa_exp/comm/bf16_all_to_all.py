"""Gradients travel in bf16 and are summed in fp32 by the rank that owns them: half the bytes and half the gradient buffer of
an fp32 reduce-scatter of the same gradients, and the same digits.

Under mixed precision autograd's gradients are bf16. FSDP converts them to fp32 and hands that to a reduce-scatter. Here they
stay bf16 in FSDP's buffer, one all-to-all sends every owner its slice of each rank, and the owner adds the slices up in fp32.
No rounding happens on the way, so the result is the fp32 reduce-scatter's up to the order of the sum; a reduce-scatter in
bf16 rounds after every addition. Any division (mean over ranks) applies to the fp32 sum, and so does the all-reduce across
HSDP replicas. The scheme is Megatron-LM's `reduce_scatter_with_fp32_accumulation`; here groups of two ranks use it too, as the
bytes halve there as well. The price is a receive buffer as large as the gradient buffer, which a reduce-scatter does without.

Precision of the sum: two orders of adding n values differ by at most (n-1) * 2^-23 * the sum of their magnitudes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from .fsdp_groups import Group, Role, chain, groups, set_reduce_dtype, set_reduce_scatter

logger = logging.getLogger(__name__)

# A CPU's torch.sum first converts all of its input to fp32; parts of the columns bound that copy.
_CPU_PARTS = 32
_CPU_LEAST_COLUMNS = 2**14


def apply_bf16_all_to_all(
    model: nn.Module,
    *,
    experts_only: bool = False,
    receive_on_compute_stream: bool = False,
    keep: Sequence[str] = (),
) -> int:
    """Reduce the gradients of `model` over the shard ranks with a bf16 all-to-all from now on.

    Call it once the model is sharded with FSDP, and before anything that counts or times its collectives. Calling it again
    changes nothing.

    Gradients that FSDP accumulates without reducing them (`set_requires_gradient_sync(False)`) are accumulated in the dtype
    that they are reduced in, so bf16 here: reduce every micro-batch, as torchtitan's trainer does, or `keep` such a module.

    Args:
        model: its gathered parameters, and so its gradients, are bf16.
        experts_only: leave parameter groups without expert weights as they are. (Without expert parallelism a layer is one group.)
        receive_on_compute_stream: take the receive buffer from the compute stream's memory pool, not the reduce stream's.
        keep: dotted names of modules; a parameter group with a parameter of one of these, or of what is inside, stays as it is.

    Returns:
        The number of FSDP parameter groups that reduce this way.

    Raises:
        ValueError: no FSDP parameter groups, or none with experts though only these are asked for; gradients in another dtype than bf16; a module of `keep` that does not exist; a
            group of one rank whose gradients FSDP divides, which it would do in bf16.
    """
    found = groups(model)
    if not found:
        raise ValueError(
            "comm.gradient_reduce: bf16_all_to_all needs a model sharded with FSDP, and nothing of this one is; "
            "use comm=bf16"
        )
    kept = _modules_inside(model, keep)
    changing = [
        group for group in found if not group.holds(kept) and not (experts_only and group.role is Role.dense)
    ]
    if experts_only and not changing:
        raise ValueError(
            "comm.gradient_reduce: expert_bf16_all_to_all finds no experts in this model; use bf16_all_to_all"
        )
    for group in changing:
        _check(group)
    for group in changing:
        if isinstance(chain(group.reduce_scatter)[-1], BF16AllToAll):
            continue
        set_reduce_dtype(group, torch.bfloat16)
        set_reduce_scatter(group, BF16AllToAll(group, receive_on_compute_stream=receive_on_compute_stream))
        # A gradient divide factor would otherwise reach NCCL as an average or as a multiplication before the sum.
        group.module.set_force_sum_reduction_for_comms(True)
    if changing and all(group.shards == 1 for group in changing):
        logger.warning(
            "comm.gradient_reduce=bf16_all_to_all moves no bytes: no parameter group is sharded over more than one rank"
        )
    return len(changing)


class BF16AllToAll(ReduceScatter):
    """FSDP's reduce-scatter of bf16 gradients as an all-to-all and an fp32 sum at the receiver.

    FSDP asks for two buffers in the same dtype. The gradients it copies into the first one on the compute stream; the second
    one, for the result, it asks for on its reduce stream, and gets fp32. The stream tells them apart rather than the order of
    the calls: that also holds after an exception between the two, and in a group of one rank, where FSDP copies from the
    first to the second itself and never calls this object.

    FSDP waits for no handle, so the call is complete in the order of the stream that it runs on, the reduce stream.

    Memory on CUDA. A receive buffer from the reduce stream's pool is allocated, used and freed on that stream. One from the
    compute stream's pool is used by another stream than its own, as FSDP's gradient buffer is: were it freed as soon as the
    call returns, the compute stream could write to the same memory while the reduce stream still reads it. FSDP keeps the
    gradient buffer until the compute stream has waited for the reduction, and the receive buffer hangs on the gradient
    buffer, so both go back to the compute stream's pool at that moment, without `record_stream`. The other end is safe too:
    FSDP lets the reduce stream wait for all that the compute stream was given until the gradients were copied, and so for
    whatever used the same memory before.
    """

    collective = "all_to_all"

    def __init__(self, group: Group, *, receive_on_compute_stream: bool = False) -> None:
        self._group = group
        self._receive_on_compute_stream = receive_on_compute_stream

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        if self._group.on_reduce_stream():
            return torch.empty(*size, dtype=torch.float32, device=device)
        gradients = torch.empty(*size, dtype=dtype, device=device)
        if self._receive_on_compute_stream and self._group.shards > 1:
            gradients.receive_buffer = torch.empty_like(gradients)
        return gradients

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        if op != dist.ReduceOp.SUM:
            raise ValueError(
                f"comm.gradient_reduce: bf16_all_to_all sums, and FSDP asks for {op}; leave "
                "set_force_sum_reduction_for_comms on"
            )
        if input_tensor.dtype != torch.bfloat16:
            raise TypeError(
                f"comm.gradient_reduce: bf16_all_to_all carries bfloat16 gradients, and FSDP hands over {input_tensor.dtype}; "
                "use comm=bf16"
            )
        received = getattr(input_tensor, "receive_buffer", None)
        if received is None:
            received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        sum_slices(received.view(group.size(), -1), output_tensor)


def sum_slices(slices: Tensor, output: Tensor) -> None:
    """Sum bf16 [ranks, numel] over the ranks into fp32 [numel], accumulating in fp32.

    No fp32 copy of the slices is made. On CUDA torch's kernel reads bf16 and accumulates in fp32, one launch whatever the
    number of ranks (several where the slices exceed its 32-bit index range). The order of the sum is that of `torch.sum` over
    the first dimension, which shape and device alone decide: repeated calls agree in every bit.
    """
    columns = max(output.numel(), 1)
    if slices.device.type == "cpu":
        columns = max(_CPU_LEAST_COLUMNS, -(-columns // _CPU_PARTS))
    for part, result in zip(slices.split(columns, dim=1), output.split(columns)):
        torch.sum(part, dim=0, dtype=torch.float32, out=result)


def _check(group: Group) -> None:
    if group.param_dtype != torch.bfloat16:
        raise ValueError(
            f"comm.gradient_reduce: bf16_all_to_all would round the {group.param_dtype} gradients of {group.name or 'the model'}; "
            "use training.param_precision=bfloat16, or comm=bf16"
        )
    if group.shards == 1 and group.divide_factor not in (None, 1.0):
        raise ValueError(
            f"comm.gradient_reduce: bf16_all_to_all in a group of one rank ({group.name or 'the model'}) would divide bf16 "
            f"gradients by {group.divide_factor}; set_gradient_divide_factor(1.0) and scale the loss, or use comm=bf16"
        )


def _modules_inside(model: nn.Module, names: Sequence[str]) -> set[nn.Module]:
    modules = dict(model.named_modules())
    unknown = [name for name in names if name not in modules]
    if unknown:
        raise ValueError(
            f"comm.gradient_reduce: bf16_all_to_all is to leave out {', '.join(unknown)}, and the model has no such module"
        )
    return {inside for name in names for inside in modules[name].modules()}
