"""All-gathers set up on the compute stream, so that their buffers come from its memory pool.

The caching allocator keeps a pool for each CUDA stream, and memory freed in one can't serve another. FSDP allocates the
buffers of its all-gathers on two streams of its own. With FSDP's asynchronous unshard, cast, copy-in and the call of the
collective happen on the compute stream, only the transfer runs on NCCL's stream, and the compute stream waits for it when
the weights are needed. (`unshard()` called from outside forward and backward, as by torchtitan's chunked loss for the LM head,
is synchronous still; FSDP has always set that one up on the current stream.)

A gather then starts behind what the compute stream was given before, so it overlaps with computing only when it is issued a
layer ahead. In backward FSDP does that by itself. In forward it relies on its own streams, and has to be told the order.
"""

from __future__ import annotations

from itertools import pairwise

from torch import nn

from .fsdp_groups import groups, set_asynchronous_gather


def apply_compute_stream_gather(model: nn.Module) -> None:
    """Gather all parameters of `model` asynchronously from the compute stream, each FSDP unit one ahead in forward.

    Units are prefetched in the order of `model.named_modules()`, which must be the order of forward. torchtitan sets the same
    prefetches up with expert parallelism, and none without.

    Call it after the model is sharded with FSDP.

    Raises:
        ValueError: no parameter is sharded with FSDP.
    """
    # The root gathers its own parameters before any other unit starts, and a unit has a group for each mesh.
    units = list(dict.fromkeys(group.module for group in groups(model) if group.module is not model))
    if not groups(model):
        raise ValueError("allocator.all_gather_on_compute_stream needs a model that is sharded with FSDP")
    set_asynchronous_gather(model)
    for unit, following in pairwise(units):
        unit.set_modules_to_forward_prefetch([following])
