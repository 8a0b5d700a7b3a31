"""The FP8 all-gather of expert weights on real gloo ranks."""

from __future__ import annotations

from dataclasses import replace

import fp8_on_ranks
import numpy as np
import pytest
import torch
from ranks import run_ranks
from sharded_moe import Case
from torch import nn

from europa_exp.comm.fp8_all_gather import WireLayout, apply_fp8_all_gather
from europa_exp.comm.fp8_quant import dequantise, quantise
from europa_exp.comm.fsdp_groups import Segment

UNEVEN = {"width": 20, "hidden": 36, "experts": 6}  # 3 experts a rank on 2 shards: padded; no multiple of 128

CASES = {
    "plain": (4, Case()),
    "async": (4, Case(unshard_async=True)),
    "offload": (4, Case(offload=True)),
    "offload, async": (4, Case(offload=True, unshard_async=True)),
    "other dimension": (4, Case(expert_dim=1)),
    "uneven": (4, Case(**UNEVEN)),
    "uneven, async": (4, Case(**UNEVEN, unshard_async=True)),
    "one shard": (2, Case(ep=2)),
    "experts in the dense group": (2, Case(ep=0)),
    "experts in the dense group, uneven": (4, Case(ep=0, **UNEVEN)),
    "experts in the dense group, other dimension": (2, Case(ep=0, expert_dim=1)),
    "fp32 shards": (4, Case(param_dtype=None)),
    "fp32 shards, uneven": (4, Case(**UNEVEN, param_dtype=None)),
    "replicas": (4, Case(ep=1, replicas=2)),
    "kept after forward": (4, Case(reshard=False)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_experts_are_the_quantised_master_and_the_rest_is_exact(name: str) -> None:
    ranks, case = CASES[name]
    for seen in run_ranks(ranks, fp8_on_ranks.weights_in_use, case):
        assert seen["changed"] == seen["again"] == 2  # one group a layer
        assert seen["comms"].count(("dense", False)) == (1 if case.ep == 0 else 3)
        assert seen["comms"].count(("mixed" if case.ep == 0 else "expert", True)) == 2
        # 2 layers, 2 steps, forward and backward; two expert weights each
        assert seen["expert"] == [True] * 16
        assert seen["dense"] == [True] * 8
        assert seen["losses"][0] == seen["losses"][1]
        assert seen["grad_dtypes"] == seen["state_dtypes"] == {"torch.float32"}
        for parameter, grad in seen["grads"].items():
            assert np.isfinite(grad).all(), parameter
            assert not grad.size or np.abs(grad).max() > 0, parameter


@pytest.mark.slow
@pytest.mark.parametrize("base", [Case(), Case(**UNEVEN)], ids=["even", "uneven"])
def test_asynchronous_and_offloaded_gathers_compute_the_same(base: Case) -> None:
    reference = run_ranks(4, fp8_on_ranks.weights_in_use, base)
    for change in ({"unshard_async": True}, {"offload": True}):
        for other, seen in zip(run_ranks(4, fp8_on_ranks.weights_in_use, replace(base, **change)), reference):
            assert other["losses"] == seen["losses"]
            for parameter, grad in seen["grads"].items():
                np.testing.assert_array_equal(other["grads"][parameter], grad)


@pytest.mark.slow
def test_training_stays_close_to_bf16_and_is_not_the_same() -> None:
    fp8, bf16 = (run_ranks(4, fp8_on_ranks.losses_after_steps, Case(), fp8, 10) for fp8 in (True, False))
    for ours, theirs in zip(fp8, bf16):
        assert theirs[-1] < 0.9 * theirs[0]
        assert ours != theirs
        np.testing.assert_allclose(ours, theirs, rtol=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("unshard_async", [False, True])
def test_a_broken_weight_is_seen_by_all_ranks_that_hold_its_expert(value: float, unshard_async: bool) -> None:
    case = Case(unshard_async=unshard_async)
    seen = run_ranks(4, fp8_on_ranks.step_with_a_broken_weight, case, value)
    # Rank 0's shard is gathered by the ranks with the same experts: every second one.
    assert [rank["nan_weights"] for rank in seen] == [128, 0, 128, 0]
    assert [rank["finite"] for rank in seen] == [False, True, False, True]


def test_a_model_without_sharded_experts_is_refused() -> None:
    with pytest.raises(ValueError, match=r"w1_EFD.*comm=bf16"):
        apply_fp8_all_gather(nn.Linear(4, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_end_with_their_parameter_and_plain_values_are_exact(dtype: torch.dtype) -> None:
    segments = (
        Segment(100, True),
        Segment(300, True),
        Segment(77, False),
        Segment(256, True),
        Segment(130, True),
    )
    layout = WireLayout.of((*segments, Segment(0, True)), dtype.itemsize)
    shards = torch.randn(3, layout.numel).to(dtype)
    shards[:, :100] *= 1e4  # would swamp the neighbour's first values in a common block
    messages = torch.full((3, layout.nbytes), 0xAA, dtype=torch.uint8)
    layout.pack(shards, messages)
    restored = torch.empty_like(shards)
    layout.unpack(messages, restored)
    start = 0
    for segment in segments:
        part = slice(start, start + segment.numel)
        start += segment.numel
        for row, ours in zip(shards, restored):
            expected = dequantise(*quantise(row[part]), dtype) if segment.expert else row[part]
            assert torch.equal(ours[part], expected)
    quantised = 100 + 300 + 256 + 130
    assert layout.nbytes % 16 == 0
    assert layout.nbytes <= quantised + 4 * 8 + 77 * dtype.itemsize + 16 * 9


def test_a_message_of_whole_blocks_has_no_overhead() -> None:
    layout = WireLayout.of((Segment(4096, True), Segment(2048, True), Segment(128 * 4, True)), 2)
    assert layout.nbytes == layout.numel * 1.03125
    assert len(layout._runs) == 1  # one kernel for all
