"""The gradient norm in backward, against torchtitan's `clip_grad_norm_` of the same gradients."""

from __future__ import annotations

import math

import norm_on_ranks
import pytest
import torch
from norm_on_ranks import Step
from ranks import run_ranks
from sharded_moe import Case
from torch import nn

from europa_exp.comm.gradient_norm import GradientNorm, _Buffers

# ranks, model
CASES = {
    "expert parallel": (4, Case()),
    "one rank an expert shard": (4, Case(ep=4)),
    "one group": (4, Case(ep=0)),
    "along the second dimension": (4, Case(expert_dim=1)),
    "uneven": (4, Case(width=20, hidden=36, experts=6)),
    "empty shards": (4, Case(width=3, experts=2)),
    "replicas": (4, Case(ep=1, replicas=2)),
    "replicas of one shard": (4, Case(ep=2, replicas=2)),
    "replicas of expert shards": (8, Case(ep=2, replicas=2)),
}


def offloaded(case: Case) -> Case:
    return Case(**{**vars(case), "offload": True})


def agree(seen: norm_on_ranks.Seen) -> None:
    assert seen.ours == pytest.approx(seen.theirs, rel=1e-5)
    assert seen.theirs > norm_on_ranks.MAX_NORM
    assert seen.clipped
    assert seen.clipped_alike
    assert seen.our_collectives == 1


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "case"), CASES.values(), ids=CASES)
def test_equals_torchtitans_norm(ranks: int, case: Case) -> None:
    # The second step has other gradients, and the first one's must not be in its norm.
    several = [
        (which, (Step(micro_batches=n), Step(micro_batches=n, scale=0.5)))
        for which in (case, offloaded(case))
        for n in (1, 3)
    ]
    for seen in run_ranks(ranks, norm_on_ranks.runs, *several):
        for first, second in seen:
            agree(first)
            agree(second)
            assert second.ours < 0.9 * first.ours
        # A hook sees each reduced buffer where gradients go to the host and don't accumulate there. Elsewhere it would keep
        # those of all micro-batches.
        on_device, on_device_accumulated, on_host, on_host_accumulated = (first.alive for first, _ in seen)
        assert on_device == on_device_accumulated == on_host_accumulated == []
        assert len(on_host) == (3 if case.ep == 0 else 5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [Case(), Case(ep=0), Case(ep=1, replicas=2)], ids=["two groups", "one group", "replicas"]
)
def test_what_got_no_gradient_adds_nothing(case: Case) -> None:
    several = (Step(), Step(skipped_layers=(1,)), Step(only_dense=True), Step(skipped_layers=(0, 1)), Step())
    for runs in run_ranks(4, norm_on_ranks.runs, (case, several), (offloaded(case), several)):
        for seen in runs:
            for one in seen:
                agree(one)
            assert len({one.ours for one in seen[:4]}) == 4
            assert seen[4].ours == seen[0].ours


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [Case(), Case(ep=4), Case(ep=1, replicas=2)], ids=["shards", "one shard", "replicas"]
)
def test_gradients_that_fsdp_divides_after_the_hook(case: Case) -> None:
    several = [(offloaded(case), (Step(divide=divide),)) for divide in (1.0, None, 3.0)]
    for (undivided,), *divided in run_ranks(4, norm_on_ranks.runs, *several):
        for (one,) in divided:
            agree(one)
            assert one.ours < 0.7 * undivided.ours


@pytest.mark.slow
def test_accumulates_without_having_been_told() -> None:
    for seen in run_ranks(
        4, norm_on_ranks.steps, offloaded(Case()), Step(micro_batches=3, declared=False), Step()
    ):
        for one in seen:
            agree(one)


