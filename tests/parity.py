"""What parity is measured against: torchtitan's own trainer on our model and data, with no mechanism of ours."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from europa_exp.config import io


@dataclass
class Trained:
    """What one rank saw: losses and gradient norms over all ranks, and its shards of the first step's gradients."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def numbers(self) -> list[tuple[float, float]]:
        """Of each step: loss, gradient norm."""
        return list(zip(self.losses, self.norms, strict=True))

    def loss_differs_by(self, other: Trained) -> float:
        return max(abs(mine - its) for mine, its in zip(self.losses, other.losses, strict=True))

    def same_gradients(self, other: Trained) -> bool:
        assert self.gradients.keys() == other.gradients.keys()
        return all(np.array_equal(self.gradients[name], other.gradients[name]) for name in self.gradients)

    def close_gradients(self, other: Trained) -> None:
        """The same bf16 gradients, summed in fp32 in another order."""
        assert self.gradients.keys() == other.gradients.keys()
        for name, gradient in other.gradients.items():
            np.testing.assert_allclose(self.gradients[name], gradient, rtol=1e-5, atol=1e-7, err_msg=name)


def plain_trainer(frozen: str, folder: str, **metrics: Any) -> Any:
    """torchtitan's ``Trainer`` with its own metrics (``metrics``: fields of their configuration) for ``frozen``, YAML."""
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.trainer import Trainer

    from europa_exp.cpu import device
    from europa_exp.model import model_spec
    from europa_exp.training.assemble import after_parallelize
    from europa_exp.training.trainer_config import trainer_config

    cfg = io.from_yaml(frozen)
    spec = after_parallelize(model_spec(cfg.model, device_type=device.device_type()), device.prepare_model)
    config = trainer_config(cfg, spec, Path(folder))
    return Trainer(replace(config, metrics=MetricsProcessor.Config(**{"log_freq": 1, **metrics})))


def train_plain(frozen: str, folder: str) -> Trained:
    return watched(plain_trainer(frozen, folder))


def watched(trainer: Any) -> Trained:
    """Train to the end and close the trainer."""
    trained = Trained()
    (model,) = trainer.model_parts
    log, step = trainer.metrics_processor.log, trainer.optimizers.step

    def logged(at: int, loss: float, highest: float, norm: float, **kwargs: Any) -> None:
        trained.losses.append(loss)
        trained.norms.append(norm)
        log(at, loss, highest, norm, **kwargs)

    def stepped(*args: Any, **kwargs: Any) -> None:
        if not trained.gradients:
            for name, param in model.named_parameters():
                assert param.grad is not None, name
                trained.gradients[name] = param.grad.to_local().numpy().copy()
        step(*args, **kwargs)

    trainer.metrics_processor.log, trainer.optimizers.step = logged, stepped
    trainer.train()
    trainer.close()
    return trained
