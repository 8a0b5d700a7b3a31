"""Mechanisms that are switched on and can change nothing: allowed, because an ablation switches each one alone, and said."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from europa_exp.config.schema import Config, ExpertAllGather, GradientReduce, GradNorm


def without_effect(cfg: Config) -> Iterator[str]:
    """What of this (checked) configuration has no effect, and why; a line each."""
    layout, comm = cfg.parallelism, cfg.comm
    shards, replicas = layout.data_parallel_shard_degree, layout.data_parallel_replicate_degree
    whole_experts = shards == layout.expert_parallel_degree
    reduce = comm.gradient_reduce
    one_pass = cfg.training.local_batch_size * shards * replicas
    if comm.expert_all_gather is ExpertAllGather.fp8 and whole_experts:
        yield (
            "comm.expert_all_gather=fp8 has no effect: each rank holds its experts whole "
            f"(parallelism.expert_parallel_degree = data_parallel_shard_degree = {shards}), so they are never gathered"
        )
    if reduce.by_all_to_all and shards == 1:
        yield f"comm.gradient_reduce={reduce.value} has no effect: gradients are sharded over one rank"
    elif reduce is GradientReduce.expert_bf16_all_to_all and whole_experts:
        yield (
            f"comm.gradient_reduce={reduce.value} has no effect: each rank holds its experts whole "
            f"(parallelism.expert_parallel_degree = data_parallel_shard_degree = {shards}), so their gradients stay where they are"
        )
    if cfg.allocator.receive_buffer_on_compute_stream and not reduce.by_all_to_all:
        yield (
            "allocator.receive_buffer_on_compute_stream has no effect: only comm.gradient_reduce=bf16_all_to_all (or "
            "expert_bf16_all_to_all) has such a buffer"
        )
    if not comm.embedding_gather_in_backward and shards == 1:
        yield "comm.embedding_gather_in_backward=false has no effect: the embedding table is sharded over one rank"
    if cfg.allocator.all_gather_on_compute_stream and shards == 1:
        yield "allocator.all_gather_on_compute_stream has no effect: weights are sharded over one rank, so none are gathered"
    if comm.gradient_release_lag is not None and cfg.optimizer.grad_norm is GradNorm.in_backward:
        why = None
        if not cfg.offload.fsdp_cpu:
            why = "without offload.fsdp_cpu=true reduced gradients stay on the device anyway"
        elif replicas > 1:
            why = "with replicas FSDP itself keeps reduced gradients until backward ends"
        elif cfg.training.global_batch_size not in (None, one_pass):
            why = "gradients that accumulate on the host give their norm there"
        if why:
            yield f"comm.gradient_release_lag={comm.gradient_release_lag} has no effect: {why}"


def notes(configs: Sequence[Config]) -> list[str]:
    """The lines of `without_effect` for all points of a call, each once, with how many points it is about."""
    counts: dict[str, int] = {}
    for cfg in configs:
        for line in without_effect(cfg):
            counts[line] = counts.get(line, 0) + 1
    about = "" if len(configs) == 1 else " ({} of {} runs)"
    return [f"note: {line}{about.format(n, len(configs))}" for line, n in counts.items()]
