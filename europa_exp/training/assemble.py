"""The one place that knows every mechanism and puts them in order around torchtitan's trainer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torchtitan.protocols.model_spec import ModelSpec

from europa_exp.comm.accounting import CollectiveCounter
from europa_exp.comm.bf16_all_to_all import apply_bf16_all_to_all
from europa_exp.comm.compute_stream_gather import apply_compute_stream_gather
from europa_exp.comm.embedding_gather import skip_embedding_gather_in_backward
from europa_exp.comm.fp8_all_gather import apply_fp8_all_gather
from europa_exp.comm.gradient_norm import GradientNorm
from europa_exp.comm.node_local_reshard import apply_node_local_reshard
from europa_exp.config import schema
from europa_exp.cpu import device
from europa_exp.model import model_spec
from europa_exp.training.trainer import EuropaTrainer
from europa_exp.training.trainer_config import trainer_config


def build_trainer(
    cfg: schema.Config, run_dir: Path, *, prepare: Callable[[torch.nn.Module], None] | None = None
) -> tuple[EuropaTrainer, CollectiveCounter]:
    """A trainer of this rank with every mechanism that the configuration asks for.

    Args:
        cfg: a checked configuration.
        run_dir: the run folder.
        prepare: called with the model when every mechanism is in place, before parameters get memory.

    Returns:
        The trainer, and the counter of what its collectives carry.
    """
    counter = CollectiveCounter(timed=cfg.profiling.collectives)
    norm = None
    if cfg.optimizer.grad_norm is schema.GradNorm.in_backward:
        norm = GradientNorm(release_lag=cfg.comm.gradient_release_lag)
    spec = model_spec(cfg.model, device_type=device.device_type())
    spec = after_parallelize(spec, lambda model: _apply_mechanisms(model, cfg, counter))
    if prepare is not None:
        spec = after_parallelize(spec, prepare)
    trainer = EuropaTrainer(trainer_config(cfg, spec, run_dir), cfg.model, norm)
    return trainer, counter


def _apply_mechanisms(model: torch.nn.Module, cfg: schema.Config, counter: CollectiveCounter) -> None:
    """What has to happen after ``fully_shard`` and before parameters get memory, in this order."""
    device.prepare_model(model)
    comm = cfg.comm
    if comm.expert_all_gather is schema.ExpertAllGather.fp8:
        apply_fp8_all_gather(model)
    if comm.gradient_reduce.by_all_to_all:
        apply_bf16_all_to_all(
            model,
            experts_only=comm.gradient_reduce is schema.GradientReduce.expert_bf16_all_to_all,
            receive_on_compute_stream=cfg.allocator.receive_buffer_on_compute_stream,
            # The chunked loss accumulates the LM head's gradient in fp32 before it is reduced: nothing to gain, digits to lose.
            keep=("lm_head",) if cfg.training.loss_chunks > 1 else (),
        )
    if comm.node_local_reshard:
        apply_node_local_reshard(model, cfg.parallelism.gpus_per_node)
    if not comm.embedding_gather_in_backward:
        skip_embedding_gather_in_backward(model)
    if cfg.allocator.all_gather_on_compute_stream:
        apply_compute_stream_gather(model)
    # Last, so that it counts what the mechanisms above hand to the collectives.
    counter.install(model)


def after_parallelize(spec: ModelSpec, hook: Callable[[torch.nn.Module], None]) -> ModelSpec:
    """A model spec whose parallelised model is handed to ``hook``, before its parameters get memory."""
    parallelize = spec.parallelize_fn

    def parallelize_then_hook(model: torch.nn.Module, **kwargs: Any) -> torch.nn.Module:
        model = parallelize(model, **kwargs)
        hook(model)
        return model

    return replace(spec, parallelize_fn=parallelize_then_hook)
