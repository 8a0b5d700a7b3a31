"""The parameter groups that FSDP communicates together, what is in them, and the collective that each one uses.

A block of an MoE model holds two groups when experts are sharded on a mesh of their own (expert parallelism): the dense
parameters and the expert weights. Without expert parallelism FSDP packs both into one group.

Everything that this project reads from FSDP's internals about groups is in this module.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState

EXPERT_PARAMETERS = frozenset({"w1_EFD", "w2_EDF", "w3_EFD"})
"""What torchtitan's grouped experts call their weights (shared experts are ordinary dense layers)."""


class Role(Enum):
    """What a group's parameters are."""

    expert = "expert"
    dense = "dense"
    mixed = "mixed"


@dataclass(frozen=True)
class Segment:
    """A parameter's stretch of the flat buffer that a group hands to its all-gather.

    `numel` counts values of one rank's shard, with FSDP's own padding of uneven shards.
    """

    numel: int
    expert: bool


@dataclass(frozen=True, eq=False)
class Group:
    """One FSDP parameter group: `name` is the dotted name of its module in the model, empty for the root."""

    name: str
    module: FSDPModule
    fsdp: Any  # torch's FSDPParamGroup

    @property
    def role(self) -> Role:
        kinds = {_is_expert(param) for param in self.fsdp.fsdp_params}
        if len(kinds) == 2:
            return Role.mixed
        return Role.expert if True in kinds else Role.dense

    @property
    def shards(self) -> int:
        """Ranks that the parameters are sharded over; 1 when they are only replicated."""
        return getattr(self.fsdp.mesh_info, "shard_mesh_size", 1)

    @property
    def replicas(self) -> int:
        """Ranks that hold the same shard (HSDP); 1 without replication."""
        return getattr(self.fsdp.mesh_info, "replicate_mesh_size", 1)

    def segments(self) -> tuple[Segment, ...]:
        """The flat buffer as it is gathered now: from full shards, or from those kept after forward."""
        return tuple(Segment(_gathered_numel(param), _is_expert(param)) for param in self.fsdp.fsdp_params)

    @property
    def all_gather(self) -> AllGather:
        return self.fsdp._all_gather_comm

    @property
    def reduce_scatter(self) -> ReduceScatter:
        return self.fsdp._reduce_scatter_comm


def groups(model: nn.Module) -> list[Group]:
    """All parameter groups of `model`, in the order of its modules; none when nothing is sharded with FSDP."""
    found: dict[int, Group] = {}
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            # Modules that were sharded as one unit share their groups.
            for fsdp in module._get_fsdp_state()._fsdp_param_groups:
                found.setdefault(id(fsdp), Group(name, module, fsdp))
    return list(found.values())


def set_all_gather(group: Group, comm: AllGather) -> None:
    """Let `group` gather its parameters with `comm`.

    FSDP's public setter takes a module, and refuses one with several groups ("ambiguous across groups with different
    meshes"), which every MoE block with expert parallelism is. So the group's private attribute is set then. When torch's
    `set_custom_all_gather` can be told which group it is for (by mesh or by parameters), this function is one call of it.
    """
    if _only_group(group):
        group.module.set_custom_all_gather(comm)
    else:
        group.fsdp._all_gather_comm = comm


def set_reduce_scatter(group: Group, comm: ReduceScatter) -> None:
    """Let `group` reduce its gradients with `comm`; the same gap in the public setter as for `set_all_gather`."""
    if _only_group(group):
        group.module.set_custom_reduce_scatter(comm)
    else:
        group.fsdp._reduce_scatter_comm = comm


def _only_group(group: Group) -> bool:
    return len(group.module._get_fsdp_state()._fsdp_param_groups) == 1


def _is_expert(param: Any) -> bool:
    return param._module_info.param_name in EXPERT_PARAMETERS


def _gathered_numel(param: Any) -> int:
    if param.sharded_state == ShardedState.SHARDED_POST_FORWARD:
        return param._sharded_post_forward_param_data.numel()
    return param.padded_sharded_param_size.numel()
