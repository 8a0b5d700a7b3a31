"""The rule of the gradient norm."""

from __future__ import annotations

from collections.abc import Iterator

from europa_exp.config.errors import Problem
from europa_exp.config.rules import reads
from europa_exp.config.schema import Config, GradNorm


@reads("comm.gradient_release_lag", "optimizer.grad_norm")
def release_lag(cfg: Config) -> Iterator[Problem]:
    """Only the norm in backward keeps reduced gradients, so only it can release them."""
    lag, norm = cfg.comm.gradient_release_lag, cfg.optimizer.grad_norm
    if lag is not None and norm is not GradNorm.in_backward:
        yield Problem(
            "comm.gradient_release_lag",
            lag,
            f"has no effect with optimizer.grad_norm={norm.name}, which keeps no reduced gradient for a norm",
            "Set optimizer.grad_norm=in_backward, or comm.gradient_release_lag=null",
        )


RULES = [release_lag]
