"""Compositions as the command line makes them, without a job."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest

from europa_exp.config.schema import Config
from europa_exp.launch.compose import resolve
from europa_exp.launch.plugins import composer

CONF = Path(__file__).parents[2] / "conf"


@pytest.fixture(scope="session")
def make() -> Callable[..., Config]:
    """make("comm=fp8", ...) -> a new Config, composed from conf/ with these overrides and not yet checked."""
    made: dict[tuple[str, ...], Config] = {}
    with composer(CONF) as hydra:
        pass  # the composer outlives Hydra's global state, which other tests want for themselves

    def composed(*overrides: str) -> Config:
        if overrides not in made:
            made[overrides] = resolve(hydra.compose(overrides).cfg)
        return copy.deepcopy(made[overrides])

    return composed
