"""Models built on the meta device after torchtitan's trainer configuration, without ranks."""

from __future__ import annotations

from pathlib import Path

import torch
from omegaconf import OmegaConf
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.config.configs import DebugConfig, TrainingConfig
from torchtitan.trainer import Trainer

from europa_exp.config import schema
from europa_exp.model import model_spec

CONF = Path(__file__).parents[2] / "conf" / "model"


def configured(
    *overrides: str, name: str = "debug", seq_len: int, device_type: str = "cpu", seed: int | None = 0
) -> tuple[schema.Model, Trainer.Config]:
    """conf/model/NAME.yaml with ``field=value`` overrides, and torchtitan's configuration updated as the trainer does it."""
    model = OmegaConf.to_object(
        OmegaConf.merge(
            OmegaConf.structured(schema.Model),
            OmegaConf.load(CONF / f"{name}.yaml"),
            OmegaConf.from_dotlist(list(overrides)),
        )
    )
    spec = model_spec(model, device_type=device_type)
    config = Trainer.Config(
        model_spec=spec,
        training=TrainingConfig(seq_len=seq_len, local_batch_size=1, disable_cuda_graphs=True),
        debug=DebugConfig(seed=seed),
        loss=CrossEntropyLoss.Config(global_vocab_size=model.vocab_size),
    )
    spec.model.update_from_config(config=config)
    return model, config


def build(config: Trainer.Config, device: str) -> torch.nn.Module:
    """The model on ``device``: without memory on "meta", initialised on "cpu"."""
    assert config.model_spec is not None
    with torch.device("meta"):
        model = config.model_spec.model.build()
    model.verify_module_protocol()
    if device != "meta":
        model.to_empty(device=device)
        with torch.no_grad():
            model.init_weights()
    return model
