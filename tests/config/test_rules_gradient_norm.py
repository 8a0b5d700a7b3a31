"""The rule of the gradient norm: what it refuses and what it leaves alone."""

from __future__ import annotations

import pytest

from europa_exp.config.checks import check


def about_the_lag(cfg) -> list:
    return [problem for problem in check(cfg) if problem.field == "comm.gradient_release_lag"]


def test_a_lag_without_the_norm_in_backward_is_refused_and_both_ways_out_work(make) -> None:
    (problem,) = about_the_lag(make("comm.gradient_release_lag=2"))
    assert str(problem) == (
        "comm.gradient_release_lag=2: has no effect with optimizer.grad_norm=after_backward, which keeps no reduced gradient "
        "for a norm. Set optimizer.grad_norm=in_backward, or comm.gradient_release_lag=null."
    )
    assert not about_the_lag(make("comm.gradient_release_lag=2", "optimizer.grad_norm=in_backward"))
    assert not about_the_lag(make("comm.gradient_release_lag=null"))


@pytest.mark.parametrize(
    "override", ["optimizer.grad_norm=after_backward", "optimizer.grad_norm=in_backward"]
)
def test_without_a_lag_either_norm_will_do(make, override: str) -> None:
    assert not about_the_lag(make(override))


def test_a_lag_out_of_range_is_told_once(make) -> None:
    (problem,) = about_the_lag(make("comm.gradient_release_lag=0"))
    assert "[1, inf)" in str(problem) or "at least 1" in str(problem)
