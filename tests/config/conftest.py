"""Compositions as the command line makes them, without a job."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from europa_exp.config import register
from europa_exp.config.schema import Config

CONF = Path(__file__).parents[2] / "conf"


@pytest.fixture(scope="session")
def make():
    """make("comm=fp8", ...) -> Config, composed from conf/ with these overrides."""
    register()
    cache: dict[tuple[str, ...], str] = {}

    def composed(*overrides: str) -> Config:
        if overrides not in cache:
            with initialize_config_dir(str(CONF), version_base="1.3"):
                cache[overrides] = OmegaConf.to_yaml(compose("config", overrides=list(overrides)))
        return OmegaConf.to_object(
            OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.create(cache[overrides]))
        )

    return composed
