"""Dense weights of the decoder layers stay in the node after forward, so that backward gathers them over its fast links.

After forward FSDP frees what it gathered down to this rank's shard, and backward gathers over all ranks again. Here a rank
keeps 1/(ranks of a node) of each layer's attention, router and norms, in the precision of the gather, from the layer's forward
to its backward, and backward gathers inside the node. Embedding, final norm, LM head and experts are left as they are.

The kept part is cut from what forward gathered, so backward computes with the same weights. A forward pass that no backward
follows leaves it held until the next gather, which then comes from the node too; call `model.reshard()` before changing
weights by hand in that state (as with any `reshard_after_forward` that isn't True).
"""

from __future__ import annotations

from torch import nn

from .fsdp_groups import Role, groups, keep_after_forward

LAYERS = "layers."
"""How the names of the decoder's layers begin."""


def apply_node_local_reshard(model: nn.Module, ranks_per_node: int) -> int:
    """Keep the dense weights of the layers of `model` in blocks of `ranks_per_node` consecutive ranks after forward.

    Call it once on all ranks (it makes process groups), after the model is sharded with FSDP.

    Returns:
        The number of FSDP parameter groups that are kept so (one a layer).

    Raises:
        ValueError: the sharding leaves nothing to keep, or the nodes don't fit it; the message says which and what to do.
    """
    field = "comm.node_local_reshard"
    if ranks_per_node < 2:
        raise ValueError(
            f"{field} needs nodes of 2 ranks or more, and parallelism.gpus_per_node is {ranks_per_node}: a rank would keep "
            "the weights whole; use parallelism.reshard_after_forward=never for that"
        )
    in_layers = [group for group in groups(model) if group.name.startswith(LAYERS)]
    if not in_layers:
        raise ValueError(
            f"{field} needs a model whose decoder layers ({LAYERS}*) are sharded with FSDP, one by one"
        )
    mixed = [group.name for group in in_layers if group.role is Role.mixed]
    if mixed:
        raise ValueError(
            f"{field}: FSDP gathers the experts and the dense weights of {mixed[0]} as one group, and experts must not stay; "
            "use parallelism.expert_parallel_degree=2 or more"
        )
    kept = [group for group in in_layers if group.role is Role.dense and group.frees_after_forward]
    if not kept:
        raise ValueError(
            f"{field}: no layer frees its dense weights after forward, so there is nothing to keep; use "
            "parallelism.reshard_after_forward=default"
        )
    for group in kept:
        if not group.in_rows:
            raise ValueError(
                f"{field}: weights of {group.name} are sharded along another dimension than the first, or by tensor parallelism "
                "too, and FSDP can keep neither"
            )
        if group.shards % ranks_per_node:
            raise ValueError(
                f"{field}: {group.name} is sharded over {group.shards} ranks, no multiple of the {ranks_per_node} ranks of a "
                "node; choose parallelism.data_parallel_shard_degree and parallelism.gpus_per_node so that it is"
            )
        if group.shards == ranks_per_node:
            raise ValueError(
                f"{field} has nothing to gain: {group.name} is sharded over the {group.shards} ranks of one node already"
            )
    keep_after_forward(kept, ranks_per_node)
    return len(kept)
