"""The format of quantised values: FP8 (E4M3) in blocks of 128 consecutive values, with one fp32 scale a block.

The scale of a block is its largest magnitude, exactly as it is (no rounding, no power of two). That value maps to 448, the
largest finite E4M3 number:

    code  = e4m3(value / scale * 448)        round to nearest, ties to even
    value = (code / 448) * scale             in fp32, then cast to the output's dtype

Why the maximum itself travels and not maximum/448: a quotient can round, overflow (values near the top of fp32) or fall
into the denormals (tiny blocks, where it loses digits). The maximum does neither, it comes back bit for bit, and quantising
values that were quantised before changes nothing.

Error: at most 16/448 = 3.5714% of the block's maximum in fp32 (half of the step between 256 and 448) and 3.97% after the cast
to bf16. The only exception is the smallest denormals, where the output format's own step (2^-149 in fp32, 2^-133 in bf16) is
larger than that; the error is then half such a step more. Finite values never become infinite, unless the cast to bf16 of the
block's maximum itself does (an fp32 value above 3.3895e38).

Non-finite values: an infinity or NaN makes its whole block NaN on the receiver. A broken weight stays visible; keeping its
127 neighbours intact would cost an extra mark a value, and a run with such a weight is over anyway.
"""

from __future__ import annotations

import math

import torch

BLOCK = 128
"""Consecutive values that share a scale."""

E4M3_MAX = 448.0
"""Largest finite E4M3 value: where a block's maximum lands."""

SCALE_BYTES = 4
"""Bytes of a block's scale (fp32)."""

ERROR_BOUND_FP32 = 16 / 448
"""Largest error of a value, as a share of its block's maximum, before a cast to bf16 (up to fp32 rounding: 2^-22 of it)."""

ERROR_BOUND_BF16 = 0.0397
"""The same after the cast to bf16."""

DTYPES = (torch.float32, torch.bfloat16)
"""What can be quantised, and what a block can be dequantised to."""

# 448 * INVERSE is exactly 1 in fp32, so the block's maximum comes back unchanged.
INVERSE_MAX = torch.tensor(1 / E4M3_MAX, dtype=torch.float32).item()


def block_count(numel: int) -> int:
    """Blocks (and so scales) of `numel` consecutive values; a last, shorter block counts as one."""
    return math.ceil(numel / BLOCK)


def wire_bytes(numel: int) -> int:
    """Bytes of `numel` quantised values: one a value and four a block (1.03125 a value when 128 divides `numel`)."""
    return numel + SCALE_BYTES * block_count(numel)