@pytest.mark.slow
@pytest.mark.parametrize("case", [Case(), offloaded(Case())], ids=["device", "host"])
def test_not_finite_where_torchtitans_is_not(case: Case) -> None:
    expected = [
        (Step(broken=math.nan), math.nan),
        (Step(broken=math.inf), math.nan),  # infinities of both signs meet in the sums of the layers below
        (Step(broken=1e30), math.inf),  # its square is beyond fp32
        (Step(broken=0.0, scale=0.0), 0.0),
    ]
    several = [step for step, _ in expected]
    for *broken, good in run_ranks(4, norm_on_ranks.steps, case, *several, Step()):
        for one, (_, norm) in zip(broken, expected):
            assert one.theirs == pytest.approx(norm, nan_ok=True)
            assert one.ours == pytest.approx(norm, nan_ok=True)
            assert one.clipped_alike
        agree(good)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lag", "alive"), [(1, [1, 2, 3, 2, 2]), (2, [1, 2, 3, 4, 3]), (None, [1, 2, 3, 4, 5])]
)
def test_reduced_gradients_are_kept_as_long_as_the_lag_says(lag: int | None, alive: list[int]) -> None:
    # Reduced in bf16 and handed on in fp32, so that the reduced buffer is not the gradient itself.
    case = offloaded(Case(reduce_dtype=torch.bfloat16))
    # Two groups of the last layer, the head, two groups of the first layer; a hook sees its own buffer, too.
    for seen in run_ranks(4, norm_on_ranks.steps, case, Step(lag=lag), Step()):
        for one in seen:
            agree(one)
            assert one.alive == alive
            assert one.alive_after == 0


def test_a_buffer_is_released_after_the_copies_that_follow_its_hook() -> None:
    """The reduce-scatter stream waits for an event that the all-reduce stream records after its last use of the buffer."""
    queue: list[str] = []

    class AllReduceStream:
        def record_event(self) -> int:
            queue.append("event")
            return len(queue)

    class ReduceStream:
        def wait_event(self, event: int) -> None:
            waited_for.append(queue[:event])

    for lag in (1, 2, 3):
        queue.clear()
        waited_for: list[list[str]] = []
        buffers = _Buffers(lag)
        for layer in "abcdef":
            for group in ("experts", "dense"):
                buffers.keep(torch.empty(1), layer, AllReduceStream(), ReduceStream())
                queue.extend([f"hook {layer} {group}", f"copy {layer} {group}"])
        assert len(waited_for) == 6 - lag
        for layer, following, before in zip("abcdef", "bcdef", waited_for):
            assert f"copy {layer} dense" in before
            assert f"hook {following} experts" not in before, "waits for a later layer for nothing"


@pytest.mark.slow
def test_a_step_that_breaks_off_leaves_nothing_behind() -> None:
    for seen in run_ranks(4, norm_on_ranks.a_step_that_raises, offloaded(Case(reduce_dtype=torch.bfloat16))):
        assert seen["raised"]
        assert seen["seen_before"] > 0
        assert seen["alive_after"] == 0
        agree(seen["good"])
        assert seen["good"].alive_after == 0


@pytest.mark.slow
def test_all_ranks_have_the_same_norm() -> None:
    assert len(set(run_ranks(4, norm_on_ranks.norms_of_all_ranks, Case(ep=2, replicas=2))[0])) == 1


@pytest.mark.slow
def test_refuses_a_parameter_that_is_not_sharded() -> None:
    for said in run_ranks(2, norm_on_ranks.refused, Case(ep=2)):
        assert "loose" in said
        assert "optimizer.grad_norm=after_backward" in said


def test_refuses_a_model_without_fsdp() -> None:
    with pytest.raises(ValueError, match="does not shard weight"):
        GradientNorm().install(nn.Linear(2, 2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "micro_batches", "has_effect"),
    [
        (offloaded(Case()), 1, True),
        (Case(), 1, False),
        (offloaded(Case()), 2, False),
        (offloaded(Case(ep=1, replicas=2)), 1, False),
    ],
    ids=["offload", "no offload", "accumulation", "replicas"],
)
def test_warns_of_a_lag_without_effect(case: Case, micro_batches: int, has_effect: bool) -> None:
    for warnings in run_ranks(4, norm_on_ranks.warnings_at_install, case, micro_batches):
        assert any("comm.gradient_release_lag" in text for text in warnings) != has_effect
