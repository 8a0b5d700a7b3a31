"""The FP8 all-gather of expert weights on real gloo ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import fp8_on_ranks
import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_ranks
from sharded_moe import Case
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather

from europa_exp.comm.fp8_all_gather import FP8AllGather, WireLayout, apply_fp8_all_gather
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
    "replicas of expert shards": (8, Case(ep=2, replicas=2)),
    "empty shards": (4, Case(width=3, experts=2)),
    "empty shards, async": (4, Case(width=3, experts=2, unshard_async=True)),
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


class Arriving(dist.Work):
    """A gather whose bytes arrive when somebody waits for them."""

    def __init__(self, arrive: Callable[[], Any]) -> None:
        super().__init__()
        self.arrive = arrive
        self.waits: list[timedelta | None] = []

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.waits.append(timeout)
        self.arrive()
        return True


class Wire(AllGather):
    """Two ranks of which this one is the first and the second holds the same; tells when a message's memory is gone."""

    rank, size = staticmethod(lambda: 0), staticmethod(lambda: 2)

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        memory = np.full(size, 0xAA, np.uint8)
        self.memory = weakref.ref(memory)
        return torch.from_numpy(memory)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> Any:
        def arrive() -> None:
            first, second = output_tensor.view(2, -1)
            assert first.data_ptr() == input_tensor.data_ptr(), "gathered in place: no copy of the message"
            second.copy_(first)

        self.work = Arriving(arrive)
        return self.work if async_op else arrive()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("timeout", [None, timedelta(seconds=5)])
def test_an_asynchronous_gather_dequantises_when_it_is_waited_for_and_frees_its_message(
    dtype: torch.dtype, timeout: timedelta | None
) -> None:
    wire, segments = Wire(), (Segment(200, True), Segment(56, False))
    shard = torch.randn(256).to(dtype)
    output = torch.full((512,), torch.nan, dtype=dtype)
    work = FP8AllGather(lambda: segments, wire)(output, shard, wire, async_op=True)
    assert isinstance(work, dist.Work), "FSDP waits for nothing else"
    assert output.isnan().all()
    assert not work.is_completed()
    assert wire.memory() is not None

    assert work.wait() if timeout is None else work.wait(timeout)
    expected = torch.cat([dequantise(*quantise(shard[:200]), dtype), shard[200:]])
    assert torch.equal(output, expected.repeat(2))
    assert work.is_completed()
    wire.work.arrive = None
    assert wire.memory() is None, "the message stays although its values are there"

    output.zero_()
    assert work.wait()
    assert wire.work.waits == [timeout]
    assert not output.any(), "a second wait dequantised again"


def test_a_synchronous_gather_leaves_nothing_but_its_output() -> None:
    wire = Wire()
    output = torch.empty(512)
    assert FP8AllGather(lambda: (Segment(256, True),), wire)(output, torch.randn(256), wire) is None
    assert output.isfinite().all()
    wire.work.arrive = None
    assert wire.memory() is None


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 400), st.booleans()), min_size=1, max_size=6),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(1, 3),
    st.integers(0, 2**32),
)
def test_any_group_of_parameters_comes_back(
    sizes: list[tuple[int, bool]], dtype: torch.dtype, ranks: int, seed: int
) -> None:
    segments = tuple(Segment(numel, expert) for numel, expert in sizes)
    layout = WireLayout(segments, dtype.itemsize)
    torch.manual_seed(seed)
    # one magnitude a parameter, denormals to huge: a block over two of them would swamp the smaller one
    scales = [2.0 ** torch.randint(-140, 120, ()).item() for _ in segments]
    parts = [
        [(torch.randn(part.numel) * scale).to(dtype) for part, scale in zip(segments, scales)]
        for _ in range(ranks)
    ]
    shards = torch.stack([torch.cat(row) for row in parts])
    messages = torch.full((ranks, layout.nbytes), 0xAA, dtype=torch.uint8)
    layout.pack(shards, messages)
    restored = torch.full_like(shards, torch.nan)
    layout.unpack(messages, restored)
    for row, ours in zip(parts, restored):
        expected = [dequantise(*quantise(v), dtype) if part.expert else v for v, part in zip(row, segments)]
        assert torch.equal(ours, torch.cat(expected))


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
