"""A linear layer that computes in fp32, for the router on CPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torchtitan.models.common.linear import Linear

__all__ = ["Float32Linear"]


class Float32Linear(Linear):
    """Casts input and weights to fp32 and gives fp32 out.

    torchtitan's router asks autocast for this, which on CPU knows only lower precisions and switches itself off:
    experts would be chosen from bf16 logits there and from fp32 logits on an accelerator.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        bias = self.bias.float() if self.bias is not None else None
        return F.linear(input.float(), self.weight.float(), bias)
