"""The decoder as torchtitan modules: what Qwen3's decoder lacks, and nothing else.

Attention, experts, norms, sharding and parallelisation are torchtitan's. Added here: layers without positions, rotary
caches of two lengths, the seed of the initialisation, and rows that may start in the middle of a document.
"""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.models.common.attention import (
    AttentionMasksType,
    VarlenAttention,
    create_varlen_metadata_for_document,
)
from torchtitan.models.common.rope import CosSinRoPE
from torchtitan.models.qwen3.model import Qwen3Model
from torchtitan.protocols.module import Module

from europa_exp.model.initialisation import bind

__all__ = ["EuropaModel", "NoPositions", "Rotary"]


class NoPositions(Module):
    """Takes the place of rotary embeddings in a layer that has none: queries and keys pass unchanged."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        max_seq_len: int = 0
        """Ignored; torchtitan sets it on the positions of every layer."""

    def __init__(self, config: Config) -> None:
        super().__init__()

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return query, key


class Rotary(CosSinRoPE):
    """Rotary embeddings whose cache holds ``length_factor`` times the training's sequence length (fp32 cos and sin)."""

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        length_factor: int = 1
        """Length of the cache in units of the sequence length."""


class EuropaModel(Qwen3Model):
    """Grouped-query attention and a mixture of experts in every layer, rotary embeddings on some layers."""

    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3Model.Config):
        @property
        def max_seq_len(self) -> int:
            """Rotary caches are made for the training's sequence length, so the model sets no limit of its own."""
            return sys.maxsize

        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            """Take over the training's sequence length, seed and parallelism; may be called again.

            torchtitan sets every cache to the sequence length; the long ones are made long afterwards. The seed
            comes from ``config.debug.seed``; ValueError without one, because the initialisation would differ by rank.
            """
            Qwen3Model.Config.update_from_config(self, config=config, **kwargs)
            for layer in self.layers:
                rope = layer.attention.rope
                if isinstance(rope, Rotary.Config) and rope.length_factor > 1:
                    layer.attention.rope = dataclasses.replace(
                        rope, max_seq_len=config.training.seq_len * rope.length_factor
                    )
            seed = config.debug.seed
            if seed is None:
                raise ValueError("debug.seed is not set; the initialisation of sharded parameters needs it.")
            for name, module, _, _ in self.traverse(Module.Config, recurse=True):
                module.param_init = bind(module.param_init, name, seed)

    def get_attention_masks(self, positions: torch.Tensor) -> AttentionMasksType | None:
        """Documents of a batch from ``positions`` ``(B, L)``; each row starts one, whatever its first position is.

        Without that, a row that begins in the middle of a document would be joined to the row before it.
        """
        starts = positions.clone()
        starts[:, 0] = 0
        if isinstance(self.config.first_attention.inner_attention, VarlenAttention.Config):
            # On the host too where that costs nothing: the CPU attention slices by these offsets in every layer.
            return create_varlen_metadata_for_document(
                starts, include_host_offsets=starts.device.type == "cpu"
            )
        return super().get_attention_masks(starts)
