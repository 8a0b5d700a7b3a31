"""Quantise and dequantise in the blocks of ``fp8_format``.

Two implementations with the same result in every bit: eager torch (here, any device) and Triton (`fp8_triton`, CUDA). Both
use one IEEE division and one multiplication a value for the codes, two multiplications for the values, in this order.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .fp8_format import BLOCK, DTYPES, E4M3_MAX, INVERSE_MAX, block_count


def quantise(values: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise a tensor of any shape, block by block in the order of its flattened values.

    Args:
        values: fp32 or bf16; the last block may be shorter than 128 values (nothing is padded in the result).

    Returns:
        codes (`float8_e4m3fn`, the shape of `values`) and scales (fp32, one a block).

    Raises:
        TypeError: another dtype.
    """
    flat = values.detach().reshape(1, -1)
    codes = torch.empty(flat.shape, dtype=torch.uint8, device=flat.device)
    scales = torch.empty(1, block_count(flat.size(1)), dtype=torch.float32, device=flat.device)
    quantise_into(flat, codes, scales)
    return codes.view(torch.float8_e4m3fn).view(values.shape), scales.view(-1)


def dequantise(codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The values of `quantise`'s codes and scales, in `dtype` (fp32 or bf16) and the shape of `codes`."""
    values = torch.empty(1, codes.numel(), dtype=dtype, device=codes.device)
    dequantise_into(codes.reshape(1, -1).view(torch.uint8), scales.view(1, -1), values)
    return values.view(codes.shape)


def quantise_into(values: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Quantise rows into buffers that exist already, with the implementation for their device.

    Rows may be apart in memory (any row stride); the values of a row are consecutive.

    Args:
        values: [rows, numel], fp32 or bf16.
        codes: [rows, numel], uint8 (E4M3 bits), written.
        scales: [rows, block_count(numel)], fp32, written.
    """
    _check(values, codes, scales)
    if values.numel():
        _implementation(values)[0](values, codes, scales)


def dequantise_into(codes: Tensor, scales: Tensor, values: Tensor) -> None:
    """The reverse of `quantise_into`, with the same shapes; `values` (fp32 or bf16) is written."""
    _check(values, codes, scales)
    if values.numel():
        _implementation(values)[1](codes, scales, values)


def quantise_eager(values: Tensor, codes: Tensor, scales: Tensor) -> None:
    """`quantise_into` in plain torch operations."""
    rows, numel = values.shape
    blocks = _blocked(values.float())
    largest = blocks.abs().amax(dim=-1)
    finite = largest.isfinite()
    largest = torch.where(finite, largest, torch.nan)
    scales.copy_(largest)
    # A block of zeros is divided by one: its codes are (signed) zeros.
    divisor = torch.where(largest == 0, 1.0, largest).unsqueeze(-1)
    scaled = (blocks / divisor).mul_(E4M3_MAX)
    bits = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
    # The scale alone marks a broken block, so that both implementations agree on its codes too.
    bits.masked_fill_(~finite.unsqueeze(-1), 0)
    codes.copy_(bits.view(rows, -1)[:, :numel])


def dequantise_eager(codes: Tensor, scales: Tensor, values: Tensor) -> None:
    """`dequantise_into` in plain torch operations."""
    rows, numel = values.shape
    blocks = _blocked(codes.view(torch.float8_e4m3fn).float())
    blocks = (blocks * INVERSE_MAX).mul_(scales.unsqueeze(-1))
    values.copy_(blocks.view(rows, -1)[:, :numel])
    broken = scales.isnan()
    if broken.any():  # the cast keeps NaN, but vectorised and scalar code write different ones
        values.masked_fill_(broken.repeat_interleave(BLOCK, dim=1)[:, :numel], torch.nan)


def _blocked(rows: Tensor) -> Tensor:
    """[rows, numel] -> [rows, blocks, 128], the last block filled with zeros (which can't change a maximum)."""
    missing = -rows.size(1) % BLOCK
    if missing:
        rows = F.pad(rows, (0, missing))
    return rows.reshape(rows.size(0), -1, BLOCK)


def _implementation(tensor: Tensor):
    if tensor.is_cuda:
        from . import fp8_triton  # Triton is there wherever CUDA is; a CPU never pays for its import

        return fp8_triton.quantise_triton, fp8_triton.dequantise_triton
    return quantise_eager, dequantise_eager


def _check(values: Tensor, codes: Tensor, scales: Tensor) -> None:
    if values.dtype not in DTYPES:
        raise TypeError(f"FP8 blocks hold float32 or bfloat16 values, not {values.dtype}: convert them first")
    if codes.dtype != torch.uint8 or scales.dtype != torch.float32:
        raise TypeError(
            f"FP8 buffers are uint8 codes and float32 scales, not {codes.dtype} and {scales.dtype}"
        )
    rows, numel = values.shape
    if codes.shape != values.shape or scales.shape != (rows, block_count(numel)):
        raise ValueError(
            f"FP8 buffers for {rows} x {numel} values are {rows} x {numel} codes and {rows} x {block_count(numel)} scales, "
            f"not {tuple(codes.shape)} and {tuple(scales.shape)}"
        )
