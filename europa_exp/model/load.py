"""How many tokens each expert got."""

from __future__ import annotations

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

__all__ = ["expert_loads"]


def expert_loads(model: torch.nn.Module) -> torch.Tensor:
    """Pairs of token and expert on this rank since the last optimizer step, ``(layers, experts)``.

    To be read after the backward pass and before the optimizer step, which sets the counts back (with a load-balance
    bias; without one they go on adding up). A layer that is recomputed in the backward pass counts twice in torchtitan,
    which its bias update corrects in the same way as here.
    """
    counts = []
    for layer in model.get_submodule("layers").children():
        count = layer.moe.tokens_per_expert_E
        counts.append(count / 2 if isinstance(layer, CheckpointWrapper) else count.clone())
    return torch.stack(counts)
