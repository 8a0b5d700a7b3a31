"""Gradients in bf16 with an fp32 sum, on real gloo ranks against FSDP's own fp32 reduce-scatter of the same gradients."""

from __future__ import annotations

from functools import partial

import a2a_on_ranks
import pytest
import torch
from ranks import run_ranks
from sharded_moe import Case
from torch import nn

from europa_exp.comm.bf16_all_to_all import apply_bf16_all_to_all, sum_slices

UNEVEN = {"width": 20, "hidden": 36, "experts": 6}  # 3 experts a rank on 2 shards, 20 rows on 3 or 4: padded

# ranks, model, micro-batches, options
CASES = {
    "two meshes": (4, Case(), 1, {}),
    "receive on compute stream": (4, Case(), 1, {"receive_on_compute_stream": True}),
    "two micro-batches": (4, Case(), 2, {}),
    "offload": (4, Case(offload=True), 1, {}),
    "offload, two micro-batches": (4, Case(offload=True), 2, {"receive_on_compute_stream": True}),
    "other dimension": (4, Case(expert_dim=1), 1, {}),
    "uneven": (4, Case(**UNEVEN), 1, {"receive_on_compute_stream": True}),
    "one mesh of three, uneven": (3, Case(ep=0, **UNEVEN), 1, {}),
    "two ranks": (2, Case(ep=0), 1, {}),
    "experts not sharded": (2, Case(ep=2), 1, {"receive_on_compute_stream": True}),
    "replicas": (4, Case(ep=1, replicas=2), 1, {}),
    "replicas, two micro-batches": (4, Case(ep=1, replicas=2), 2, {}),
    "replicas of experts not sharded": (4, Case(ep=2, replicas=2), 1, {}),
    "replicas of expert shards": (8, Case(ep=2, replicas=2), 1, {}),
    "empty shards": (4, Case(width=3, experts=2), 1, {"receive_on_compute_stream": True}),
    "kept after forward": (4, Case(reshard=False), 1, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_same_digits_as_the_fp32_reduce_scatter_for_half_the_bytes(name: str) -> None:
    ranks, case, micro_batches, options = CASES[name]
    one_shard = ranks // case.replicas == case.ep
    for kinds in run_ranks(
        ranks, partial(a2a_on_ranks.compared_on_both_kinds, **options), case, micro_batches
    ):
        wide, integers = kinds["wide"], kinds["integers"]
        assert integers["a2a"]["different"] == []
        assert wide["a2a"]["beyond"] == 0
        assert wide["bf16"]["beyond"] > 0, "values that any sum gets right prove nothing"

        ours, theirs = wide["a2a"], wide["fp32"]
        all_reduced = ours["calls"].pop(("all_reduce", "float32"), 0)
        assert all_reduced == theirs["calls"].pop(("all_reduce", "float32"), 0)
        assert (all_reduced > 0) == (case.replicas > 1)
        (ours_call, ours_bytes), (theirs_call, theirs_bytes) = (
            ours["calls"].popitem(),
            theirs["calls"].popitem(),
        )
        assert ours["calls"] == theirs["calls"] == {}
        assert ours_call == ("all_to_all_single", "bfloat16")
        assert theirs_call == ("reduce_scatter_single", "float32")
        assert ours_bytes * 2 == theirs_bytes > 0

        # every group: the gradient buffer in bf16, the result in fp32; a group of one rank is copied by FSDP itself
        assert len(ours["buffers"]) == (3 if case.ep == 0 else 5)
        for mine, other, reduced in zip(ours["buffers"], theirs["buffers"], ours["reduced"], strict=True):
            assert len(mine) == 2 * micro_batches
            assert [numel for _, numel in mine] == [numel for _, numel in other]
            assert [dtype for dtype, _ in mine] == [torch.bfloat16, torch.float32] * micro_batches
            assert {dtype for dtype, _ in other} == {torch.float32}
            assert reduced in ([], [(torch.bfloat16, torch.float32)] * micro_batches)
        assert ours["reduced"].count([]) == (2 if one_shard else 0)

        for watched in (ours, integers["a2a"]):
            check_receive_buffers(watched, options)


def check_receive_buffers(seen: dict, options: dict) -> None:
    """The receive buffer from the compute stream lives as long as the gradient buffer: after the call, not after backward."""
    assert seen["received_in_it"] == {bool(options)}
    if not options:
        assert not any(seen["alive"])
        return
    assert {
        on_reduce_stream for group in seen["received_on_reduce_stream"] for on_reduce_stream in group
    } == {False}
    alive = [pair for group in seen["alive"] for pair in group]
    assert set(alive) == {(True, True), (False, False)}
    assert all(pairs[-1] == (False, False) for pairs in seen["alive"] if pairs)


@pytest.mark.slow
@pytest.mark.parametrize("case", [Case(), Case(ep=1, replicas=2)], ids=["shards", "replicas"])
def test_counted_as_gradients_that_an_all_to_all_carries(case: Case) -> None:
    for seen in run_ranks(4, a2a_on_ranks.compared, case, "integers"):
        theirs, ours = seen["fp32"]["rows"], seen["a2a"]["rows"]
        expected = {
            ("all_to_all", role, "bfloat16", ranks) if collective == "reduce_scatter" else (collective, role, dtype, ranks):
            handed // 2 if collective == "reduce_scatter" else handed
            for (collective, role, dtype, ranks), handed in theirs.items()
        }  # fmt: skip
        assert ours == expected
        assert {role for _, role, *_ in ours} == {"dense", "expert"}
        assert "comm/all_to_all_sent_gib" not in seen["a2a"]["metrics"], "reserved for routed tokens"
        passes = {"all_to_all": 1, "all_reduce": 2}
        sent = sum(
            handed * passes[collective] * (ranks - 1) / ranks
            for (collective, _, _, ranks), handed in ours.items()
        )
        assert seen["a2a"]["metrics"]["comm/reduce_sent_gib"] * 2**30 == pytest.approx(sent)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "case"),
    [(4, Case()), (2, Case(ep=2)), (1, Case(ep=0))],
    ids=["4 ranks", "one shard", "one rank"],
)
def test_goes_on_after_an_exception_between_the_two_buffers(ranks: int, case: Case) -> None:
    for options in ({}, {"receive_on_compute_stream": True}):
        assert run_ranks(ranks, partial(a2a_on_ranks.after_an_exception, **options), case) == [[]] * ranks


