"""Compose configurations in tests the way the command line does."""

from __future__ import annotations

from pathlib import Path

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from europa_exp.config import register, schema

CONF = Path(__file__).resolve().parent.parent / "conf"


def composed(*overrides: str) -> schema.Config:
    """The typed configuration of ``python launch.py OVERRIDES``."""
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("config", overrides=list(overrides))
    result = OmegaConf.to_object(cfg)
    assert isinstance(result, schema.Config)
    return result
