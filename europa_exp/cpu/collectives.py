"""Collectives that gloo lacks, expressed through those it has."""

from __future__ import annotations

import torch
import torch.distributed as dist


def all_to_all(
    output_tensor_list: list[torch.Tensor],
    input_tensor_list: list[torch.Tensor],
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> None:
    """The list form of all-to-all with sizes that may differ from rank to rank, on gloo.

    Args:
        output_tensor_list: one tensor a rank of the group, filled with what that rank sends; they may differ in dim 0.
        input_tensor_list: one tensor a rank of the group, sent to that rank.
        group: process group; None is the world.
        async_op: not supported, because the result is copied into the list after the exchange.

    Raises:
        NotImplementedError: async_op is asked for.
    """
    if async_op:
        raise NotImplementedError("the list form of all-to-all on gloo is synchronous")
    received = [tensor.shape[0] for tensor in output_tensor_list]
    sent = [tensor.shape[0] for tensor in input_tensor_list]
    buffer = output_tensor_list[0].new_empty((sum(received), *output_tensor_list[0].shape[1:]))
    dist.all_to_all_single(buffer, torch.cat(input_tensor_list), received, sent, group=group)
    for target, part in zip(output_tensor_list, buffer.split(received), strict=True):
        target.copy_(part)
