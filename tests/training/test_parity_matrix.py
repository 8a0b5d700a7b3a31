"""Every combination of the communication mechanisms, on real ranks, against torchtitan's own trainer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from compose import composed
from parity import Trained, train_plain, watched
from ranks import run_ranks

from europa_exp.config import io

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

STEPS = 10
COMMON = (
    f"training.steps={STEPS}",
    "training.seq_len=64",
    "training.local_batch_size=1",
    # Never clips: a norm that differs in its last digit must not hide that gradients are equal in every bit.
    "optimizer.max_grad_norm=1000",
)
EIGHT_RANKS = (
    "parallelism.nodes=2",
    "parallelism.gpus_per_node=4",
    "parallelism.data_parallel_shard_degree=8",
    "parallelism.expert_parallel_degree=4",
)
# Two replicas of four shards over two nodes, each expert over two shards.
EIGHT_RANKS_WITH_REPLICAS = (
    "parallelism.nodes=4",
    "parallelism.gpus_per_node=2",
    "parallelism.data_parallel_replicate_degree=2",
    "parallelism.data_parallel_shard_degree=4",
    "parallelism.expert_parallel_degree=2",
)
GATHERS = ("comm.expert_all_gather=bf16", "comm.expert_all_gather=fp8")
REDUCES = ("comm.gradient_reduce=reduce_scatter", "comm.gradient_reduce=bf16_all_to_all")
# The others promise not to change a bit of any gradient.
NORMS = (
    (),
    ("optimizer.grad_norm=in_backward",),
    # The lag is about gradients on their way to the host.
    ("optimizer.grad_norm=in_backward", "comm.gradient_release_lag=2", "offload.fsdp_cpu=true"),
)
EXACT = [
    (*reshard, *embedding, *norm, *pools)
    for reshard, embedding, norm, pools in product(
        ((), ("comm.node_local_reshard=true",)),
        ((), ("comm.embedding_gather_in_backward=false",)),
        NORMS,
        ((), ("allocator=stream_pools",)),
    )
]


def train_ours(frozen: str, folder: str) -> Trained:
    from europa_exp.training.assemble import build_trainer

    trainer, _ = build_trainer(io.from_yaml(frozen), Path(folder))
    return watched(trainer)


def compare(
    folder: Path, world: int, layout: Sequence[str], gather: str, reduce: str, exact: Sequence[Sequence[str]]
) -> None:
    def train(function: Any, *overrides: str) -> list[Trained]:
        cfg = composed(*COMMON, *layout, *overrides)
        return run_ranks(world, function, io.to_yaml(cfg), str(folder))

    plain = train(train_plain)
    bare = train(train_ours, gather, reduce)
    for others in exact:
        results = bare if not others else train(train_ours, gather, reduce, *others)
        for rank, result in enumerate(results):
            where = f"rank {rank}, {gather} {reduce} {' '.join(others)}"
            reference, same_arithmetic = plain[rank], bare[rank]
            assert len(result.losses) == STEPS, where
            assert result.loss_differs_by(reference) <= 0.01, where
            # Among runs of the same gather and reduction, and against plain FSDP where those are its own.
            assert result.same_gradients(same_arithmetic), where
            assert result.losses == same_arithmetic.losses, where
            assert result.norms == pytest.approx(same_arithmetic.norms, rel=1e-5), where
            if gather == GATHERS[0] and reduce == REDUCES[0]:
                assert result.same_gradients(reference), where
                assert result.losses == reference.losses, where
                assert result.norms == pytest.approx(reference.norms, rel=1e-5), where
            elif gather == GATHERS[0]:
                result.close_gradients(reference)
    if gather == GATHERS[1]:
        quantised = [not mine.same_gradients(its) for mine, its in zip(bare, plain, strict=True)]
        assert all(quantised), "the gathered weights were not quantised"


@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize("gather", GATHERS)
def test_all_combinations_on_four_ranks(tmp_path: Path, gather: str, reduce: str) -> None:
    compare(tmp_path, 4, (), gather, reduce, EXACT)


@pytest.mark.parametrize("gather", GATHERS)
def test_all_to_all_of_experts_alone(tmp_path: Path, gather: str) -> None:
    compare(
        tmp_path,
        4,
        (),
        gather,
        "comm.gradient_reduce=expert_bf16_all_to_all",
        [EXACT[0], EXACT[7], EXACT[-1]],
    )


@pytest.mark.parametrize("layout", [EIGHT_RANKS, EIGHT_RANKS_WITH_REPLICAS], ids=["shards", "replicas"])
@pytest.mark.parametrize(
    ("gather", "reduce"), [(GATHERS[0], REDUCES[0]), (GATHERS[1], REDUCES[1])], ids=["exact", "everything"]
)
def test_nothing_and_everything_on_eight_ranks(
    tmp_path: Path, gather: str, reduce: str, layout: Sequence[str]
) -> None:
    compare(tmp_path, 8, layout, gather, reduce, [EXACT[0], EXACT[-1]])
