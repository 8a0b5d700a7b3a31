"""The gradient norm, computed while gradients are reduced (to be written)."""
from torch import nn
class GradientNorm:
    def __init__(self, release_lag: int | None) -> None: ...
    def install(self, model: nn.Module) -> None:
        raise NotImplementedError
