"""Quantisation in blocks of 128: error bounds, exact cases, broken values; eager pair."""

from __future__ import annotations

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from europa_exp.comm.fp8_format import BLOCK, ERROR_BOUND_BF16, ERROR_BOUND_FP32, block_count, wire_bytes
from europa_exp.comm.fp8_quant import dequantise, quantise, quantise_into

FP32_ROUNDING = 2.0**-22  # of the block's maximum: a few fp32 roundings
BF16_LARGEST = torch.finfo(torch.bfloat16).max


def block_maximum(values: torch.Tensor) -> torch.Tensor:
    """The maximum of each value's block, in fp64 and the shape of `values`."""
    flat = values.double().abs().flatten()
    blocks = F.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
    return blocks.amax(1).repeat_interleave(BLOCK)[: flat.numel()].view(values.shape)


@st.composite
def finite_values(draw: st.DrawFn) -> torch.Tensor:
    """Finite fp32 of any size and shape: free bit patterns, or a bell curve at some magnitude (denormals, huge)."""
    shape = draw(hnp.array_shapes(max_dims=3, max_side=40))
    if draw(st.booleans()):
        floats = st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=True)
        array = draw(hnp.arrays(np.float32, shape, elements=floats))
    else:
        rng = np.random.default_rng(draw(st.integers(0, 2**32)))
        array = rng.standard_normal(shape) * 2.0 ** draw(st.integers(-150, 124))
        array = array.clip(-3e38, 3e38).astype(np.float32)
    return torch.from_numpy(array)


@settings(deadline=None, max_examples=150)
@given(finite_values(), st.sampled_from([torch.float32, torch.bfloat16]))
def test_error_within_the_bound_of_the_block_maximum(values: torch.Tensor, dtype: torch.dtype) -> None:
    values = values.to(dtype)
    values = torch.where(values.isfinite(), values, BF16_LARGEST)  # fp32 that bf16 can't hold
    largest = block_maximum(values)
    codes, scales = quantise(values)
    assert torch.equal(scales.double(), largest.flatten()[::BLOCK])
    assert (codes.view(torch.uint8) & 0x7F <= 0x7E).all(), "0x7F is E4M3's NaN"

    restored = dequantise(codes, scales, torch.float32)
    assert restored.isfinite().all()
    error = (restored.double() - values.double()).abs()
    assert (error <= (ERROR_BOUND_FP32 + FP32_ROUNDING) * largest + 2.0**-150).all()

    restored = dequantise(codes, scales, torch.bfloat16)
    fits = largest <= BF16_LARGEST
    error = (restored.double() - values.double()).abs()
    assert (error <= ERROR_BOUND_BF16 * largest + 2.0**-134)[fits].all()


@settings(deadline=None, max_examples=60)
@given(finite_values(), st.sampled_from([torch.float32, torch.bfloat16]))
def test_maximum_and_zeros_survive_and_quantising_again_changes_nothing(
    values: torch.Tensor, dtype: torch.dtype
) -> None:
    values = values.to(dtype)
    values = torch.where(values.isfinite(), values, BF16_LARGEST)
    once = dequantise(*quantise(values), dtype)
    at_maximum = values.double().abs() == block_maximum(values)
    assert torch.equal(once[at_maximum], values[at_maximum])
    assert (once[values == 0] == 0).all()
    assert torch.equal(once.signbit(), values.signbit())
    if block_maximum(values)[block_maximum(values) > 0].numel() and block_maximum(values).max() > 1e-30:
        big = (
            block_maximum(values) > 1e-30
        )  # among denormals the format's own steps are coarser than the codes'
        assert torch.equal(dequantise(*quantise(once), dtype)[big], once[big])


def test_bounds_are_reached_so_a_rounded_scale_would_fail() -> None:
    values = torch.linspace(0, 1, 128 * 999).view(128, 999).T.contiguous()
    values[:, -1] = 1.0
    for maximum in torch.linspace(1, 2, 33):  # every position between two powers of two
        scaled = values * maximum
        error = (dequantise(*quantise(scaled), torch.float32) - scaled).abs().max() / maximum
        assert 0.035 < error <= ERROR_BOUND_FP32 + FP32_ROUNDING


def test_values_that_the_format_holds_come_back_exactly() -> None:
    grid = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)
    values = torch.cat([grid.float(), torch.tensor([448.0])])
    codes, scales = quantise(torch.cat([values, -values]))
    assert torch.equal(scales, torch.tensor([448.0, 448.0]))
    assert torch.equal(codes[:127].view(torch.uint8), grid.view(torch.uint8))
    assert torch.equal(dequantise(codes, scales).float(), torch.cat([values, -values]))
    in_fp32 = dequantise(codes, scales, torch.float32)  # code / 448 * 448 in fp32: to the last bits
    torch.testing.assert_close(in_fp32, torch.cat([values, -values]), rtol=2.0**-22, atol=0)


@pytest.mark.parametrize("numel", [0, 1, 127, 128, 129, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_length_one_scale_a_block(numel: int, dtype: torch.dtype) -> None:
    values = torch.randn(numel, dtype=dtype)
    codes, scales = quantise(values)
    assert codes.numel() + 4 * scales.numel() == wire_bytes(numel) == numel + 4 * block_count(numel)
    assert codes.dtype == torch.float8_e4m3fn
    assert dequantise(codes, scales).shape == values.shape
    # A short last block is as good as a full one: it is not diluted by its padding.
    padded = F.pad(values, (0, -numel % BLOCK))
    assert torch.equal(dequantise(*quantise(padded))[:numel], dequantise(codes, scales))


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_broken_value_breaks_its_block_visibly_and_no_other(broken: float, dtype: torch.dtype) -> None:
    values = torch.randn(400).to(dtype)
    healthy = dequantise(*quantise(values), dtype)
    values[200] = broken
    restored = dequantise(*quantise(values), dtype)
    assert restored[128:256].isnan().all()
    assert torch.equal(restored[:128], healthy[:128])
    assert torch.equal(restored[256:], healthy[256:])


@pytest.mark.parametrize(
    "largest", [torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny, 2.0**-149]
)
def test_extremes_keep_their_maximum(largest: float) -> None:
    values = torch.tensor([largest, -largest, 0.0])
    assert torch.equal(dequantise(*quantise(values), torch.float32), values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_block_of_zeros_is_zeros_and_takes_nothing_from_its_neighbours(dtype: torch.dtype) -> None:
    values = torch.cat([torch.randn(128), torch.zeros(64), -torch.zeros(64), torch.randn(100)]).to(dtype)
    codes, scales = quantise(values)
    assert scales[1] == 0
    assert torch.equal(
        codes.view(torch.uint8)[128:256], torch.tensor([0x00, 0x80], dtype=torch.uint8).repeat_interleave(64)
    )
    restored = dequantise(codes, scales, dtype)
    assert torch.equal(restored[128:256], values[128:256])
    assert torch.equal(restored.signbit(), values.signbit())
    alone = torch.cat([values[:128], values[256:]])
    assert torch.equal(torch.cat([restored[:128], restored[256:]]), dequantise(*quantise(alone), dtype))


def test_refuses_what_it_can_not_quantise() -> None:
    with pytest.raises(TypeError, match="float16"):
        quantise(torch.zeros(4, dtype=torch.float16))
    with pytest.raises(ValueError, match="1 x 200 codes and 1 x 2 scales"):
        quantise_into(torch.zeros(1, 200), torch.zeros(1, 200, dtype=torch.uint8), torch.zeros(1, 1))
