"""The Triton pair of `fp8_quant`: the same codes, scales and values, bit for bit, in one pass over memory each.

All conversions between formats are integer arithmetic. Triton's interpreter rounds its float8 and bf16 casts differently from
the hardware, so a kernel with such casts could be proved on a GPU only; integers give one answer everywhere, and the tests
compare it with torch's own casts over every E4M3 code and every rounding tie.

What is left in floating point can't be rewritten by a compiler into something else: an IEEE division (`div_rn`, as plain `/`
is an approximation in Triton) and lone multiplications, with no addition near that could be fused into them.

fp32 and bf16 tensors enter and leave the kernels as int32 and int16 of the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .fp8_format import BLOCK, INVERSE_MAX

BLOCKS_PER_PROGRAM = 16

# An E4M3 magnitude is an integer times 2^-9; this turns that integer into code / 448 (exact: only the exponent moves).
_STEP_OVER_MAX = tl.constexpr(INVERSE_MAX * 2.0**-9)
_INFINITY = tl.constexpr(0x7F800000)
_NAN = tl.constexpr(0x7FC00000)


@triton.jit
def _quantise_kernel(
    values, codes, scales, numel, count, values_row, codes_row, scales_row,
    HALF: tl.constexpr, BLOCKS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    index = block[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    inside = index < numel

    bits = tl.load(values + row * values_row + index, mask=inside, other=0).to(tl.int32)
    if HALF:
        bits = bits << 16
    magnitude = bits & 0x7FFFFFFF

    # Magnitudes order as their bits do, and infinity and NaN come last: no NaN rule of `max` is needed.
    largest = tl.max(magnitude, axis=1)
    finite = largest < _INFINITY
    tl.store(scales + row * scales_row + block, tl.where(finite, largest, _NAN), mask=block < count)

    one = 0x3F800000
    divisor = tl.where(finite & (largest > 0), largest, one).to(tl.float32, bitcast=True)
    ratio = tl.div_rn(
        magnitude.to(tl.float32, bitcast=True), tl.broadcast_to(divisor[:, None], (BLOCKS, WIDTH))
    )
    scaled = (ratio * 448.0).to(tl.int32, bitcast=True)

    # fp32 -> E4M3, to nearest, ties to even. Normal results (2^-6 and up, biased exponent 121) drop 20 of 23 fraction bits;
    # below, the step stays 2^-9 and each exponent less drops one bit more, until nothing is left (25 bits and more).
    exponent = scaled >> 23
    fraction = (scaled & 0x7FFFFF) | 0x800000
    drop = tl.minimum(tl.maximum(141 - exponent, 20), 25)
    kept = fraction >> drop
    below_half = (tl.full((BLOCKS, WIDTH), 1, tl.int32) << (drop - 1)) - 1
    rounded = (fraction + below_half + (kept & 1)) >> drop
    code = rounded + (tl.maximum(exponent - 121, 0) << 3)
    code = code | ((bits >> 24) & 0x80)
    code = tl.where(finite[:, None], code, 0)
    tl.store(codes + row * codes_row + index, code.to(tl.uint8), mask=inside)


@triton.jit
def _dequantise_kernel(
    codes, scales, values, numel, count, codes_row, scales_row, values_row,
    HALF: tl.constexpr, BLOCKS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    index = block[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    inside = index < numel

    code = tl.load(codes + row * codes_row + index, mask=inside, other=0).to(tl.int32)
    scale = tl.load(scales + row * scales_row + block, mask=block < count, other=0)
    broken = scale > _INFINITY

    exponent = (code >> 3) & 0xF
    fraction = code & 7
    steps = tl.where(exponent == 0, fraction, (fraction + 8) << tl.maximum(exponent - 1, 0))
    magnitude = (steps.to(tl.float32) * _STEP_OVER_MAX) * scale.to(tl.float32, bitcast=True)[:, None]
    bits = tl.where(broken[:, None], _NAN, magnitude.to(tl.int32, bitcast=True))

    if (
        HALF
    ):  # fp32 -> bf16, to nearest, ties to even; NaN (which has no rounding) passes, as its low half is zero
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        bits = bits | ((code & 0x80) << 8)
        tl.store(values + row * values_row + index, bits.to(tl.int16), mask=inside)
    else:
        bits = bits | ((code & 0x80) << 24)
        tl.store(values + row * values_row + index, bits, mask=inside)


def quantise_triton(values: Tensor, codes: Tensor, scales: Tensor) -> None:
    """`fp8_quant.quantise_into` on CUDA (or in Triton's interpreter); same arguments."""
    rows, numel = values.shape
    count = scales.size(1)
    _quantise_kernel[(triton.cdiv(count, BLOCKS_PER_PROGRAM), rows)](
        _as_integers(values), codes, scales.view(torch.int32), numel, count,
        values.stride(0), codes.stride(0), scales.stride(0),
        HALF=values.dtype == torch.bfloat16, BLOCKS=BLOCKS_PER_PROGRAM, WIDTH=BLOCK,
    )  # fmt: skip


def dequantise_triton(codes: Tensor, scales: Tensor, values: Tensor) -> None:
    """`fp8_quant.dequantise_into` on CUDA (or in Triton's interpreter); same arguments."""
    rows, numel = values.shape
    count = scales.size(1)
    _dequantise_kernel[(triton.cdiv(count, BLOCKS_PER_PROGRAM), rows)](
        codes, scales.view(torch.int32), _as_integers(values), numel, count,
        codes.stride(0), scales.stride(0), values.stride(0),
        HALF=values.dtype == torch.bfloat16, BLOCKS=BLOCKS_PER_PROGRAM, WIDTH=BLOCK,
    )  # fmt: skip


def _as_integers(values: Tensor) -> Tensor:
    return values.view(torch.int16 if values.dtype == torch.bfloat16 else torch.int32)
