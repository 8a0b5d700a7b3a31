"""A step without data, memory and other ranks carries what a real step carries."""

from __future__ import annotations

import resource
from collections import Counter
from pathlib import Path

import pytest
import step_bytes
from compose import composed
from ranks import run_ranks

from europa_exp.comm.accounting import Collective, Kind, Traffic
from europa_exp.config import counts, io
from europa_exp.config.schema import ExpertAllGather

pytestmark = pytest.mark.slow

GIB = 2**20
"""In units of ``ru_maxrss``."""


def dry_counts(frozen: str) -> tuple[step_bytes.Counts, float]:
    """Counts of a dry step, and the most memory that it took in GiB."""
    return step_bytes.dry_counts(frozen), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / GIB


def dry(*overrides: str) -> step_bytes.Counts:
    counted, peak = run_ranks(1, dry_counts, io.to_yaml(composed(*overrides)))[0]
    assert peak < 2
    return counted


def tokens_apart(counted: step_bytes.Counts) -> tuple[step_bytes.Counts, step_bytes.Counts]:
    """What is sharded with FSDP, and the routed tokens."""
    tokens = {kind: traffic for kind, traffic in counted.items() if kind.role == "tokens"}
    return {kind: traffic for kind, traffic in counted.items() if kind.role != "tokens"}, tokens


@pytest.mark.parametrize(
    "overrides",
    [
        ["experiment=ladder/01_full_recompute"],
        ["experiment=ladder/09_bf16_all_to_all"],
        ["experiment=ladder/13_nccl_ctas", "offload.fsdp_cpu=true"],
        ["comm=fp8"],
        ["comm=fp8", "training.global_batch_size=16", "training.loss_chunks=4"],
        ["comm=fp8", "parallelism.expert_parallel_degree=1"],
        ["parallelism.data_parallel_replicate_degree=2", "parallelism.data_parallel_shard_degree=2"],
        ["comm=fp8", "offload.fsdp_cpu=true", "model.n_experts=12", "model.dim=48"],
    ],
    ids=" ".join,
)
def test_equals_the_steps_of_real_ranks(tmp_path: Path, overrides: list[str]) -> None:
    cfg = composed("training.steps=3", *overrides)
    world = cfg.parallelism.nodes * cfg.parallelism.gpus_per_node
    ranks = run_ranks(world, step_bytes.real_counts, io.to_yaml(cfg), str(tmp_path))
    sharded, tokens = tokens_apart(dry("training.steps=3", *overrides))
    assert sharded
    for steps in ranks:
        assert len(steps) == 3
        for step in steps[1:]:
            assert tokens_apart(step)[0] == sharded
    # A rank's share of the tokens depends on the routing; all ranks together send as many as with equal shares.
    for step in range(3):
        sent: Counter[Kind] = Counter()
        for steps in ranks:
            for kind, traffic in tokens_apart(steps[step])[1].items():
                assert traffic.calls == tokens[kind].calls
                sent[kind] += traffic.handed_bytes
        assert sent == {kind: traffic.handed_bytes * world for kind, traffic in tokens.items()}


def test_layers_of_the_large_model_carry_what_closed_forms_say() -> None:
    found = {n: dry("experiment=europa_1t", f"model.n_layers={n}") for n in (2, 4, 8)}
    assert found[2].keys() == found[4].keys() == found[8].keys()
    for kind, traffic in found[8].items():
        two, four = found[2][kind], found[4][kind]
        assert traffic.calls == two.calls + 3 * (four.calls - two.calls)
        assert traffic.handed_bytes == two.handed_bytes + 3 * (four.handed_bytes - two.handed_bytes)
    cfg = composed("experiment=europa_1t", "model.n_layers=8")
    experts = 96 * counts.expert_params(cfg.model)
    gathered = counts.expert_gather_bytes(cfg.model, cfg.parallelism, ExpertAllGather.fp8)
    dense = counts.attention_params(cfg.model) + counts.router_params(cfg.model) + 2 * cfg.model.dim
    dense += 128 * cfg.model.dim  # 10,240 rows of queries, keys and values are padded to a multiple of 384
    table, norm = cfg.model.vocab_size * cfg.model.dim, cfg.model.dim
    tokens = 65536 * 8 * cfg.model.dim
    assert found[8] == {
        # forward and backward
        Kind(Collective.all_gather, "expert", "uint8", 96, "efsdp"): Traffic(16, 16 * gathered // 96),
        # layers and embedding in forward, head and last norm until their gradients are there
        Kind(Collective.all_gather, "dense", "bfloat16", 384, "dp_shard"): Traffic(
            10, 2 * (8 * dense + 2 * table + norm) // 384
        ),
        Kind(Collective.all_gather, "dense", "bfloat16", 4, "node"): Traffic(8, 8 * 2 * dense // 4),
        Kind(Collective.all_to_all, "expert", "bfloat16", 96, "efsdp"): Traffic(8, 8 * 2 * experts),
        Kind(Collective.all_to_all, "dense", "bfloat16", 384, "dp_shard"): Traffic(
            10, 2 * (8 * dense + 2 * table + norm)
        ),
        # dispatch and combination in forward, in recomputation and in backward
        Kind(Collective.all_to_all, "tokens", "bfloat16", 4, "ep"): Traffic(8 * 6, 8 * 6 * tokens * 2),
    }


def refusal(frozen: str) -> str:
    import torch.distributed as dist

    from europa_exp.training.dry_step import dry_step

    dist.init_process_group("gloo")
    with pytest.raises(RuntimeError) as caught:
        dry_step(io.from_yaml(frozen))
    return str(caught.value)


def test_refuses_a_process_that_is_in_a_group_already() -> None:
    assert "process group" in run_ranks(1, refusal, io.to_yaml(composed()))[0]
