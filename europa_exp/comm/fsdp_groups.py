"""The parameter groups that FSDP communicates together, what is in them, and the collective that each one uses.

A block of an MoE model holds two groups when experts are sharded on a mesh of their own (expert parallelism): the dense
parameters and the expert weights. Without expert parallelism FSDP packs both into one group.

Everything that this project reads from FSDP's internals about groups is in this module.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, Comm, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_gradient_divide_factors
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, FSDPMeshInfo, HSDPMeshInfo
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
    def modules(self) -> tuple[nn.Module, ...]:
        """The modules that FSDP shards as one unit; all parameters of the group are in them."""
        return self.fsdp.modules

    @property
    def in_rows(self) -> bool:
        """Whether FSDP shards all parameters along their first dimension, and nothing else (tensor parallelism) shards them."""
        return all(
            param.fsdp_placement.dim == 0
            and (spec is None or all(placement.is_replicate() for placement in spec.placements))
            for param in self.fsdp.fsdp_params
            for spec in [param._unsharded_dtensor_spec]
        )

    @property
    def frees_after_forward(self) -> bool:
        """Whether FSDP frees the gathered parameters after forward, which it then gathers again in backward."""
        return self.fsdp.post_forward_mesh_info is not None

    @property
    def all_gather(self) -> AllGather:
        return self.fsdp._all_gather_comm

    @property
    def reduce_scatter(self) -> ReduceScatter:
        return self.fsdp._reduce_scatter_comm

    @property
    def replicate_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same shard (HSDP); None without replication."""
        return getattr(self.fsdp.mesh_info, "replicate_process_group", None)

    @property
    def process_groups(self) -> list[dist.ProcessGroup]:
        """Where parameters are gathered and gradients reduced: those of the mesh, then those that backward gathers in if the
        parameters are kept after forward."""
        meshes = (self.fsdp.mesh_info, self.fsdp.post_forward_mesh_info)
        held = ("shard_process_group", "reduce_scatter_process_group", "replicate_process_group")
        found = [getattr(info, name, None) for info in meshes for name in held]
        return [group for group in found if group is not None]

    def dimension(self, process_group: dist.ProcessGroup) -> str | None:
        """The mesh dimension that this group gathers, reduces or replicates over with `process_group`.

        None for a process group of something else, or of a mesh whose dimensions have no names. FSDP keeps its meshes in
        private attributes; when `FSDPModule` can be asked for them, this method reads them there.
        """
        for info in (self.fsdp.mesh_info, self.fsdp.post_forward_mesh_info):
            if info is None or not info.mesh.mesh_dim_names:
                continue
            dimensions = (
                ("shard_process_group", "shard_mesh_dim"),
                ("reduce_scatter_process_group", "shard_mesh_dim"),
                ("replicate_process_group", "replicate_mesh_dim"),
            )
            for held, dim in dimensions:
                if getattr(info, held, None) is process_group:
                    return info.mesh.mesh_dim_names[getattr(info, dim)]
        return None

    @property
    def all_reduce_stream(self) -> Any:
        """The stream on which gradients are reduced across replicas; FSDP has no public name for it."""
        return self.fsdp.comm_ctx.all_reduce_stream

    @property
    def param_dtype(self) -> torch.dtype:
        """What parameters are gathered in; their gradients have the same dtype."""
        return self.fsdp.mp_policy.param_dtype or self.fsdp.fsdp_params[0].sharded_param.dtype

    @property
    def divide_factor(self) -> float | None:
        """What FSDP divides gradients by; None stands for the number of ranks, shards times replicas."""
        return self.fsdp.gradient_divide_factor

    def holds(self, modules: Collection[nn.Module]) -> bool:
        """Whether a parameter of the group belongs to one of `modules` (itself, not something inside of it)."""
        return any(param._module_info.module in modules for param in self.fsdp.fsdp_params)

    def on_reduce_stream(self) -> bool:
        """Whether the current stream is the one that FSDP reduces gradients on. A CPU has such streams too, by name only.

        In place of a parameter of `Comm.allocate` that says what the buffer is for; when there is one, this goes.
        """
        return self.fsdp.device_handle.current_stream() == self.fsdp.comm_ctx.reduce_scatter_stream

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The sharded parameters, as the model's `parameters()` gives them between two passes; their gradients are the reduced
        shards of this rank."""
        return [param.sharded_param for param in self.fsdp.fsdp_params]

    @property
    def device(self) -> torch.device:
        """Where parameters are gathered and gradients are reduced."""
        return self.fsdp.device

    @property
    def offloaded(self) -> bool:
        """Whether FSDP copies reduced gradients to the host."""
        return isinstance(self.fsdp.offload_policy, CPUOffloadPolicy)

    @property
    def reduce_stream(self) -> Any:
        """The stream whose memory pool reduced gradients come from."""
        return self.fsdp.comm_ctx.reduce_scatter_stream

    def division_to_come(self, dtype: torch.dtype) -> float:
        """What FSDP divides a reduced gradient of `dtype` by after the all-reduce hook has seen it; 1 for no division.

        In place of a hook that runs after the division; when `set_all_reduce_hook` offers one, this goes.
        """
        info = self.fsdp.mesh_info
        _, after, _, _ = _get_gradient_divide_factors(
            self.fsdp._reduce_scatter_process_group if isinstance(info, FSDPMeshInfo) else None,
            self.fsdp._all_reduce_process_group if isinstance(info, DDPMeshInfo) else None,
            dtype,
            self.device.type,
            self.fsdp.gradient_divide_factor,
            self.fsdp.force_sum_reduction_for_comms,
        )
        return 1.0 if after is None else after

    def reduced_numel(self) -> int:
        """Values in the reduced buffers of all parameters that have a gradient now, with FSDP's padding of uneven shards."""
        return sum(
            param.padded_sharded_param_size.numel()
            for param in self.fsdp.fsdp_params
            if param.sharded_param.grad is not None
        )


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


