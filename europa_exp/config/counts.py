"""Closed forms: parameters, bytes and operations of a composition, without building the model.

Names follow the schema. A "matrix" is any parameter with two or more dimensions. Bytes are plain bytes, not GiB.
The model in question: an embedding, ``n_layers`` layers of (RMS norm, grouped-query attention, RMS norm, router and
routed SwiGLU experts), a final RMS norm and an untied LM head; no biases, no shared expert.
"""

from __future__ import annotations

from collections.abc import Sequence

from europa_exp.config.schema import ExpertAllGather, Model, Parallelism, Precision, Training

GIB = 2**30
FP8_BLOCK = 128
"""Values that share one fp32 scale in the FP8 expert all-gather."""

_WIDTH = {Precision.bfloat16: 2, Precision.float32: 4}


def element_bytes(precision: Precision) -> int:
    """Bytes of one value."""
    return _WIDTH[precision]


# ----------------------------------------------------------------------------------------------------------- parameters


def embedding_params(model: Model) -> int:
    """Embedding alone; the LM head, untied, has as many."""
    return model.vocab_size * model.dim


def attention_params(model: Model) -> int:
    """One layer's query, key, value and output matrices."""
    return model.dim * model.head_dim * (2 * model.n_heads + 2 * model.n_kv_heads)


def router_params(model: Model) -> int:
    """One layer's router (the load-balancing bias is no parameter)."""
    return model.dim * model.n_experts


def expert_params(model: Model) -> int:
    """One expert: gate, up and down matrices."""
    return 3 * model.dim * model.expert_hidden_dim


def norm_params(model: Model) -> int:
    """All RMS norms: two a layer and the final one."""
    return (2 * model.n_layers + 1) * model.dim


def total_params(model: Model) -> int:
    """Every parameter of the model."""
    layer = attention_params(model) + router_params(model) + model.n_experts * expert_params(model)
    return model.n_layers * layer + 2 * embedding_params(model) + norm_params(model)


def active_params(model: Model) -> int:
    """Parameters that one token meets: everything but the experts that it isn't sent to (embedding and LM head count)."""
    idle = (model.n_experts - model.top_k) * expert_params(model)
    return total_params(model) - model.n_layers * idle


def muon_params(model: Model) -> int:
    """Parameters that Muon would update: every matrix but embedding, LM head and router."""
    return model.n_layers * (attention_params(model) + model.n_experts * expert_params(model))


def muon_share(model: Model) -> float:
    """Share of the parameters that Muon would update, 0 to 1."""
    return muon_params(model) / total_params(model)


# ----------------------------------------------------------------------------------------------------------------- RoPE


def rope_layers(model: Model) -> list[int]:
    """Indices of the layers that turn queries and keys: rope_every-1, 2*rope_every-1, ..."""
    return list(range(model.rope_every - 1, model.n_layers, model.rope_every))


def long_rope_layers(model: Model) -> list[int]:
    """Indices of the RoPE layers with the long cache: the middles of ``n_long_rope_layers`` equal parts of the RoPE layers."""
    rope = rope_layers(model)
    n = min(model.n_long_rope_layers, len(rope))
    return [rope[(2 * i + 1) * len(rope) // (2 * n)] for i in range(n)]


def rope_cache_bytes(model: Model, seq_len: int, *, shared: bool) -> int:
    """Bytes of the fp32 caches of cosines and sines (each positions x head_dim).

    ``shared`` counts each distinct cache once; otherwise every RoPE layer has a copy of its own.
    """
    short = seq_len * model.head_dim * 2 * 4
    long = short * model.long_rope_factor
    n_long = len(long_rope_layers(model))
    n_short = len(rope_layers(model)) - n_long
    if not shared:
        return n_short * short + n_long * long
    return (short if n_short else 0) + (long if n_long and (long != short or not n_short) else 0)


# ---------------------------------------------------------------------------------------------------------------- bytes


def boundary_activation_bytes(model: Model, training: Training) -> int:
    """Bytes a rank of the inputs of all layers for one forward pass: what full recomputation keeps."""
    values = model.n_layers * training.local_batch_size * training.seq_len * model.dim
    return values * element_bytes(training.param_precision)


def dense_layer_bytes(model: Model, *, ranks: int = 1, width: int = 2) -> float:
    """Bytes of one layer's attention and router at ``width`` bytes a value, sharded over ``ranks`` (1 is unsharded).

    The two norms (2 x dim values, 0.02% for europa_1t) are left out.
    """
    return (attention_params(model) + router_params(model)) * width / ranks


def node_local_bytes(model: Model, parallelism: Parallelism, *, width: int = 2) -> float:
    """Bytes a rank of all layers' dense weights, sharded over the ranks of a node: what ``comm.node_local_reshard`` holds."""
    return model.n_layers * dense_layer_bytes(model, ranks=parallelism.gpus_per_node, width=width)


def expert_gather_bytes(
    model: Model, parallelism: Parallelism, gather: ExpertAllGather, *, width: int = 2
) -> float:
    """Bytes of one layer's gathered expert weights on one rank.

    ``width`` is the bytes of a value with ``bf16`` (the precision of gathered parameters); ``fp8`` carries one byte a
    value and one fp32 scale for each 128.
    """
    values = model.n_experts // parallelism.expert_parallel_degree * expert_params(model)
    return values * (1 + 4 / FP8_BLOCK if gather is ExpertAllGather.fp8 else width)


def state_bytes_per_rank(model: Model, parallelism: Parallelism, *, moments: int = 2) -> float:
    """Bytes a rank of fp32 master weights, fp32 gradients and fp32 optimizer moments (AdamW has two), all sharded."""
    return total_params(model) * 4 * (2 + moments) / parallelism.data_parallel_shard_degree


# ----------------------------------------------------------------------------------------------------------- operations


def matmul_params(model: Model) -> int:
    """Weights that one token is multiplied with: attention, router, top_k experts, LM head (the embedding is a look-up)."""
    layer = attention_params(model) + router_params(model) + model.top_k * expert_params(model)
    return model.n_layers * layer + embedding_params(model)


def flops(model: Model, segment_lengths: Sequence[int]) -> float:
    """Floating-point operations of forward and backward over packed rows, from the lengths of their documents.

    A token costs 6 operations for every weight that it is multiplied with (2 forward, 4 backward). Attention is causal
    inside a document: a segment of n tokens has n(n+1)/2 pairs of query and key, and a pair costs 4 x n_heads x head_dim
    operations forward (scores, weighted values) and twice that backward, in every layer. Recomputation isn't counted, nor
    norms, softmax and rotations: this is the numerator of model FLOPs utilisation.
    """
    tokens = sum(segment_lengths)
    pairs = sum(n * (n + 1) // 2 for n in segment_lengths)
    per_pair = 3 * 4 * model.n_heads * model.head_dim * model.n_layers
    return float(6 * matmul_params(model) * tokens + per_pair * pairs)


def flops_per_token(model: Model, segment_lengths: Sequence[int]) -> float:
    """`flops` divided by the tokens of the segments; 0 without tokens."""
    tokens = sum(segment_lengths)
    return flops(model, segment_lengths) / tokens if tokens else 0.0
