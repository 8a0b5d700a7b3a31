"""Compose configurations in tests the way the command line does."""

from __future__ import annotations

from pathlib import Path

from europa_exp.config.schema import Config
from europa_exp.launch.compose import resolve
from europa_exp.launch.plugins import composer

CONF = Path(__file__).resolve().parent.parent / "conf"


def composed(*overrides: str) -> Config:
    """The typed configuration of ``python launch.py OVERRIDES``."""
    with composer(CONF) as compose:
        return resolve(compose.compose(overrides).cfg)
