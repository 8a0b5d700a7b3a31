"""Rules of gradients: what they can travel in without losing digits."""

from __future__ import annotations

from collections.abc import Iterator

from europa_exp.config.errors import Problem
from europa_exp.config.rules import reads
from europa_exp.config.schema import Config, Precision


@reads("comm", "training.param_precision")
def carried_in_bf16(cfg: Config) -> Iterator[Problem]:
    """bf16 carries gradients that are bf16 already, which is what parameters in bf16 have."""
    reduce, precision = cfg.comm.gradient_reduce, cfg.training.param_precision
    if reduce.by_all_to_all and precision is not Precision.bfloat16:
        yield Problem(
            "comm.gradient_reduce",
            reduce,
            f"training.param_precision={precision.value} gives {precision.value} gradients, and bf16 would round them "
            "before the sum",
            "Set training.param_precision=bfloat16, or comm.gradient_reduce=reduce_scatter "
            f"(comm={cfg.comm.expert_all_gather.value})",
        )


RULES = [carried_in_bf16]
