"""Holds the Triton kernels to the eager pair and to torch's own casts, bit for bit.

A program of its own, as Triton decides at import: with TRITON_INTERPRET=1 it needs no GPU, without it a CUDA device.
"""

import os

import torch

from europa_exp.comm import fp8_format, fp8_quant, fp8_triton

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
torch.manual_seed(0)


def bits(tensor):
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


def compare(values, dtypes=fp8_format.DTYPES):
    """Both pairs on `values` [rows, numel]: codes, scales, and values in each of `dtypes`."""
    rows, numel = values.shape
    results = []
    for quantise, dequantise, device in (
        (fp8_quant.quantise_eager, fp8_quant.dequantise_eager, "cpu"),
        (fp8_triton.quantise_triton, fp8_triton.dequantise_triton, DEVICE),
    ):
        codes = torch.full((rows, numel), 0xAA, dtype=torch.uint8, device=device)
        scales = torch.full((rows, fp8_format.block_count(numel)), -1.0, device=device)
        quantise(values.to(device), codes, scales)
        outputs = [torch.empty(rows, numel, dtype=dtype, device=device) for dtype in dtypes]
        for output in outputs:
            dequantise(codes, scales, output)
        results.append([tensor.cpu() for tensor in (codes, scales, *outputs)])
    for name, eager, kernel in zip(("codes", "scales", *dtypes), *results, strict=True):
        same = bits(eager) == bits(kernel)
        assert same.all(), (
            f"{name}: {(~same).sum()} of {same.numel()} differ on {values.dtype} {tuple(values.shape)}"
        )
    return results[1]


def with_maximum(values, maximum=448.0):
    """Blocks of 127 values and the block maximum, so that `maximum` = 448 leaves the values as they are."""
    short = -len(values) % 127
    rows = torch.cat([values, values.new_zeros(short)]).view(-1, 127)
    return torch.cat([rows, rows.new_full((rows.size(0), 1), maximum)], dim=1).view(1, -1)


# 1. Every E4M3 value, every tie between two neighbours and the fp32 numbers around both: codes equal torch's own cast.
grid = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
ties = (grid[1:] + grid[:-1]) / 2
points = torch.cat([grid, ties])
points = torch.cat([points, points.nextafter(torch.tensor(1e9)), points[1:].nextafter(torch.tensor(0.0))])
points = points[points <= 448]
points = torch.cat([points, -points])
blocks = with_maximum(points)
codes = compare(blocks)[0]
scaled = blocks / 448 * 448  # what the rule casts when the maximum is 448
expected = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
assert torch.equal(codes, expected), "kernel codes differ from torch's cast"

# 2. The top 16 bits of every finite fp32 up to 448 with varied low bits: the whole range of exponents, denormals included.
high = torch.arange(0x43E0, dtype=torch.int32) << 16
for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
    values = (high | low).view(torch.float32)
    blocks = with_maximum(values)
    codes = compare(blocks)[0]
    assert torch.equal(codes, (blocks / 448 * 448).to(torch.float8_e4m3fn).view(torch.uint8))

# 3. Every bf16 number there is, NaN and infinities too, as blocks of neighbours and in random order.
every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
compare(every.view(1, -1))
compare(every[torch.randperm(every.numel())].view(1, -1))

# 4. Random values of random magnitudes, rows, and lengths that are no multiple of 128 (strided rows as in a message).
for rows, numel in ((1, 1), (1, 127), (3, 129), (2, 4096), (4, 5000)):
    for dtype in fp8_format.DTYPES:
        wide = torch.randn(rows, numel + 24) * torch.exp(torch.empty(rows, numel + 24).uniform_(-80, 80))
        compare(wide.to(dtype)[:, 8 : 8 + numel])
        compare(torch.randn(rows, numel).to(dtype))

# 5. All bit patterns: random fp32 bits, one block maximum a block at every exponent, extremes.
compare(torch.randint(-(2**31), 2**31 - 1, (4, 32768)).to(torch.int32).view(torch.float32))
compare(
    torch.cat(
        [with_maximum(torch.randn(127) * 2.0**exponent, 2.0**exponent) for exponent in range(-149, 128)]
    )
)
extremes = torch.tensor(
    [0.0, -0.0, 2**-149, -(2**-149), 2**-126, 3.4028234663852886e38, float("inf"), float("nan")]
)
for value in extremes:
    compare(value.repeat(1, 130))
    compare(torch.cat([value.repeat(1, 3), torch.ones(1, 200)], dim=1))

# 6. Every code with every kind of scale.
every_code = torch.arange(256, dtype=torch.uint8)
every_code = every_code[(every_code & 0x7F) != 0x7F].repeat(128)[None]
scales = (
    torch.randint(0, 0x7F800000, (1, fp8_format.block_count(every_code.numel())))
    .to(torch.int32)
    .view(torch.float32)
)
for dtype in fp8_format.DTYPES:
    eager = torch.empty(every_code.shape, dtype=dtype)
    kernel = torch.empty(every_code.shape, dtype=dtype, device=DEVICE)
    fp8_quant.dequantise_eager(every_code, scales, eager)
    fp8_triton.dequantise_triton(every_code.to(DEVICE), scales.to(DEVICE), kernel)
    assert torch.equal(bits(eager), bits(kernel.cpu())), dtype

# 7. A sample of half a million fp32 values against the cast.
values = torch.cat([torch.randn(127 * 4096) * 10, torch.rand(127 * 256) * 2**-6]).clamp(-448, 448)
blocks = with_maximum(values)
codes = compare(blocks, dtypes=(torch.bfloat16,))[0]
assert torch.equal(codes, (blocks / 448 * 448).to(torch.float8_e4m3fn).view(torch.uint8))
print(f"bitwise equal on {DEVICE}")
