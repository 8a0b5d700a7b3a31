"""Rules of shapes: the model's dimensions, the ranks, the batch."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from europa_exp.config.errors import Problem
from europa_exp.config.rules import reads
from europa_exp.config.schema import Config


@reads("model.n_heads", "model.n_kv_heads")
def kv_heads(cfg: Config) -> Iterator[Problem]:
    """Every key/value head serves the same number of query heads."""
    n, kv = cfg.model.n_heads, cfg.model.n_kv_heads
    if n % kv:
        yield Problem(
            "model.n_kv_heads",
            kv,
            f"must divide model.n_heads={n} ({n} % {kv} = {n % kv})",
            f"Take one of {_listed(_divisors(n))}",
        )


@reads("model.head_dim")
def even_head_dim(cfg: Config) -> Iterator[Problem]:
    """Rotary embeddings turn pairs."""
    d = cfg.model.head_dim
    if d % 2:
        yield Problem(
            "model.head_dim", d, "must be even: rotary embeddings turn pairs", f"Take {d - 1} or {d + 1}"
        )


@reads("model.top_k", "model.n_experts")
def top_k(cfg: Config) -> Iterator[Problem]:
    """A token can't go to more experts than there are."""
    k, n = cfg.model.top_k, cfg.model.n_experts
    if k > n:
        yield Problem(
            "model.top_k", k, f"must be at most model.n_experts={n}", f"Take 1 to {n}, or more experts"
        )


@reads("model.n_layers", "model.rope_every", "model.n_long_rope_layers")
def long_rope(cfg: Config) -> Iterator[Problem]:
    """Long caches belong to RoPE layers."""
    m = cfg.model
    n_rope, n_long = m.n_layers // m.rope_every, m.n_long_rope_layers
    if n_long > n_rope:
        yield Problem(
            "model.n_long_rope_layers",
            n_long,
            f"must be at most the {n_rope} RoPE layers (model.n_layers={m.n_layers} // model.rope_every={m.rope_every})",
            f"Take 0 to {n_rope}",
        )


@reads("parallelism.nodes", "parallelism.gpus_per_node", "parallelism.data_parallel_replicate_degree")
def replicas(cfg: Config) -> Iterator[Problem]:
    """The replicas share out the ranks evenly."""
    p = cfg.parallelism
    world, r = p.nodes * p.gpus_per_node, p.data_parallel_replicate_degree
    if world % r:
        yield Problem(
            "parallelism.data_parallel_replicate_degree",
            r,
            f"must divide the {world} ranks ({p.nodes} nodes x {p.gpus_per_node}); {world} % {r} = {world % r}",
            f"Take one of {_listed(_divisors(world))}",
        )


@reads(
    "parallelism.nodes",
    "parallelism.gpus_per_node",
    "parallelism.data_parallel_replicate_degree",
    "parallelism.data_parallel_shard_degree",
)
def world_size(cfg: Config) -> Iterator[Problem]:
    """The degrees multiply to the number of ranks."""
    p = cfg.parallelism
    world, r, s = p.nodes * p.gpus_per_node, p.data_parallel_replicate_degree, p.data_parallel_shard_degree
    if world % r == 0 and r * s != world:
        nodes = f" or parallelism.nodes={r * s // p.gpus_per_node}" if r * s % p.gpus_per_node == 0 else ""
        yield Problem(
            "parallelism.data_parallel_shard_degree",
            s,
            f"replicate degree {r} x shard degree {s} = {r * s} must be the {world} ranks "
            f"({p.nodes} nodes x {p.gpus_per_node})",
            f"Set parallelism.data_parallel_shard_degree={world // r}{nodes}",
        )


@reads(
    "parallelism.gpus_per_node",
    "parallelism.data_parallel_shard_degree",
    "parallelism.expert_parallel_degree",
    "model.n_experts",
)
def expert_parallel(cfg: Config) -> Iterator[Problem]:
    """EP borrows from the shard ranks, splits the experts evenly, and fits nodes: inside one, or over whole ones."""
    p, n_experts = cfg.parallelism, cfg.model.n_experts
    ep, shard, per_node = p.expert_parallel_degree, p.data_parallel_shard_degree, p.gpus_per_node
    reasons = []
    if shard % ep:
        reasons.append(
            f"divide parallelism.data_parallel_shard_degree={shard} ({shard} % {ep} = {shard % ep})"
        )
    if n_experts % ep:
        reasons.append(f"divide model.n_experts={n_experts} ({n_experts} % {ep} = {n_experts % ep})")
    if per_node % ep and ep % per_node:
        # Several whole nodes work, if slowly; a group that starts in one node and ends in another one is uneven.
        reasons.append(f"divide, or be a multiple of, parallelism.gpus_per_node={per_node}")
    if reasons:
        fitting = [e for e in _divisors(gcd(shard, n_experts)) if per_node % e == 0 or e % per_node == 0]
        yield Problem(
            "parallelism.expert_parallel_degree",
            ep,
            f"must {' and '.join(reasons)}",
            f"Take one of {_listed(fitting)}",
        )


@reads(
    "training.global_batch_size",
    "training.local_batch_size",
    "parallelism.data_parallel_replicate_degree",
    "parallelism.data_parallel_shard_degree",
)
def global_batch(cfg: Config) -> Iterator[Problem]:
    """A step is a whole number of forward passes of all ranks."""
    total, local = cfg.training.global_batch_size, cfg.training.local_batch_size
    ranks = cfg.parallelism.data_parallel_replicate_degree * cfg.parallelism.data_parallel_shard_degree
    one = local * ranks
    if total is not None and total % one:
        below = total // one * one
        around = f"{below} or {below + one}" if below else str(one)
        yield Problem(
            "training.global_batch_size",
            total,
            f"must be a multiple of training.local_batch_size={local} x {ranks} data-parallel ranks = {one}",
            f"Take {around}, or null for {one}",
        )


@reads("training.loss_chunks", "training.seq_len")
def loss_chunks(cfg: Config) -> Iterator[Problem]:
    """Pieces of the sequence are of one length."""
    n, seq = cfg.training.loss_chunks, cfg.training.seq_len
    if seq % n:
        fitting = [d for d in _divisors(seq) if d <= 2 * n]
        yield Problem(
            "training.loss_chunks",
            n,
            f"must divide training.seq_len={seq} ({seq} % {n} = {seq % n})",
            f"Take one of {_listed(fitting)}",
        )


def _divisors(n: int) -> list[int]:
    low = [d for d in range(1, min(int(n**0.5), 1_000_000) + 1) if n % d == 0]
    return low + [n // d for d in reversed(low) if d * d != n]


def _listed(values: list[int], most: int = 12) -> str:
    if len(values) > most:
        values_text = [str(v) for v in values[: most - 1]] + ["...", str(values[-1])]
    else:
        values_text = [str(v) for v in values]
    return ", ".join(values_text)


RULES = [
    kv_heads,
    even_head_dim,
    top_k,
    long_rope,
    replicas,
    world_size,
    expert_parallel,
    global_batch,
    loss_chunks,
]
