"""No all-gather of the embedding table in backward.

FSDP gathers a module's parameters before its backward. The gradient of a table look-up needs the token numbers and the
gradient of the output, never the table.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule

from .fsdp_groups import groups


def skip_embedding_gather_in_backward(model: nn.Module) -> None:
    """Leave the table of `model.tok_embeddings` sharded during backward; its gradient stays the same.

    Call it after the model is sharded with FSDP.

    Raises:
        ValueError: the table is also the LM head's weight, whose backward needs it, or FSDP gathers it together with other
            parameters, or it is not sharded with FSDP.
    """
    field = "comm.embedding_gather_in_backward=false"
    embedding = getattr(model, "tok_embeddings", None)
    if not isinstance(embedding, FSDPModule):
        raise ValueError(f"{field} needs a model with tok_embeddings sharded with FSDP as a unit of its own")
    own = {id(param) for param in embedding.parameters()}
    tied = [name for name, param in model.named_parameters(remove_duplicate=False)
            if id(param) in own and not name.startswith("tok_embeddings.")]  # fmt: skip
    if getattr(model, "enable_weight_tying", False) or tied:
        raise ValueError(
            f"{field}: the embedding table is also {tied[0] if tied else 'the weight of the LM head'}, whose backward needs it; "
            "use untied embeddings"
        )
    together = [group for group in groups(model) if embedding in group.modules]
    if not together or any(len(group.modules) > 1 for group in together):
        raise ValueError(
            f"{field}: FSDP gathers the embedding table together with other modules, which need theirs"
        )
    embedding.set_unshard_in_backward(False)
