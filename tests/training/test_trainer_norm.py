"""`optimizer.grad_norm=in_backward` in the real trainer, against torchtitan's own trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compose import composed
from parity import train_plain
from ranks import run_ranks
from test_trainer import ours

from europa_exp.config import io

pytestmark = pytest.mark.slow

STEPS = 6
COMMON = (
    f"training.steps={STEPS}",
    "training.seq_len=64",
    # Less than the norm of every step, so that an error of the norm shows in the losses that follow.
    "optimizer.max_grad_norm=0.1",
    # Both norms are right to about 1e-7. In bf16, and where Adam divides a tiny gradient by a tiny root, such a difference may
    # become one of 1e-5 in the next step. Updates that depend on the size of a gradient also show a wrong one.
    "training.param_precision=float32",
    "optimizer.eps=1e-4",
)
IN_BACKWARD = ("optimizer.grad_norm=in_backward",)
REPLICAS = ("parallelism.data_parallel_replicate_degree=2", "parallelism.data_parallel_shard_degree=2")
SETTINGS = [
    (),
    ("training.loss_chunks=4", "parallelism.expert_parallel_degree=1"),
    ("training.loss_chunks=4", "offload.fsdp_cpu=true", "comm.gradient_release_lag=1"),
    ("training.activation_checkpoint=full", "offload.fsdp_cpu=true", "comm.gradient_release_lag=2"),
    ("training.activation_checkpoint=selective", "training.global_batch_size=16"),
    ("training.global_batch_size=16", "offload.fsdp_cpu=true", "training.loss_chunks=4"),
    ("parallelism.expert_parallel_degree=4", "offload.fsdp_cpu=true"),
    (*REPLICAS, "training.global_batch_size=16"),
    (*REPLICAS, "offload.fsdp_cpu=true", "training.loss_chunks=4"),
]


@pytest.mark.parametrize("settings", SETTINGS, ids=" ".join)
def test_trains_as_torchtitan_does(tmp_path: Path, settings: tuple[str, ...]) -> None:
    plain = [name for name in settings if not name.startswith("comm.")]
    theirs = run_ranks(4, train_plain, io.to_yaml(composed(*COMMON, *plain)), str(tmp_path))[0]
    reported = ours(tmp_path, composed(*COMMON, *settings, *IN_BACKWARD))
    assert len(reported) == STEPS
    for (loss, norm), mine in zip(theirs.numbers, reported, strict=True):
        assert mine["loss/global_avg"] == pytest.approx(loss, rel=1e-6)
        assert mine["grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert norm > 0.1


def groups_with_a_hook(frozen: str, folder: str) -> tuple[int, int, int]:
    """Micro-batches of a step; parameter groups that hand over their reduced buffers, and all of them."""
    from europa_exp.comm.fsdp_groups import groups
    from europa_exp.training.assemble import build_trainer

    trainer, _ = build_trainer(io.from_yaml(frozen), Path(folder))
    hooks = [group.fsdp._all_reduce_hook for group in groups(trainer.model_parts[0])]
    trainer.close()
    return trainer.gradient_accumulation_steps, sum(hook is not None for hook in hooks), len(hooks)


@pytest.mark.parametrize("accumulates", [False, True])
def test_no_reduced_buffer_of_a_micro_batch_is_kept(tmp_path: Path, accumulates: bool) -> None:
    """Where gradients accumulate on the host; without a lag they would all be kept until the step is over."""
    batch = ("training.global_batch_size=16",) if accumulates else ()
    cfg = composed(*COMMON, *IN_BACKWARD, "offload.fsdp_cpu=true", *batch)
    for micro_batches, hooks, groups in run_ranks(4, groups_with_a_hook, io.to_yaml(cfg), str(tmp_path)):
        assert (micro_batches > 1) == accumulates
        assert groups > 0
        assert hooks == (0 if accumulates else groups)


def break_off_and_go_on(frozen: str, folder: str) -> dict[str, Any]:
    """A step that raises after a backward pass, then a whole one; upstream's and our norm of the latter."""
    from torchtitan.distributed import utils

    from europa_exp.training.assemble import build_trainer

    trainer, _ = build_trainer(io.from_yaml(frozen), Path(folder))
    original = utils.clip_grad_norm_
    trainer.step = 1
    batches = trainer.batch_generator(trainer.dataloader)
    forward_backward = trainer.forward_backward_step

    def break_off(**kwargs: Any) -> torch.Tensor:
        forward_backward(**kwargs)
        raise KeyError("broken off")

    trainer.forward_backward_step = break_off
    raised = False
    try:
        trainer.train_step(batches)
    except KeyError:
        raised = True
    restored = utils.clip_grad_norm_ is original
    trainer.forward_backward_step = forward_backward
    norms: list[float] = []
    clip_ = trainer._norm.clip_

    def compare(parameters: list[torch.Tensor], max_norm: float, **kwargs: Any) -> torch.Tensor:
        theirs = original(parameters, 1e9, foreach=True, ep_enabled=True)
        ours = clip_(parameters, max_norm, **kwargs)
        norms.extend([theirs.item(), ours.item()])
        return ours

    trainer._norm.clip_ = compare
    trainer.train_step(batches)
    trainer.close()
    return {"raised": raised, "restored": restored, "norms": norms}


@pytest.mark.parametrize(
    "settings", [("training.global_batch_size=16",), ("offload.fsdp_cpu=true",)], ids=" ".join
)
def test_a_step_that_raises_leaves_nothing_in_the_next_norm(
    tmp_path: Path, settings: tuple[str, ...]
) -> None:
    cfg = composed(*COMMON, *IN_BACKWARD, *settings)
    for seen in run_ranks(4, break_off_and_go_on, io.to_yaml(cfg), str(tmp_path)):
        assert seen["raised"]
        assert seen["restored"]
        theirs, ours = seen["norms"]
        assert ours == pytest.approx(theirs, rel=1e-5)
