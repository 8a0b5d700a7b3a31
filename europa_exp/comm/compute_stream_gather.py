"""All-gathers set up on the compute stream (to be written)."""
from torch import nn
def apply_compute_stream_gather(model: nn.Module) -> None:
    raise NotImplementedError
