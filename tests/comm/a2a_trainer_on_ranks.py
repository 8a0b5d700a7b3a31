"""Trainings of a rank whose gradients a bf16 all-to-all reduces, or not; functions that tests run on several ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from europa_exp.config import io


@dataclass
class Trained:
    """What a rank saw: losses over all ranks, its shards of the first step's gradients, bytes that it handed over."""

    losses: list[float] = field(default_factory=list)
    gradients: dict[str, np.ndarray] = field(default_factory=dict)
    reduce_gib: float = 0.0
    reduced_in: dict[str, str] = field(default_factory=dict)
    """By parameter: the collective that its group's gradients take."""


def train_plain(frozen: str, folder: str) -> Trained:
    """torchtitan's trainer with its own metrics on our model and data, without any mechanism of ours."""
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.trainer import Trainer

    from europa_exp.cpu import device
    from europa_exp.model import model_spec
    from europa_exp.training.assemble import after_parallelize
    from europa_exp.training.trainer_config import trainer_config

    cfg = io.from_yaml(frozen)
    spec = after_parallelize(model_spec(cfg.model, device_type="cpu"), device.prepare_model)
    config = trainer_config(cfg, spec, Path(folder))
    return _train(Trainer(replace(config, metrics=MetricsProcessor.Config(log_freq=1))))


def train(frozen: str, folder: str, keep: bool = True) -> Trained:
    """Our trainer; without `keep` the all-to-all takes every group."""
    from europa_exp.comm.accounting import step_metrics
    from europa_exp.training import assemble

    if not keep:
        assemble.apply_bf16_all_to_all = partial(_apply_to_all_groups, assemble.apply_bf16_all_to_all)
    trainer, counter = assemble.build_trainer(io.from_yaml(frozen), Path(folder))
    trained = _train(trainer)
    trained.reduce_gib = step_metrics(counter.take()).get("comm/reduce_sent_gib", 0.0)
    return trained


def _apply_to_all_groups(apply: Any, model: Any, keep: Sequence[str], **options: Any) -> int:
    assert keep
    return apply(model, **options)


def _train(trainer: Any) -> Trained:
    from europa_exp.comm.fsdp_groups import groups

    trained = Trained()
    log, step = trainer.metrics_processor.log, trainer.optimizers.step
    (model,) = trainer.model_parts
    names = {module: name for name, module in model.named_modules()}
    for group in groups(model):
        comm = group.reduce_scatter
        while hasattr(comm, "inner"):
            comm = comm.inner
        for param in group.fsdp.fsdp_params:
            name = f"{names[param._module_info.module]}.{param._module_info.param_name}"
            trained.reduced_in[name] = getattr(comm, "collective", "reduce_scatter")

    def logged(at: int, loss: float, *args: Any, **kwargs: Any) -> None:
        trained.losses.append(loss)
        log(at, loss, *args, **kwargs)

    def stepped(*args: Any, **kwargs: Any) -> None:
        if not trained.gradients:
            for name, param in model.named_parameters():
                trained.gradients[name] = param.grad.to_local().numpy().copy()
        step(*args, **kwargs)

    trainer.metrics_processor.log, trainer.optimizers.step = logged, stepped
    trainer.train()
    trainer.close()
    return trained
