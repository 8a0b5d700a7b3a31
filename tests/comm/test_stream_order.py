"""No buffer of a mechanism goes back to its stream's memory pool while another stream may still use it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import order_on_ranks
import pytest
import torch
from order_on_ranks import Seen
from ranks import run_ranks
from sharded_moe import Case

pytestmark = pytest.mark.slow

OFFLOAD = Case(offload=True)
LAGS = (1, 2, None)
EARLY = ("reduce_scatter", "all_reduce")


def each(case: Case, *several: dict[str, Any]) -> list[Seen]:
    return run_ranks(1, order_on_ranks.each, case, *several)[0]


@pytest.mark.parametrize(
    "case",
    [OFFLOAD, replace(OFFLOAD, reduce_dtype=torch.bfloat16), replace(OFFLOAD, ep=0)],
    ids=["copied", "cast and copied", "one group a layer"],
)
def test_reduced_gradients_are_let_go_when_their_copies_are_done(case: Case) -> None:
    for lag, seen in zip(LAGS, each(case, *({"lag": lag} for lag in LAGS)), strict=True):
        assert seen.hazards == [], seen.what
        # Three units a step: the lag lets go of all but `lag` of them, the end of the step of what is left, with a wait each.
        assert seen.waits.count(EARLY) == 2 * (1 + 3 - (lag or 3))


def test_without_a_reference_they_are_let_go_too_early() -> None:
    """What the reference is for; and that the recorder finds it."""
    plain, unkept = each(OFFLOAD, {"norm": False}, {"norm": False, "fault": "hook without reference"})
    assert plain.hazards == [], plain.what
    assert set(unkept.hazards) == {EARLY}
    # Each group takes the memory of the one before; the last of a step is safe, as FSDP waits for the all-reduce stream there.
    assert len(unkept.hazards) == 2 * (5 - 1)


def test_with_replicas_no_stream_waits_for_the_lag() -> None:
    several = [{"ranks": 8, "lag": lag} for lag in LAGS]
    for case in (replace(OFFLOAD, replicas=2), replace(OFFLOAD, replicas=2, reduce_dtype=torch.bfloat16)):
        for seen in each(case, *several):
            assert seen.hazards == [], seen.what
            assert EARLY not in seen.waits


@pytest.mark.parametrize("lag", LAGS)
def test_a_step_that_breaks_off_lets_go_of_nothing_too_early(lag: int | None) -> None:
    (seen,) = run_ranks(1, order_on_ranks.broken_off, OFFLOAD, lag)
    assert seen.hazards == [], seen.what
    assert EARLY in seen.waits


@pytest.mark.parametrize("case", [Case(), OFFLOAD], ids=["device", "offload"])
def test_the_receive_buffer_is_let_go_when_the_compute_stream_has_waited(case: Case) -> None:
    receive = {"applied": ("a2a, receive on compute stream",)}
    faulty = {**receive, "norm": False, "fault": "receive buffer freed after the call"}
    *good, freed = each(case, receive, {**receive, "lag": 1}, {"applied": ("a2a",)}, faulty)
    for seen in good:
        assert seen.hazards == [], seen.what
    assert set(freed.hazards) == {("compute", "reduce_scatter")}


@pytest.mark.parametrize("case", [Case(), OFFLOAD], ids=["device", "offload"])
def test_the_message_of_an_fp8_gather_stays_on_one_stream(case: Case) -> None:
    sync, faulty, asynchronous = each(
        case,
        {"applied": ("fp8",)},
        {"applied": ("fp8",), "norm": False, "fault": "message of the compute stream"},
        {"applied": ("fp8", "gather on compute stream")},
    )
    assert sync.hazards == [], sync.what
    assert asynchronous.hazards == [], asynchronous.what
    assert set(faulty.hazards) == {("compute", "all_gather")}