@pytest.mark.slow
@pytest.mark.parametrize("factor", [None, 3.0], ids=["mean", "by three"])
def test_division_applies_to_the_fp32_sum(factor: float | None) -> None:
    assert run_ranks(4, a2a_on_ranks.divided, Case(), factor) == [[]] * 4


@pytest.mark.slow
@pytest.mark.parametrize("keep", [(), ("head",), ("layers.0", "head"), ("layers.1.dense",)], ids=str)
def test_kept_modules_stay_in_fp32_and_applying_twice_changes_nothing(keep: tuple[str, ...]) -> None:
    every = [
        ("", "dense"),
        ("layers.0", "dense"),
        ("layers.0", "expert"),
        ("layers.1", "dense"),
        ("layers.1", "expert"),
    ]
    stays = {
        "head": [("", "dense")],
        "layers.0": [("layers.0", "dense"), ("layers.0", "expert")],
        "layers.1.dense": [("layers.1", "dense")],
    }
    kept = [group for name in keep for group in stays[name]]
    for seen in run_ranks(2, a2a_on_ranks.installed, Case(ep=2), keep):
        assert seen["a2a"] == [group for group in every if group not in kept]
        assert seen["changed"] == seen["again"] == len(seen["a2a"])
        assert seen["dtypes"] == ["torch.float32" if group in kept else "None" for group in every]
        # FSDP sets this for a module, with all of its groups.
        modules = {name for name, _ in seen["a2a"]}
        assert seen["forced"] == [name in modules for name, _ in every]


