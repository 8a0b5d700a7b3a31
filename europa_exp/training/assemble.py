"""The one place that knows every mechanism and puts them in order around torchtitan's trainer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torchtitan.protocols.model_spec import ModelSpec

from europa_exp.comm.accounting import CollectiveCounter
from europa_exp.comm.fp8_all_gather import apply_fp8_all_gather
from europa_exp.config import schema
from europa_exp.cpu import device
from europa_exp.model import model_spec
from europa_exp.training.trainer import EuropaTrainer
from europa_exp.training.trainer_config import trainer_config


def build_trainer(cfg: schema.Config, run_dir: Path) -> tuple[EuropaTrainer, CollectiveCounter]:
    """A trainer of this rank with every mechanism that the configuration asks for.

    Args:
        cfg: a checked configuration.
        run_dir: the run folder.

    Returns:
        The trainer, and the counter of what its collectives carry.
    """
    counter = CollectiveCounter()
    spec = model_spec(cfg.model, device_type=device.device_type())
    spec = after_parallelize(spec, lambda model: _apply_mechanisms(model, cfg, counter))
    trainer = EuropaTrainer(trainer_config(cfg, spec, run_dir), cfg.model)
    return trainer, counter


def _apply_mechanisms(model: torch.nn.Module, cfg: schema.Config, counter: CollectiveCounter) -> None:
    """What has to happen after ``fully_shard`` and before parameters get memory, in this order."""
    device.prepare_model(model)
    if cfg.comm.expert_all_gather is schema.ExpertAllGather.fp8:
        apply_fp8_all_gather(model)
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
