"""Speed of the FP8 block quantisation against a plain copy of the same bytes: `python benchmarks/fp8_quantise.py`.

A kernel that only waits for memory runs at the speed of the copy. On CUDA this measures the Triton pair, on CPU the eager
pair (which makes several passes: it is there to be right). Columns: values a second (10^9), bytes read and written a second
(GB = 10^9), and the speed as a share of a copy that reads and writes as many bytes. Target on a GPU, each way and both: 80%
of the copy; a CPU has none.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from europa_exp.comm.fp8_format import block_count, wire_bytes
from europa_exp.comm.fp8_quant import dequantise_into, quantise_into


def seconds(run: Callable[[], object], device: str, repeats: int) -> float:
    """Median time of `run` after two warm-up calls."""
    times = []
    for repeat in range(repeats + 2):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        if repeat >= 2:
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"]
    )
    parser.add_argument("--values", type=int, help="values a call; default 2^24 on CPU, 2^30 on CUDA")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    numel = args.values or (2**30 if args.device == "cuda" else 2**24)

    codes = torch.empty(1, numel, dtype=torch.uint8, device=args.device)
    scales = torch.empty(1, block_count(numel), device=args.device)
    name = torch.cuda.get_device_name() if args.device == "cuda" else f"CPU, {args.threads} threads"
    print(f"{numel:,} values, {name}, median of {args.repeats}")
    print(f"{'':27} {'ms':>9} {'G values/s':>11} {'GB/s':>8} {'copy GB/s':>10} {'of copy':>8}")
    for dtype in (torch.bfloat16, torch.float32):
        values = torch.randn(1, numel, device=args.device).to(dtype)
        moved = numel * dtype.itemsize + wire_bytes(numel)
        source = torch.empty(moved // 2, dtype=torch.uint8, device=args.device).random_()
        target = torch.empty_like(source)
        copy = moved / seconds(lambda s=source, t=target: t.copy_(s), args.device, args.repeats) / 1e9
        label = str(dtype).removeprefix("torch.")
        both = 0.0
        for direction, run in (
            (f"{label} -> fp8", lambda v=values: quantise_into(v, codes, scales)),
            (f"fp8 -> {label}", lambda v=values: dequantise_into(codes, scales, v)),
        ):
            took = seconds(run, args.device, args.repeats)
            both += took
            row(direction, took, numel, moved, copy)
        row(f"{label} -> fp8 -> {label}", both, numel, 2 * moved, copy)
        del values, source, target
    if args.device == "cuda":
        print("target: 80% of the copy")


def row(what: str, took: float, numel: int, moved: int, copy: float) -> None:
    """Print one row: `numel` values and `moved` bytes in `took` seconds, beside a copy of `copy` GB a second."""
    speed = moved / took / 1e9
    print(
        f"{what:27} {took * 1e3:9.2f} {numel / took / 1e9:11.2f} {speed:8.1f} {copy:10.1f} {speed / copy:8.1%}"
    )


if __name__ == "__main__":
    main()
