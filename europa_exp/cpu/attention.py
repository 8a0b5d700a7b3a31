"""Document-masked causal attention that trains on CPU.

The accelerator back ends have no CPU backward (FlexAttention) or no CPU kernel at all (variable-length flash
attention), so on CPU the same mask is made from PyTorch's scaled dot-product attention, one call a document.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torchtitan.models.common.attention import VarlenAttention, VarlenMetadata

__all__ = ["DocumentAttention"]


class DocumentAttention(VarlenAttention):
    """Causal attention inside each packed document, none across documents; any device, any float dtype.

    It is a ``VarlenAttention`` because torchtitan decides by that type to build the document offsets of a batch
    once a step. Shapes: queries ``(B, L, N, H)``, keys and values ``(B, L, K, H)`` with K dividing N.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        pass

    def __init__(self, config: Config) -> None:
        if tuple(config.window_size) != (-1, 0):
            raise ValueError(
                f"DocumentAttention is causal without a window (window_size (-1, 0)), not {config.window_size}."
            )
        super().__init__(config)

    # torchtitan maps shardings onto the argument names, so they are part of the interface.
    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: VarlenMetadata,
        scale: float | None = None,
        out_transform: Any = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attend; ``attention_masks`` holds the documents' offsets in the batch flattened to ``B * L`` tokens.

        Repeated offsets (documents without tokens) are skipped. Raises ValueError where the offsets do not cover
        the batch, because tokens outside every document would have no output.
        """
        if out_transform is not None:
            raise ValueError("DocumentAttention gives no log-sum-exp, so it takes no out_transform.")
        B, L, N, _ = q_BLNH.shape
        offsets = attention_masks.cu_seq_q_host
        if offsets is None:
            offsets = attention_masks.cu_seq_q.tolist()
        if offsets[0] != 0 or offsets[-1] != B * L:
            raise ValueError(
                f"Document offsets run from {offsets[0]} to {offsets[-1]}; a batch of {B} x {L} tokens needs "
                f"0 to {B * L}. Every row has to start a document."
            )

        q, k, v = (_heads_first(t, N) for t in (q_BLNH, k_BLNH, v_BLNH))
        outputs = [
            F.scaled_dot_product_attention(
                q[:, :, start:end], k[:, :, start:end], v[:, :, start:end], is_causal=True, scale=scale
            )
            for start, end in pairwise(offsets)
            if end > start
        ]
        packed = torch.cat(outputs, dim=2) if len(outputs) > 1 else outputs[0]
        return packed.transpose(1, 2).reshape(B, L, N, v.shape[-1])


def _heads_first(t: torch.Tensor, n_heads: int) -> torch.Tensor:
    """``(B, L, K, H)`` to ``(1, n_heads, B * L, H)``; each of the K heads serves n_heads / K queries in a row.

    The heads are repeated here because the fused CPU kernel wants as many keys as queries; with ``enable_gqa`` the
    slower unfused path would run.
    """
    B, L, K, H = t.shape
    t = t.reshape(1, B * L, K, H).transpose(1, 2)
    return t if n_heads == K else t.repeat_interleave(n_heads // K, dim=1)
