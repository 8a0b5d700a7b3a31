"""Rules of what is kept between forward and backward: what they refuse, in which words, and what the memory rule counts."""

from __future__ import annotations

import pytest

from europa_exp.config import counts
from europa_exp.config.checks import check
from europa_exp.config.rules import memory

GIB, MIB = 2**30, 2**20
NODE = "comm.node_local_reshard=true"
NO_EMBEDDING = "comm.embedding_gather_in_backward=false"
ONE_GPU_NODES = ("parallelism.nodes=4", "parallelism.gpus_per_node=1")
ONE_NODE = ("parallelism.nodes=1", "parallelism.gpus_per_node=4")
REPLICAS_OF_HALF_A_NODE = (
    *ONE_NODE,
    "parallelism.data_parallel_replicate_degree=2",
    "parallelism.data_parallel_shard_degree=2",
)
UNEVEN_NODES = (
    "parallelism.nodes=3",
    "parallelism.gpus_per_node=4",
    "parallelism.data_parallel_replicate_degree=2",
    "parallelism.data_parallel_shard_degree=6",
)
EUROPA = (
    "model=europa_1t",
    "parallelism=fsdp384_ep4",
    "training.seq_len=65536",
    "training.local_batch_size=1",
    "offload.fsdp_cpu=true",
)


@pytest.fixture(autouse=True)
def plenty_of_memory(monkeypatch):
    monkeypatch.setattr(memory, "machine_bytes", lambda: 2**50)


@pytest.mark.parametrize(
    "overrides",
    [
        (NODE, NO_EMBEDDING, "allocator=stream_pools"),
        (NODE, "parallelism.reshard_after_forward=always"),
        (NODE, "parallelism.nodes=4", "parallelism.data_parallel_shard_degree=4", "parallelism.data_parallel_replicate_degree=2"),
        (NODE, "parallelism.expert_parallel_degree=4"),
        (NODE, "model=europa_1t", "parallelism=hsdp1536_ep4", "training.seq_len=128"),
        (NO_EMBEDDING, "parallelism.expert_parallel_degree=1"),
        ("parallelism.reshard_after_forward=never", "parallelism.expert_parallel_degree=1", *ONE_GPU_NODES),
    ],
    ids=" ".join,
)  # fmt: skip
def test_what_fits_is_left_alone(make, overrides):
    assert check(make(*overrides)) == []


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (ONE_GPU_NODES, ["nodes of 2 GPUs or more", "parallelism.gpus_per_node=1"]),
        (ONE_NODE, ["nothing to gain", "data_parallel_shard_degree=4 ranks are in one node"]),
        (REPLICAS_OF_HALF_A_NODE, ["whole nodes", "2 % 4 = 2", "(8, 12, ...)"]),
        (UNEVEN_NODES, ["whole nodes", "6 % 4 = 2", "(8, 12, ...)"]),
        (["parallelism.expert_parallel_degree=1"], ["experts", "expert_parallel_degree=1", "degree of 2 or more"]),
        (["parallelism.reshard_after_forward=never"], ["never", "reshard_after_forward=default"]),
    ],
    ids=lambda value: " ".join(value)[:60],
)  # fmt: skip
def test_node_local_resharding_that_does_not_fit_is_one_problem(make, overrides, words):
    assert check(make(*overrides)) == []
    (problem,) = check(make(NODE, *overrides))
    assert problem.field == "comm.node_local_reshard"
    assert "Set comm.node_local_reshard=false" in str(problem)
    for word in words:
        assert word in str(problem)


def test_an_embedding_that_is_gathered_once_has_no_second_gather_to_leave_out(make):
    (problem,) = check(make(NO_EMBEDDING, "parallelism.reshard_after_forward=never"))
    assert problem.field == "comm.embedding_gather_in_backward"
    assert "parallelism.reshard_after_forward=default" in problem.way_out


def test_kept_dense_weights_of_europa_1t_are_the_published_ones(make):
    cfg = make(*EUROPA, NODE)
    a_layer = counts.node_local_bytes(cfg.model, cfg.parallelism) / cfg.model.n_layers
    assert a_layer / MIB == pytest.approx(55.13, abs=0.01)
    assert counts.node_local_bytes(cfg.model, cfg.parallelism) / GIB == pytest.approx(3.98, abs=0.01)
    assert counts.node_local_bytes(cfg.model, cfg.parallelism, width=4) / GIB == pytest.approx(7.97, abs=0.01)


def test_kept_dense_weights_count_on_the_device(make):
    device, host = memory.split(make(*EUROPA, NODE))
    without, host_without = memory.split(make(*EUROPA))
    assert host == host_without
    assert (device.total - without.total) / GIB == pytest.approx(3.98, abs=0.01)

    fits = "cluster.device_memory_gib=62"  # 55.5 + 5.91 GiB without
    assert check(make(*EUROPA, fits)) == []
    (problem,) = check(make(*EUROPA, NODE, fits))
    assert problem.field == "cluster.device_memory_gib"
    assert "dense weights kept in the node 3.98 GiB" in problem.rule
    assert "comm.node_local_reshard=false" in problem.way_out
