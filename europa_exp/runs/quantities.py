"""What the measured quantities mean: unit, which direction is better, how a run's value is taken, what its noise is.

A verdict is only as good as the noise that it is held against, and the noise differs: the time of a step scatters from step
to step; peak memory hardly does within a run, but does between runs; the loss at one seed repeats bit by bit on a CPU and
yet says little about the next seed. So each quantity names its noise here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Value(StrEnum):
    """How the value of a run comes from its logged steps."""

    median = "median"
    """Median over the steps after warm-up."""
    peak = "peak"
    """Largest over all steps, warm-up included: what has to fit."""
    total = "total"
    """Sum over all logged steps."""
    end = "end"
    """Median over the last tenth of the logged steps."""


class Noise(StrEnum):
    """What a difference is held against."""

    steps = "steps"
    """Spread over steps; over runs where there are repeats."""
    exact = "exact"
    """A count: without spread over steps every difference is real. With spread it is treated like ``steps``."""
    runs = "runs"
    """Only repeats show it."""
    seeds = "seeds"
    """Only repeats with different seeds show it; runs of one seed count once."""


@dataclass(frozen=True)
class Quantity:
    """One key of ``metrics.jsonl``. ``words`` are the verdicts for a value that is (higher, lower) than the baseline's."""

    key: str
    title: str
    unit: str = ""
    value: Value = Value.median
    noise: Noise = Noise.steps
    higher_is_better: bool | None = None
    words: tuple[str, str] = ("higher", "lower")


_FAST = ("faster", "slower")
_SLOW = ("slower", "faster")
_MORE = ("more", "less")

QUANTITIES: dict[str, Quantity] = {
    q.key: q
    for q in (
        Quantity(
            "throughput/tokens_per_second_per_gpu",
            "tok/s/gpu",
            "tokens/s",
            higher_is_better=True,
            words=_FAST,
        ),
        Quantity("throughput/tflops_per_gpu", "TFLOP/s/gpu", "TFLOP/s", higher_is_better=True, words=_FAST),
        Quantity("throughput/mfu", "MFU", "%", higher_is_better=True, words=_FAST),
        Quantity("time/step_s", "step s", "s", higher_is_better=False, words=_SLOW),
        Quantity("time/data_s", "data s", "s", higher_is_better=False, words=_SLOW),
        Quantity("memory/peak_active_gib", "peak active GiB", "GiB", Value.peak, Noise.runs, False, _MORE),
        Quantity(
            "memory/peak_reserved_gib", "peak reserved GiB", "GiB", Value.peak, Noise.runs, False, _MORE
        ),
        Quantity("memory/peak_host_gib", "peak host GiB", "GiB", Value.peak, Noise.runs, False, _MORE),
        Quantity("memory/allocator_retries", "alloc retries", "", Value.total, Noise.runs, False, _MORE),
        Quantity("memory/ranks_with_retries", "ranks w/ retries", "", Value.peak, Noise.runs, False, _MORE),
        Quantity(
            "comm/all_gather_sent_gib", "all-gather GiB sent", "GiB", Value.median, Noise.exact, False, _MORE
        ),
        Quantity("comm/reduce_sent_gib", "reduce GiB sent", "GiB", Value.median, Noise.exact, False, _MORE),
        Quantity(
            "comm/all_to_all_sent_gib", "token GiB sent", "GiB", Value.median, Noise.steps, False, _MORE
        ),
        Quantity("loss/global_avg", "end loss", "", Value.end, Noise.seeds, False),
        Quantity("loss/global_max", "end loss (max)", "", Value.end, Noise.seeds, False),
        Quantity("grad_norm", "grad norm", "", Value.median, Noise.seeds, None),
        Quantity("tokens_seen", "tokens", "", Value.peak, Noise.exact, None, _MORE),
    )
}

DEFAULT = (
    "throughput/tokens_per_second_per_gpu",
    "memory/peak_reserved_gib",
    "memory/peak_host_gib",
    "comm/all_gather_sent_gib",
    "comm/reduce_sent_gib",
    "loss/global_avg",
)
"""Shown when nobody asks for others, where at least one run has them. Host memory gives way to device memory."""


def quantity(key: str) -> Quantity:
    """The meaning of a key; one that is not known here is a median over steps without a better direction."""
    return QUANTITIES.get(key) or Quantity(key, key)
