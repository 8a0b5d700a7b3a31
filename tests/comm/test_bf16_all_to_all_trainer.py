"""The bf16 all-to-all in the real trainer, against torchtitan's plain one and against our trainer without it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import a2a_trainer_on_ranks as on_ranks
import numpy as np
import pytest
from compose import composed
from parity import train_plain
from ranks import run_ranks

from europa_exp.config import io

pytestmark = pytest.mark.slow

# Never clips: then gradients that are equal before the norm are equal after it.
NO_CLIPPING = "optimizer.max_grad_norm=1000"


def frozen(*overrides: str) -> str:
    return io.to_yaml(composed(NO_CLIPPING, *overrides))


def test_ten_steps_stay_with_torchtitans_trainer(tmp_path: Path) -> None:
    steps = "training.steps=10"
    plain = run_ranks(4, train_plain, frozen(steps), str(tmp_path))
    ours = run_ranks(4, on_ranks.train, frozen(steps, "comm=bf16_a2a"), str(tmp_path))
    for theirs, mine in zip(plain, ours, strict=True):
        assert len(mine.losses) == 10
        assert mine.loss_differs_by(theirs) <= 0.01
        assert mine.losses[:3] == theirs.losses[:3]
        assert set(mine.reduced_in.values()) == {"all_to_all"}
        mine.close_gradients(theirs)


ONE_RANK = (
    "parallelism.nodes=1",
    "parallelism.gpus_per_node=1",
    "parallelism.data_parallel_shard_degree=1",
    "parallelism.expert_parallel_degree=1",
)


# ranks, share of the bytes of gradients, settings
SETTINGS = {
    "offload": (4, 0.5, ["offload.fsdp_cpu=true"]),
    "two micro-batches": (4, 0.5, ["training.global_batch_size=16"]),
    "receive on compute stream": (4, 0.5, ["allocator.receive_buffer_on_compute_stream=true"]),
    "full recomputation": (4, 0.5, ["training.activation_checkpoint=full"]),
    "kept after forward": (4, 0.5, ["parallelism.reshard_after_forward=never"]),
    "one mesh": (4, 0.5, ["parallelism.expert_parallel_degree=1"]),
    "whole experts": (4, 0.5, ["parallelism.expert_parallel_degree=4"]),
    # of a value, half of 4 bytes leave for the other shard, and 2 of its share for the replica: the first half becomes 1
    "replicas": (4, 3 / 4, ["parallelism.data_parallel_replicate_degree=2", "parallelism.data_parallel_shard_degree=2",
                            "parallelism.expert_parallel_degree=1"]),
    "one rank": (1, None, [*ONE_RANK]),
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_computes_what_it_does_without(tmp_path: Path, name: str) -> None:
    ranks, share, settings = SETTINGS[name]
    both = [
        run_ranks(ranks, on_ranks.train, frozen("training.steps=3", *settings, comm), str(tmp_path))
        for comm in ("comm=bf16", "comm=bf16_a2a")
    ]
    for theirs, mine in zip(*both, strict=True):
        assert mine.loss_differs_by(theirs) <= 0.01
        assert mine.losses[0] == theirs.losses[0]
        mine.close_gradients(theirs)
        if share is None:
            assert mine.reduce_gib == theirs.reduce_gib == 0
        else:
            assert mine.reduce_gib == pytest.approx(share * theirs.reduce_gib)


def test_chunked_loss_keeps_the_gradient_of_the_lm_head_in_fp32(tmp_path: Path) -> None:
    chunks = ("training.steps=5", "training.loss_chunks=4")
    default = run_ranks(4, on_ranks.train, frozen(*chunks, "comm=bf16"), str(tmp_path))
    ours = run_ranks(4, on_ranks.train, frozen(*chunks, "comm=bf16_a2a"), str(tmp_path))
    without_keep = run_ranks(
        4, partial(on_ranks.train, keep=False), frozen(*chunks, "comm=bf16_a2a"), str(tmp_path)
    )
    for theirs, mine, rounded in zip(default, ours, without_keep, strict=True):
        assert mine.loss_differs_by(theirs) <= 0.01
        # FSDP holds the last norm and the head in one group.
        kept = {name for name, collective in mine.reduced_in.items() if collective == "reduce_scatter"}
        assert kept == {"lm_head.weight", "norm.weight"}
        assert kept < mine.gradients.keys()
        for name in kept:
            np.testing.assert_array_equal(mine.gradients[name], theirs.gradients[name])
        # What keeping the group is for: bf16 sums over the chunks lose digits.
        assert "all_to_all" in rounded.reduced_in["lm_head.weight"]
        off = np.abs(rounded.gradients["lm_head.weight"] - theirs.gradients["lm_head.weight"]).max()
        assert off > 1e-4 * np.abs(theirs.gradients["lm_head.weight"]).max()