@pytest.mark.slow
def test_experts_alone_are_changed_where_they_are_groups_of_their_own() -> None:
    for seen in run_ranks(2, partial(a2a_on_ranks.installed, experts_only=True), Case(ep=2), ()):
        assert seen["a2a"] == [("layers.0", "expert"), ("layers.1", "expert")]
    for seen in run_ranks(2, partial(a2a_on_ranks.installed, experts_only=True), Case(ep=0), ()):
        assert seen["a2a"] == [("layers.0", "mixed"), ("layers.1", "mixed")]
        assert seen["dtypes"] == ["torch.float32", "None", "None"]


@pytest.mark.slow
def test_can_be_applied_after_a_step() -> None:
    assert run_ranks(2, a2a_on_ranks.applied_after_a_step, Case(ep=2)) == [[]] * 2


@pytest.mark.slow
def test_refuses_what_would_lose_digits() -> None:
    (messages,) = run_ranks(1, a2a_on_ranks.refusals)
    assert "torch.float32 gradients of" in messages["fp32"]
    assert "training.param_precision=bfloat16, or comm=bf16" in messages["fp32"]
    assert "leave out layers.7," in messages["unknown"]
    assert "one rank (layers.1) would divide bf16 gradients by 2.0" in messages["divided"]
    assert messages["no experts"].endswith("use bf16_all_to_all")
    assert messages["average"].startswith("ValueError: comm.gradient_reduce: bf16_all_to_all sums")
    assert messages["fp32 gradients"].startswith(
        "TypeError: comm.gradient_reduce: bf16_all_to_all carries bfloat16"
    )


def test_a_model_that_is_not_sharded_is_refused() -> None:
    with pytest.raises(ValueError, match=r"sharded with FSDP.*comm=bf16"):
        apply_bf16_all_to_all(nn.Linear(4, 4))


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 33, 384])
@pytest.mark.parametrize("numel", [0, 1, 1000, 2**14, 2**14 + 1])
def test_sum_of_slices_keeps_the_bound(ranks: int, numel: int) -> None:
    if ranks * numel > 2**22:
        ranks = 64
    device = "cuda" if torch.cuda.is_available() else "cpu"
    scale = torch.empty(numel).uniform_(-20, 20).exp()
    slices = (torch.randn(ranks, numel) * scale).bfloat16()
    output = torch.full((numel,), torch.nan, device=device)
    sum_slices(slices.to(device), output)
    exact = slices.double().sum(0)
    bound = (ranks - 1) * 2.0**-24 * slices.double().abs().sum(0)
    assert ((output.cpu().double() - exact).abs() <= bound * 1.001).all()
    again = torch.empty_like(output)
    sum_slices(slices.to(device), again)
    assert torch.equal(output, again)


def test_sum_of_slices_shows_what_is_not_finite() -> None:
    slices = torch.ones(3, 4, dtype=torch.bfloat16)
    slices[1, 0], slices[0, 1], slices[2, 2], slices[0, 2] = torch.nan, torch.inf, torch.inf, -torch.inf
    output = torch.empty(4)
    sum_slices(slices, output)
    torch.testing.assert_close(output, torch.tensor([torch.nan, torch.inf, torch.nan, 3.0]), equal_nan=True)


@pytest.mark.slow
def test_sum_of_slices_makes_no_fp32_copy_of_them() -> None:
    ((grown, copy),) = run_ranks(1, a2a_on_ranks.memory_of_a_sum, 64, 2**20)
    assert grown < copy / 8


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_sum_of_slices_on_cuda_is_one_kernel_without_a_copy() -> None:
    slices = torch.ones(384, 2**16, dtype=torch.bfloat16, device="cuda")
    output = torch.empty(2**16, device="cuda")
    sum_slices(slices, output)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    sum_slices(slices, output)
    assert torch.cuda.max_memory_allocated() == before
    assert (output == 384).all()
