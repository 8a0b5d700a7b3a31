"""Gradients travel in bf16 only where they are bf16."""

from __future__ import annotations

import pytest

from europa_exp.config.checks import check
from europa_exp.config.schema import GradientReduce, Precision


@pytest.mark.parametrize("gather", ["bf16", "fp8"])
def test_fp32_gradients_are_not_rounded_on_the_way(make, gather):
    (problem,) = check(make(f"comm={gather}_a2a", "training.param_precision=float32"))
    assert str(problem) == (
        "comm.gradient_reduce=bf16_all_to_all: training.param_precision=float32 gives float32 gradients, and bf16 would "
        "round them before the sum. Set training.param_precision=bfloat16, or comm.gradient_reduce=reduce_scatter "
        f"(comm={gather})."
    )


@pytest.mark.parametrize("reduce", GradientReduce)
@pytest.mark.parametrize("precision", Precision)
def test_nothing_else_is_refused_and_the_ways_out_lead_out(make, reduce, precision):
    problems = check(
        make(f"comm.gradient_reduce={reduce.value}", f"training.param_precision={precision.value}")
    )
    refused = reduce is not GradientReduce.reduce_scatter and precision is Precision.float32
    assert [p.field for p in problems] == (["comm.gradient_reduce"] if refused else [])


def test_a_field_with_a_problem_of_its_own_gives_one_message(make):
    cfg = make("comm=bf16_a2a")
    cfg.training.param_precision = "float16"
    assert [p.field for p in check(cfg)] == ["training.param_precision"]
