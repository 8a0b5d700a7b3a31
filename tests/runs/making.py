"""Run folders for tests, made the way a submit makes them."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

from compose import composed

from europa_exp.config.schema import Config
from europa_exp.runs.folder import RunFolder, create_run
from europa_exp.runs.provenance import CodeState

CODE = CodeState(
    commit="1" * 40, fingerprint="code-1", branch="main", dirty=True, diff="diff --git a/x b/x\n"
)


_composed = functools.cache(composed)


def config(*overrides: str) -> Config:
    """A new configuration, composed from conf/."""
    return copy.deepcopy(_composed(*overrides))


def make_run(
    runs: Path, cfg: Config | None = None, name: str = "debug-0123456789ab", **fields: Any
) -> RunFolder:
    """A run folder with plain values for what is not given."""
    given: dict[str, Any] = {
        "overrides": ["training.steps=3"],
        "identity": "0123456789ab",
        "sweep": None,
        "repeat": 0,
        "command": ["launch.py", "training.steps=3"],
        "code": CODE,
        "data_fingerprint": "data-1",
    }
    return create_run(runs, cfg or config(), name=name, **(given | fields))