def set_reduce_dtype(group: Group, dtype: torch.dtype) -> None:
    """Let FSDP put the gradients of `group` into its reduce-scatter's buffer in `dtype`.

    `fully_shard` takes a `MixedPrecisionPolicy` for all of a module's groups, torchtitan one for all of a model, and neither
    can be changed by a public function later. FSDP reads a group's policy before the first forward pass; when the public
    setters of FSDPModule include one for the policy, this function is one call of it.
    """
    group.fsdp.mp_policy = replace(group.fsdp.mp_policy, reduce_dtype=dtype)
    if hasattr(group.fsdp, "_reduce_dtype"):  # read already
        group.fsdp._init_mp_dtypes()


def chain(comm: Comm) -> list[Any]:
    """A communication object and those that it keeps in `inner`, one in the other; the last one calls torch.distributed."""
    found: list[Any] = [comm]
    while hasattr(found[-1], "inner"):
        found.append(found[-1].inner)
    return found


def _only_group(group: Group) -> bool:
    return len(group.module._get_fsdp_state()._fsdp_param_groups) == 1


def _is_expert(param: Any) -> bool:
    return param._module_info.param_name in EXPERT_PARAMETERS


def _gathered_numel(param: Any) -> int:
    if param.sharded_state == ShardedState.SHARDED_POST_FORWARD:
        return param._sharded_post_forward_param_data.numel()
    return param.padded_sharded_param_size.numel()


def keep_after_forward(kept: Sequence[Group], ranks: int) -> None:
    """Let each group keep its parameters sharded over blocks of `ranks` consecutive ranks from forward to backward.

    All ranks must call it, with groups that are sharded over whole blocks, in rows. They share one mesh, so one process group a block
    is made, whatever the number of groups.

    torch's own way is `fully_shard(reshard_after_forward=<ranks>)`. In 2.14 it refuses the meshes of torchtitan's spmd_types
    backend, and it takes all parameters of a module: with experts on a mesh of their own it makes a mesh of each group's
    ranks, on which the ranks don't agree, and hangs. When `reshard_after_forward` can be told for each parameter (as
    `shard_placement_fn` tells the mesh) and takes DTensors, it replaces this function.
    """
    device = kept[0].fsdp.mesh_info.mesh.device_type
    blocks = DeviceMesh(
        device, torch.arange(dist.get_world_size()).view(-1, ranks), mesh_dim_names=("nodes", "node")
    )
    info = HSDPMeshInfo(blocks, shard_mesh_dim=1, replicate_mesh_dim=0)
    for group in kept:
        group.fsdp.post_forward_mesh_info = info
        for param in group.fsdp.fsdp_params:
            param.post_forward_mesh_info = info
            param._init_sharded_post_forward_param_metadata(torch.empty(param._orig_size, device="meta"))
            if param.is_dtensor:
                param.to_sharded_post_forward = _as_plain_tensor(param, param.to_sharded_post_forward)


def _as_plain_tensor(param: Any, reshard: Callable[[], None]) -> Callable[[], None]:
    """`reshard` of a DTensor parameter as for a plain tensor; FSDP refuses DTensors there ("not supported [...] yet").

    What it does is right for both: it cuts a block's part out of the flat buffer of the gather, and that buffer is the whole
    parameter when nothing but FSDP shards it. Not needed any more when torch drops the refusal.
    """

    def reshard_as_plain_tensor() -> None:
        param.is_dtensor = False
        try:
            reshard()
        finally:
            param.is_dtensor = True

    return reshard_as_plain_tensor


def set_asynchronous_gather(model: nn.Module) -> None:
    """Let all groups of `model` issue their all-gathers on the current stream, and wait for them when they need the result.

    Only a private method does that in torch 2.14. PyTorch's pull request 202343 proposes a public one, which is taken as soon
    as it is there under the name that FSDP's other setters suggest.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            if hasattr(module, "set_unshard_async_op"):
                module.set_unshard_async_op(True)
            else:
                module._set_unshard_async_op(True)


def add_all_reduce_hook(group: Group, hook: Callable[[torch.Tensor], None]) -> None:
    """Let `group` call `hook` with each reduced buffer, on the all-reduce stream, after the hooks that it calls already.

    The same gap in the public setter as for `set_all_gather`. Besides, FSDP keeps one hook, and has no public way to read it.
    """
    before = group.fsdp._all_reduce_hook

    def both(reduced: torch.Tensor) -> None:
        if before is not None:
            before(reduced)
        hook(reduced)

    if _only_group(group):
        group.module.set_all_reduce_hook(both)
    else:
        group.fsdp._all_reduce_hook = both
