"""The count of bytes handed to collectives, against the calls of torch.distributed themselves."""

from __future__ import annotations

import fp8_on_ranks
import pytest
import torch
from ranks import run_ranks
from sharded_moe import Case
from torch import nn

from europa_exp.comm.accounting import Collective, CollectiveCounter, Kind, Traffic, step_metrics

EXPERT_VALUES = 2 * 2 * 8 * 128 * 64  # layers, weights, experts, hidden, width
DENSE_VALUES = 2 * 64 * 64 + 8 * 64


def rows_total(rows: dict, *collectives: str) -> int:
    return sum(handed for (collective, *_), (_, handed, _) in rows.items() if collective in collectives)


@pytest.mark.slow
@pytest.mark.parametrize("count_first", [False, True])
def test_fp8_halves_the_expert_bytes_and_nothing_else(count_first: bool) -> None:
    bf16 = run_ranks(4, fp8_on_ranks.counted, Case(), False, count_first)
    fp8 = run_ranks(4, fp8_on_ranks.counted, Case(), True, count_first)
    for plain, ours in zip(bf16, fp8):
        expert_bf16 = plain["rows"].pop(("all_gather", "expert", "bfloat16", 2))
        expert_fp8 = ours["rows"].pop(("all_gather", "expert", "uint8", 2))
        # forward and backward of two layers, a quarter of the experts each
        assert expert_bf16[:2] == (4, 2 * EXPERT_VALUES // 4 * 2)
        assert expert_fp8[:2] == (4, 2 * EXPERT_VALUES // 4 * 1.03125)
        assert expert_fp8[1] <= 0.52 * expert_bf16[1]
        assert ours["rows"] == plain["rows"]
        assert set(ours["rows"]) == {
            ("all_gather", "dense", "bfloat16", 4),
            ("reduce_scatter", "dense", "float32", 4),
            ("reduce_scatter", "expert", "float32", 2),
        }
        assert ours["rows"]["reduce_scatter", "expert", "float32", 2][1] == EXPERT_VALUES // 2 * 4
        assert ours["rows"]["reduce_scatter", "dense", "float32", 4][1] == DENSE_VALUES * 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "case", "fp8"),
    [
        (4, Case(), True),
        (4, Case(unshard_async=True, offload=True), True),
        (4, Case(width=20, hidden=36, experts=6), True),
        (2, Case(ep=0), True),
        (2, Case(ep=2), False),
        (4, Case(ep=1, replicas=2), True),
        (4, Case(ep=2, replicas=2), True),
    ],
    ids=["expert parallel", "async", "uneven", "one group", "one shard", "replicas", "replicas of one shard"],
)
def test_counts_what_the_collectives_were_given(ranks: int, case: Case, fp8: bool) -> None:
    for seen in run_ranks(ranks, fp8_on_ranks.counted, case, fp8):
        rows, calls = seen["rows"], seen["calls"]
        assert rows_total(rows, "all_gather") == calls["all_gather_single"] > 0
        assert rows_total(rows, "reduce_scatter") == calls["reduce_scatter_single"] > 0
        assert rows_total(rows, "all_reduce") == calls.get("all_reduce", 0)
        assert (case.replicas > 1) == (calls.get("all_reduce", 0) > 0)
        assert seen["metrics"]["comm/all_gather_gib"] == calls["all_gather_single"] / 2**30
        reduced = calls["reduce_scatter_single"] + calls.get("all_reduce", 0)
        assert seen["metrics"]["comm/reduce_gib"] == pytest.approx(reduced / 2**30)
        assert seen["left"] == 0


@pytest.mark.slow
def test_accumulated_gradients_are_reduced_across_replicas_once() -> None:
    case = Case(ep=1, replicas=2)
    for seen in run_ranks(4, fp8_on_ranks.counted, case, True, False, 3):
        assert rows_total(seen["rows"], "all_reduce") == seen["calls"]["all_reduce"]
        assert rows_total(seen["rows"], "reduce_scatter") == seen["calls"]["reduce_scatter_single"]


def test_metrics_leave_out_what_was_not_called() -> None:
    assert step_metrics({}) == {}
    counts = {Kind(Collective.all_reduce, "dense", "float32", 2): Traffic(1, 2**30)}
    assert step_metrics(counts) == {"comm/reduce_gib": 1.0}
    assert CollectiveCounter().install(nn.Linear(2, 2)) == 0


@pytest.mark.parametrize(
    ("collective", "sent"),
    [("all_gather", 2100), ("reduce_scatter", 525), ("all_reduce", 1050), ("all_to_all", 525)],
)
def test_estimate_of_bytes_sent(collective: str, sent: int) -> None:
    assert Traffic(1, 700).sent_bytes(Kind(Collective(collective), "dense", "float32", 4)) == sent


def test_routed_tokens_are_counted_in_forward_and_their_gradients_in_backward() -> None:
    class Mesh:
        def size(self) -> int:
            return 2

    class Dispatcher:
        ep_mesh = Mesh()

        def _dispatch_token_exchange(self, tokens: torch.Tensor, received: int) -> torch.Tensor:
            return tokens.repeat(2, 1)[:received]

        def _combine_token_exchange(self, tokens: torch.Tensor, received: int) -> torch.Tensor:
            return tokens[:received]

    model = nn.Linear(2, 2)
    model.token_dispatcher = dispatcher = Dispatcher()
    counter = CollectiveCounter()
    counter.install(model)
    tokens = torch.randn(10, 4, dtype=torch.bfloat16, requires_grad=True)
    dispatcher._combine_token_exchange(
        dispatcher._dispatch_token_exchange(tokens, 12) * 2, 10
    ).sum().backward()
    counts = counter.take()
    # 10 tokens out, 12 back, then the gradients of 10 and of 12; 4 values of 2 bytes each
    assert counts == {
        Kind(Collective.all_to_all, "tokens", "bfloat16", 2): Traffic(4, (10 + 12 + 10 + 12) * 8)
    }
    assert step_metrics(counts) == {"comm/all_to_all_gib": 352 / 2**30}
