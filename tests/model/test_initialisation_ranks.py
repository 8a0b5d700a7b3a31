"""Every layout initialises the same model: real ranks, real meshes, torchtitan's trainer."""

from __future__ import annotations

import numpy as np
import pytest
from layouts import Layout, held_state
from ranks import run_ranks

pytestmark = pytest.mark.slow

# Weights ten times as large as usual, so that logits tell which expert a token met; an uneven vocabulary.
MODEL = ["model.init_std=0.2", "model.vocab_size=321", "training.seq_len=64", "training.local_batch_size=1"]
FEW_EXPERTS = [*MODEL, "model.n_experts=2", "model.top_k=1"]


@pytest.fixture(scope="module")
def one_rank() -> dict:
    return run_ranks(1, held_state, Layout(1, 1, 1), MODEL)[0]


@pytest.mark.parametrize(
    "layout",
    [
        Layout(1, 2, 1),
        Layout(1, 2, 2),
        Layout(1, 4, 1),
        Layout(1, 4, 2),
        Layout(2, 2, 1),
        Layout(2, 2, 2),
    ],
    ids=lambda layout: f"{layout.replicate}x{layout.shard}-ep{layout.ep}",
)
def test_same_full_state_on_every_layout(one_rank: dict, layout: Layout) -> None:
    ranks = run_ranks(layout.ranks, held_state, layout, MODEL)
    for held in ranks:
        assert held["full"] == one_rank["full"]
        assert held["buffers"] == one_rank["buffers"]
        # What the layers compute with, after FSDP's gathers and the expert dispatch, is that state in that order.
        np.testing.assert_allclose(held["logits"], one_rank["logits"], rtol=0.02, atol=0.02)
    _check_shards(ranks)


@pytest.mark.parametrize("ep", [1, 2])
def test_more_ranks_than_experts(ep: int) -> None:
    alone = run_ranks(1, held_state, Layout(1, 1, 1), FEW_EXPERTS)[0]
    ranks = run_ranks(4, held_state, Layout(1, 4, ep), FEW_EXPERTS)
    assert all(held["full"] == alone["full"] for held in ranks)
    _check_shards(ranks)


def _check_shards(ranks: list[dict]) -> None:
    """Shards of random parameters differ between the ranks of a replica and are equal between replicas."""
    for name in ranks[0]["full"]:
        replicas: dict[int, list[str]] = {}
        for held in ranks:
            replicas.setdefault(held["replica"][name], []).append(held["local"][name])
        first, *others = replicas.values()
        assert all(other == first for other in others), f"replicas of {name} differ"
        if "norm" not in name:
            held_shards = [shard for shard in first if shard]
            assert len(set(held_shards)) == len(held_shards), f"shards of {name} are alike"
