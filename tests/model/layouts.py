"""What a rank of some layout holds after initialisation; functions that tests run on several ranks."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import torch
from compose import composed


class Layout(NamedTuple):
    """Ranks = replicate x shard; experts over ``ep`` of the shard ranks."""

    replicate: int
    shard: int
    ep: int

    @property
    def ranks(self) -> int:
        return self.replicate * self.shard

    def overrides(self) -> list[str]:
        return [
            "parallelism.nodes=1",
            f"parallelism.gpus_per_node={self.ranks}",
            f"parallelism.data_parallel_replicate_degree={self.replicate}",
            f"parallelism.data_parallel_shard_degree={self.shard}",
            f"parallelism.expert_parallel_degree={self.ep}",
        ]


def trainer_of(overrides: list[str]) -> Any:
    """The trainer of this rank, with the model initialised and no data read yet."""
    from europa_exp.training.assemble import build_trainer

    trainer, _ = build_trainer(composed(*overrides), Path())
    return trainer


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()


def held_state(layout: Layout, overrides: list[str]) -> dict[str, Any]:
    """Full tensors, local shards and logits of a fixed batch on this rank, as digests where equality is all that counts."""
    trainer = trainer_of([*layout.overrides(), *overrides])
    model = trainer.model_parts[0]
    local, full, coordinate = {}, {}, {}
    for name, param in model.named_parameters():
        mesh = dict(zip(param.device_mesh.mesh_dim_names or (), param.device_mesh.get_coordinate() or ()))
        coordinate[name] = mesh.get("dp_replicate", 0)
        local[name] = digest(param.to_local()) if param.to_local().numel() else ""
        full[name] = digest(param.full_tensor())
    buffers = {name: digest(buffer) for name, buffer in model.named_buffers()}
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 256, (1, 64), generator=generator)
    positions = torch.cat([torch.arange(24), torch.arange(40)])[None]
    with torch.no_grad(), trainer.train_context():
        logits = model(tokens, positions=positions, attention_masks=model.get_attention_masks(positions))
    return {
        "local": local,
        "full": full,
        "replica": coordinate,
        "buffers": buffers,
        "logits": logits.float().numpy(),
    }
