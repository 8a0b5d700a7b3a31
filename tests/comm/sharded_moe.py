"""A small mixture of experts sharded as torchtitan shards one: dense weights and experts on meshes of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

EXPERTS = ("w1_EFD", "w2_EDF")


@dataclass(frozen=True)
class Case:
    """How the model is sharded. `ep` = 0: experts are not split over ranks and share the dense group, as with EP=1."""

    ep: int = 2
    replicas: int = 1
    width: int = 64
    hidden: int = 128
    experts: int = 8
    offload: bool = False
    unshard_async: bool = False
    expert_dim: int = 0
    param_dtype: torch.dtype | None = torch.bfloat16
    reduce_dtype: torch.dtype = torch.float32
    reshard: bool = True


class Block(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.dense = nn.Linear(case.width, case.width, bias=False)
        self.w1_EFD = nn.Parameter(torch.randn(case.experts, case.hidden, case.width) * 0.1)
        self.w2_EDF = nn.Parameter(torch.randn(case.experts, case.width, case.hidden) * 0.1)
        self.watch: Any = None  # called in forward and in the middle of backward, when weights are gathered

    def forward(self, x: Tensor) -> Tensor:
        w1, w2 = (w.to_local() if isinstance(w, DTensor) else w for w in (self.w1_EFD, self.w2_EDF))
        hidden = torch.relu(torch.einsum("nd,efd->enf", x, w1))
        if self.watch is not None:
            self.watch(self)
            hidden.register_hook(lambda _: self.watch(self))
        return x + self.dense(x) + torch.einsum("enf,edf->nd", hidden, w2)


class Model(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(case) for _ in range(2)])
        self.head = nn.Linear(case.width, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def sharded(case: Case) -> tuple[Model, dict[str, Tensor]]:
    """The sharded model of this rank, and the full fp32 weights that it was made from."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Model(case)
    full = {name: param.detach().clone() for name, param in model.named_parameters()}
    world = dist.get_world_size()
    policy = MixedPrecisionPolicy(
        param_dtype=case.param_dtype, reduce_dtype=case.reduce_dtype, cast_forward_inputs=False
    )
    shared: dict[str, Any] = {"mp_policy": policy, "reshard_after_forward": case.reshard}
    if case.offload:
        shared["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    shard = world // case.replicas
    if case.replicas > 1:
        dense_mesh = init_device_mesh("cpu", (case.replicas, shard), mesh_dim_names=("replicate", "fsdp"))
        dense_info: FSDPMeshInfo = HSDPMeshInfo(dense_mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    else:
        dense_mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
        dense_info = FSDPMeshInfo(dense_mesh, shard_mesh_dim=0)
    for layer in model.layers:
        if case.ep:
            _shard_experts(layer, case, shard, dense_info, dense_mesh, shared)
        else:
            own = {layer.w1_EFD, layer.w2_EDF}
            fully_shard(
                layer,
                mesh=dense_mesh,
                shard_placement_fn=lambda p, own=own: Shard(case.expert_dim if p in own else 0),
                **shared,
            )
    fully_shard(model, mesh=dense_mesh, **shared)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo knows plain sums only
    if case.unshard_async:
        model._set_unshard_async_op(True)
    return model, full


def _shard_experts(
    layer: Block, case: Case, shard: int, dense_info: Any, dense_mesh: Any, shared: Any
) -> None:
    names = ("replicate", "efsdp", "ep") if case.replicas > 1 else ("efsdp", "ep")
    sizes = (case.replicas, shard // case.ep, case.ep)[-len(names) :]
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    if case.replicas > 1:
        info: FSDPMeshInfo = HSDPMeshInfo(mesh["replicate", "efsdp"], shard_mesh_dim=1, replicate_mesh_dim=0)
    else:
        info = FSDPMeshInfo(mesh["efsdp"], shard_mesh_dim=0)
    for name in EXPERTS:
        weight = distribute_tensor(getattr(layer, name).data, mesh["ep"], [Shard(0)])
        setattr(layer, name, nn.Parameter(weight))
    experts = {getattr(layer, name) for name in EXPERTS}

    def place(param: nn.Parameter) -> ShardPlacementResult:
        if param in experts:
            return ShardPlacementResult(Shard(case.expert_dim), info)
        return ShardPlacementResult(Shard(0), dense_info)

    fully_shard(layer, mesh=dense_mesh, shard_placement_fn=place, **shared)


def coordinates(case: Case) -> tuple[int, int, int]:
    """Ranks on the expert mesh of this case: (efsdp size, efsdp rank, ep rank)."""
    rank = dist.get_rank() % (dist.get_world_size() // case.replicas)
    ep = max(case.ep, 1)
    return dist.get_world_size() // case.replicas // ep, rank // ep, rank % ep


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
