"""What is switched on and changes nothing is said."""

from __future__ import annotations

import pytest
from compose import composed

from europa_exp.config.effects import notes, without_effect

LAG = ("optimizer.grad_norm=in_backward", "comm.gradient_release_lag=2")
REPLICAS = ("parallelism.data_parallel_replicate_degree=2", "parallelism.data_parallel_shard_degree=2")
ONE_SHARD = (
    "parallelism.data_parallel_replicate_degree=4",
    "parallelism.data_parallel_shard_degree=1",
    "parallelism.expert_parallel_degree=1",
)


@pytest.mark.parametrize(
    ("overrides", "field", "why"),
    [
        (("comm=fp8", "parallelism.expert_parallel_degree=4", "parallelism.gpus_per_node=4", "parallelism.nodes=1"),
         "comm.expert_all_gather", "never gathered"),
        (("comm=fp8", *REPLICAS), "comm.expert_all_gather", "never gathered"),
        (("comm.gradient_reduce=expert_bf16_all_to_all", "parallelism.expert_parallel_degree=4", "parallelism.gpus_per_node=4",
          "parallelism.nodes=1"), "comm.gradient_reduce", "experts whole"),
        (("comm.embedding_gather_in_backward=false", *ONE_SHARD), "comm.embedding_gather_in_backward", "one rank"),
        (("allocator.all_gather_on_compute_stream=true", *ONE_SHARD), "allocator.all_gather", "none are gathered"),
        (("comm=bf16_a2a", *ONE_SHARD), "comm.gradient_reduce", "one rank"),
        (("allocator=stream_pools",), "allocator.receive_buffer_on_compute_stream", "bf16_all_to_all"),
        (LAG, "comm.gradient_release_lag=2", "offload.fsdp_cpu=true"),
        ((*LAG, *REPLICAS, "offload.fsdp_cpu=true"), "comm.gradient_release_lag=2", "replicas"),
        ((*LAG, "training.global_batch_size=16", "offload.fsdp_cpu=true"), "comm.gradient_release_lag=2", "accumulate"),
    ],
)  # fmt: skip
def test_one_line_names_the_field_and_the_reason(overrides: tuple[str, ...], field: str, why: str) -> None:
    (line,) = without_effect(composed(*overrides))
    assert line.startswith(field)
    assert why in line


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("comm=fp8_a2a", "allocator=stream_pools"),
        ("comm=fp8", "comm.gradient_reduce=expert_bf16_all_to_all", "allocator=stream_pools"),
        (*LAG, "offload.fsdp_cpu=true"),
        (*LAG, "offload.fsdp_cpu=true", "training.global_batch_size=8"),
        ("experiment=europa_1t", "cluster.device_memory_gib=95", "cluster.host_memory_gib=110"),
    ],
)
def test_nothing_is_said_of_what_has_an_effect(overrides: tuple[str, ...]) -> None:
    assert not list(without_effect(composed(*overrides)))


def test_a_sweep_says_a_line_once_and_of_how_many_runs() -> None:
    points = [
        composed("allocator=stream_pools"),
        composed("allocator=stream_pools", "nccl.max_ctas=8"),
        composed(),
    ]
    (line,) = notes(points)
    assert line.startswith("note: allocator.receive_buffer_on_compute_stream")
    assert line.endswith("(2 of 3 runs)")
