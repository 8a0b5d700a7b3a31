"""Stopping and going on: on real ranks, with real checkpoints."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from compose import composed
from ranks import run_ranks

from europa_exp.config import io
from europa_exp.config.schema import Config

pytestmark = pytest.mark.slow

TRAINING = ("training.steps=8", "training.checkpoint_every=3", "training.log_every=1")


def train(frozen: str, folder: str, stop_at: int | None, who: int) -> dict[str, Any]:
    """Train; rank ``who`` is asked to stop while step ``stop_at`` runs. What this rank saw."""
    import torch

    from europa_exp.comm.accounting import step_metrics
    from europa_exp.training.assemble import build_trainer
    from europa_exp.training.stopping import Stopped

    trainer, counter = build_trainer(io.from_yaml(frozen), Path(folder))
    reported: dict[int, dict[str, float]] = {}
    trainer.metrics_processor.attach(
        [lambda metrics, step: reported.__setitem__(step, metrics)], lambda: step_metrics(counter.take())
    )
    trainer.stop_when(
        lambda: stop_at is not None and int(os.environ["RANK"]) == who and trainer.step >= stop_at
    )
    drawn: dict[int, float] = {}
    forward = trainer.forward_backward_step

    def spy(*args: Any, **kwargs: Any) -> Any:
        drawn[trainer.step] = torch.rand(()).item()
        return forward(*args, **kwargs)

    trainer.forward_backward_step = spy
    stopped = None
    try:
        trainer.train()
    except Stopped as end:
        stopped = (end.step, end.saved, end.code)
    trainer.close()
    return {"reported": reported, "stopped": stopped, "drawn": drawn, "step": trainer.step}


def on_ranks(cfg: Config, folder: Path, stop_at: int | None = None, who: int = 0) -> list[dict[str, Any]]:
    world = cfg.parallelism.nodes * cfg.parallelism.gpus_per_node
    return run_ranks(world, train, io.to_yaml(cfg), str(folder), stop_at, who)


def losses(seen: dict[str, Any]) -> dict[int, tuple[float, float, float]]:
    return {
        step: (m["loss/global_avg"], m["grad_norm"], m["tokens_seen"]) for step, m in seen["reported"].items()
    }


def two_ranks(*overrides: str) -> Config:
    layout = (
        "parallelism.nodes=1",
        "parallelism.gpus_per_node=2",
        "parallelism.data_parallel_shard_degree=2",
        "parallelism.expert_parallel_degree=2",
    )
    return composed(*TRAINING, *layout, *overrides)


@pytest.mark.parametrize("mode", ["training.checkpoint_async=false", "training.checkpoint_async=true"])
def test_one_rank_is_asked_all_stop_and_go_on_bitwise(tmp_path: Path, mode: str) -> None:
    cfg = two_ranks(mode)
    unbroken = on_ranks(cfg, tmp_path / "unbroken")
    assert [seen["stopped"] for seen in unbroken] == [None, None]

    first = on_ranks(cfg, tmp_path / "run", stop_at=4, who=1)
    assert first[0]["stopped"] == first[1]["stopped"]
    step, saved, code = first[0]["stopped"]
    assert (saved, code) == (True, 85)
    assert 4 <= step <= 5, "at most one step after the one in which it was asked"
    assert (tmp_path / "run" / "checkpoints" / f"step-{step}" / ".metadata").exists()

    second = on_ranks(cfg, tmp_path / "run")
    expected, before, after = losses(unbroken[0]), losses(first[0]), losses(second[0])
    assert sorted(after) == list(range(step + 1, 9)), "it goes on, it does not begin again"
    assert before | after == expected
    for rank in (0, 1):
        drawn = first[rank]["drawn"] | second[rank]["drawn"]
        assert drawn == unbroken[rank]["drawn"], "random numbers too"
    assert len(set(unbroken[0]["drawn"].values())) == 8


def test_a_checkpoint_that_was_cut_is_passed_over(tmp_path: Path) -> None:
    cfg = two_ranks()
    on_ranks(cfg, tmp_path, stop_at=6, who=0)
    saved = sorted(int(p.name[5:]) for p in (tmp_path / "checkpoints").iterdir())
    assert saved[0] == 3
    for step in saved[1:]:
        (tmp_path / "checkpoints" / f"step-{step}" / ".metadata").unlink()
    second = on_ranks(cfg, tmp_path)
    assert min(losses(second[0])) == 4
    assert second[0]["step"] == 8


def test_without_checkpoints_it_stops_and_saves_nothing(tmp_path: Path) -> None:
    seen = on_ranks(two_ranks("training.checkpoint_every=0"), tmp_path, stop_at=2, who=1)
    assert seen[0]["stopped"] == seen[1]["stopped"]
    assert seen[0]["stopped"][1] is False
    assert not (tmp_path / "checkpoints").exists()


def test_asked_before_the_first_step_of_an_attempt_nothing_is_lost(tmp_path: Path) -> None:
    cfg = two_ranks()
    on_ranks(cfg, tmp_path, stop_at=4, who=0)
    before = {p.name for p in (tmp_path / "checkpoints").iterdir()}
    times = {p: p.stat().st_mtime_ns for p in (tmp_path / "checkpoints").rglob("*")}
    again = on_ranks(cfg, tmp_path, stop_at=0, who=1)
    assert again[0]["stopped"][0] - again[0]["step"] == 0
    assert len(again[0]["reported"]) <= 1, "the first step may run while the ranks agree"
    kept = {p: p.stat().st_mtime_ns for p in times}
    assert kept == times, "a complete checkpoint is never written over"
    assert before <= {p.name for p in (tmp_path / "checkpoints").iterdir()}


def test_four_ranks_stop_and_two_go_on(tmp_path: Path) -> None:
    """Rows of a step are the same on any number of ranks, so losses agree up to rounding."""
    rows = ("training.global_batch_size=8", "training.local_batch_size=2", "training.param_precision=float32")
    four = composed(*TRAINING, *rows)
    assert four.parallelism.nodes * four.parallelism.gpus_per_node == 4
    unbroken = losses(on_ranks(four, tmp_path / "unbroken")[0])
    first = losses(on_ranks(four, tmp_path / "run", stop_at=4)[0])
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path / "run", copy)
    second = losses(on_ranks(two_ranks(*rows), copy)[0])
    assert set(first) | set(second) == set(range(1, 9))
    assert not set(first) & set(second)
    for step, values in second.items():
        assert values[:2] == pytest.approx(unbroken[step][:2], rel=1e-4)
        assert values[2] == unbroken[step][2], "tokens are counted over all ranks, old and new"


def fail_to_be_finite(frozen: str, folder: str) -> str:
    import torch

    from europa_exp.training.assemble import build_trainer
    from europa_exp.training.stopping import NonFiniteLossError

    trainer, _ = build_trainer(io.from_yaml(frozen), Path(folder))
    with torch.no_grad():
        for parameter in trainer.model_parts[0].parameters():
            parameter.fill_(float("nan"))
    try:
        trainer.train()
    except NonFiniteLossError as error:
        return str(error)
    return "trained"


def test_a_loss_that_is_not_finite_has_a_type_of_its_own(tmp_path: Path) -> None:
    cfg = two_ranks("training.checkpoint_every=0")
    found = run_ranks(2, fail_to_be_finite, io.to_yaml(cfg), str(tmp_path))
    assert all("step 1" in message and "nan" in message for message in found), found
