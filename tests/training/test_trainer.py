"""Our trainer on real ranks: against torchtitan's plain one, and what it reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from compose import composed
from parity import train_plain
from ranks import run_ranks

from europa_exp.config import io
from europa_exp.config.schema import Config

pytestmark = pytest.mark.slow

REPORTED_ON_CPU = {
    "loss/global_avg",
    "loss/global_max",
    "grad_norm",
    "throughput/tokens_per_second_per_gpu",
    "throughput/tflops_per_gpu",
    "time/step_s",
    "time/data_s",
    "memory/peak_host_gib",
    "comm/all_gather_sent_gib",
    "comm/reduce_sent_gib",
    "tokens_seen",
}
ABSENT_ON_CPU = {
    "throughput/mfu",
    "memory/peak_active_gib",
    "memory/peak_reserved_gib",
    "memory/allocator_retries",
    "memory/ranks_with_retries",
}


def train_ours(frozen: str, folder: str) -> list[dict[str, Any]]:
    from europa_exp.comm.accounting import step_metrics
    from europa_exp.training.assemble import build_trainer

    trainer, counter = build_trainer(io.from_yaml(frozen), Path(folder))
    reported: list[dict[str, Any]] = []
    trainer.metrics_processor.attach(
        [lambda metrics, step: reported.append({"step": step, **metrics})],
        lambda: step_metrics(counter.take()),
    )
    trainer.train()
    trainer.close()
    return reported


def ours(tmp_path: Path, cfg: Config) -> list[dict[str, Any]]:
    world = cfg.parallelism.nodes * cfg.parallelism.gpus_per_node
    reports = run_ranks(world, train_ours, io.to_yaml(cfg), str(tmp_path))
    assert all(report == [] for report in reports[1:]), "only rank 0 reports"
    return reports[0]


def losses(reported: list[dict[str, Any]]) -> list[float]:
    return [metrics["loss/global_avg"] for metrics in reported]


def test_equals_torchtitans_trainer_bitwise(tmp_path: Path) -> None:
    cfg = composed("training.steps=5")
    plain = run_ranks(4, train_plain, io.to_yaml(cfg), str(tmp_path))[0]
    reported = ours(tmp_path, cfg)
    assert [(metrics["loss/global_avg"], metrics["grad_norm"]) for metrics in reported] == plain.numbers


def test_loss_falls_and_every_quantity_is_reported(tmp_path: Path) -> None:
    cfg = composed("training.steps=60")
    reported = ours(tmp_path, cfg)
    assert [metrics["step"] for metrics in reported] == list(range(1, 61))
    fallen = losses(reported)
    assert fallen[-1] <= fallen[0] - 1.0
    for metrics in reported:
        assert metrics.keys() >= REPORTED_ON_CPU
        assert not metrics.keys() & ABSENT_ON_CPU
    tokens = 4 * cfg.training.local_batch_size * cfg.training.seq_len
    assert [metrics["tokens_seen"] for metrics in reported] == [tokens * step for step in range(1, 61)]
    rate = tokens / 4 / reported[-1]["time/step_s"]
    assert reported[-1]["throughput/tokens_per_second_per_gpu"] == pytest.approx(rate)


def test_fp8_gather_halves_the_bytes_and_keeps_the_loss(tmp_path: Path) -> None:
    base = ours(tmp_path, composed("training.steps=10"))
    fp8 = ours(tmp_path, composed("training.steps=10", "comm=fp8"))
    assert losses(fp8) != losses(base), "the gathered weights were not quantised"
    assert abs(losses(fp8)[-1] - losses(base)[-1]) <= 0.01
    assert fp8[-1]["comm/all_gather_sent_gib"] < base[-1]["comm/all_gather_sent_gib"]
    assert fp8[-1]["comm/reduce_sent_gib"] == base[-1]["comm/reduce_sent_gib"]


@pytest.mark.parametrize(
    "overrides",
    [
        ["training.activation_checkpoint=full"],
        ["training.activation_checkpoint=selective"],
        ["offload.fsdp_cpu=true"],
        ["training.global_batch_size=16"],
        ["training.loss_chunks=4"],
        ["parallelism.reshard_after_forward=never"],
        ["parallelism.data_parallel_replicate_degree=2", "parallelism.data_parallel_shard_degree=2"],
        ["data=synthetic", "data.mean_document_length=50"],
        ["training.param_precision=float32"],
        ["model.score_function=softmax", "model.load_balance_coeff=0", "model.normalize_top_k=false"],
    ],
    ids=lambda overrides: overrides[0],
)
@pytest.mark.parametrize("comm", ["bf16", "fp8"])
def test_every_setting_trains(tmp_path: Path, overrides: list[str], comm: str) -> None:
    reported = ours(tmp_path, composed("training.steps=3", f"comm={comm}", *overrides))
    assert len(reported) == 3
    assert losses(reported)[-1] < 6.5


def test_full_recompute_and_offload_change_no_number(tmp_path: Path) -> None:
    base = losses(ours(tmp_path, composed("training.steps=5")))
    for override in (
        "training.activation_checkpoint=full",
        "offload.fsdp_cpu=true",
        "parallelism.reshard_after_forward=always",
    ):
        assert losses(ours(tmp_path, composed("training.steps=5", override))) == base, override


def test_first_loss_is_the_same_on_any_layout(tmp_path: Path) -> None:
    """Same full tensors and same rows of a step, whatever the number of ranks; only the order of sums differs."""
    one_rank = [
        "parallelism.nodes=1",
        "parallelism.gpus_per_node=1",
        "parallelism.data_parallel_shard_degree=1",
    ]
    layouts = [
        [*one_rank, "parallelism.expert_parallel_degree=1", "training.global_batch_size=8"],
        ["training.global_batch_size=8", "parallelism.expert_parallel_degree=1"],
        ["training.global_batch_size=8", "parallelism.expert_parallel_degree=2"],
        ["training.global_batch_size=8", "parallelism.expert_parallel_degree=4"],
    ]
    first = [
        losses(ours(tmp_path, composed("training.steps=1", "training.param_precision=float32", *layout)))[0]
        for layout in layouts
    ]
    assert first == pytest.approx([first[0]] * len(first), abs=1e-5)


def test_goes_on_from_its_own_checkpoint_bitwise(tmp_path: Path) -> None:
    # Without warm-up: its length follows the number of steps, which the two halves do not share.
    same = ["optimizer.warmup_steps=0", "training.checkpoint_every=3"]
    unbroken = losses(ours(tmp_path / "a", composed("training.steps=6", *same)))
    ours(tmp_path / "b", composed("training.steps=3", *same))
    resumed = ours(tmp_path / "b", composed("training.steps=6", *same))
    assert [metrics["step"] for metrics in resumed] == [4, 5, 6]
    assert losses(resumed) == unbroken[3:]
