"""The closed forms against the published figures, and against counting one by one."""

from __future__ import annotations

import itertools

import pytest

from europa_exp.config import counts
from europa_exp.config.schema import ExpertAllGather

GIB, MIB = 2**30, 2**20


@pytest.fixture(scope="module")
def europa(make):
    return make(
        "model=europa_1t", "parallelism=fsdp384_ep4", "training.seq_len=65536", "training.local_batch_size=1"
    )


def test_parameters_of_europa_1t_are_the_published_ones(europa):
    model = europa.model
    assert counts.total_params(model) / 1e9 == pytest.approx(951.9, abs=0.05)
    assert counts.active_params(model) / 1e9 == pytest.approx(32.8, abs=0.05)
    assert 100 * counts.muon_share(model) == pytest.approx(99.5, abs=0.05)
    idle = counts.total_params(model) - counts.active_params(model)
    assert idle / 1e9 == pytest.approx(919.1, abs=0.1)


def test_bytes_of_europa_1t_are_the_published_ones(europa):
    model = europa.model
    assert counts.boundary_activation_bytes(model, europa.training) / GIB == 55.5
    assert counts.dense_layer_bytes(model, ranks=4) / MIB == pytest.approx(55.13, abs=0.01)
    assert 74 * counts.dense_layer_bytes(model, ranks=4) / GIB == pytest.approx(3.98, abs=0.01)
    assert 74 * counts.dense_layer_bytes(model) / GIB == pytest.approx(15.93, abs=0.01)
    assert counts.rope_cache_bytes(model, 65536, shared=False) / GIB == 2.75
    assert counts.rope_cache_bytes(model, 65536, shared=True) / GIB == 0.1875
    three_of_four = 0.75 * counts.state_bytes_per_rank(model, europa.parallelism) / GIB
    assert three_of_four == pytest.approx(27.7, abs=0.05)  # master, gradient and one moment
    gather = counts.expert_gather_bytes(model, europa.parallelism, ExpertAllGather.bf16)
    assert gather / 1e9 == pytest.approx(6.34, abs=0.005)
    fp8 = counts.expert_gather_bytes(model, europa.parallelism, ExpertAllGather.fp8)
    assert fp8 / gather == 1.03125 / 2


def test_half_of_the_layers_turn_and_seven_evenly_spread_ones_are_long(europa):
    rope, long = counts.rope_layers(europa.model), counts.long_rope_layers(europa.model)
    assert rope == list(range(1, 74, 2))
    assert len(long) == 7
    assert set(long) < set(rope)
    gaps = [b - a for a, b in itertools.pairwise(long)]
    assert max(gaps) - min(gaps) <= 2  # one RoPE layer more or less between two of them
    assert long[0] <= max(gaps)
    assert 73 - long[-1] <= max(gaps)


@pytest.mark.parametrize(
    ("every", "n_long", "rope", "long"),
    [
        (1, 0, [0, 1, 2, 3], []),
        (2, 1, [1, 3], [3]),
        (4, 1, [3], [3]),
        (5, 0, [], []),
        (1, 4, [0, 1, 2, 3], [0, 1, 2, 3]),
    ],
)
def test_rope_layers_of_a_small_model(make, every, n_long, rope, long):
    model = make(f"model.rope_every={every}", f"model.n_long_rope_layers={n_long}").model
    assert counts.rope_layers(model) == rope
    assert counts.long_rope_layers(model) == long


def test_equal_caches_are_shared_whatever_they_are_called(make):
    model = make("model.long_rope_factor=1").model
    assert counts.rope_cache_bytes(model, 8, shared=True) == 8 * 16 * 2 * 4
    all_long = make("model.n_long_rope_layers=2").model
    assert counts.rope_cache_bytes(all_long, 8, shared=True) == 2 * 8 * 16 * 2 * 4


def test_total_is_the_sum_of_every_tensor(make):
    model = make().model
    shapes = [(320, 64), (320, 64), (64,)]
    for _ in range(4):
        shapes += [(64, 64), (32, 64), (32, 64), (64, 64), (64,), (64,), (16, 64)]
        shapes += [(64, 64)] * 3 * 16
    sizes = [s[0] * (s[1] if len(s) == 2 else 1) for s in shapes]
    assert counts.total_params(model) == sum(sizes)


def test_flops_count_pairs_inside_documents_only(make):
    model = make().model
    whole, halves = counts.flops(model, [256]), counts.flops(model, [128, 128])
    per_pair = 12 * 4 * 16 * 4
    assert whole - halves == per_pair * 128 * 128  # the pairs across the two documents
    assert counts.flops(model, [1]) == 6 * counts.matmul_params(model) + per_pair
    assert counts.flops(model, [5, 0, 3]) == counts.flops(model, [3, 5])
    assert counts.flops_per_token(model, []) == 0.0


def test_flops_of_europa_1t_are_six_times_the_active_matrices(europa):
    model = europa.model
    assert counts.matmul_params(model) == pytest.approx(counts.active_params(model) - 384000 * 6144, rel=1e-4)
    per_token = counts.flops_per_token(model, [65536])
    attention = per_token - 6 * counts.matmul_params(model)
    assert attention == pytest.approx(74 * 12 * 64 * 128 * 65537 / 2)
