"""Gradients travel in bf16, their owner sums them in fp32 (to be written)."""
from collections.abc import Sequence
from torch import nn
def apply_bf16_all_to_all(model: nn.Module, *, receive_on_compute_stream: bool = False, keep: Sequence[str] = ()) -> int:
    raise NotImplementedError
