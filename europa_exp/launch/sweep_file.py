"""Sweep files: `sweeps/NAME.yaml`, used as ``python launch.py -m +sweeps=NAME``.

Three keys, each of them optional::

    params:                       # a grid: every value of one with every value of the others
      comm: [bf16, fp8]           # a list holds plain values ...
      nccl.max_ctas: range(8,33,8)  # ... and text is Hydra's sweep grammar (a,b | range() | glob() | choice())
    points:                       # listed points: values that go together
      - {training.seq_len: 128, training.local_batch_size: 4}
      - {training.seq_len: 256, training.local_batch_size: 2}
    exclude:                      # a point is left out if it meets all the conditions of one entry
      - {comm: fp8, nccl.max_ctas: [8, 16]}   # a list means any of these

With both, every listed point runs with every combination of the grid. Conditions look at the composed point, so they may
name any group or field, also one that the sweep doesn't vary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.object_type import ObjectType
from hydra.errors import ConfigCompositionException
from hydra.plugins.config_source import ConfigLoadError, ConfigResult

from europa_exp.config.errors import Problem
from europa_exp.launch.fields import hint_of, near
from europa_exp.launch.override_problems import near_fields, type_problem
from europa_exp.launch.overrides import write

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from europa_exp.launch.compose import Composition
    from europa_exp.launch.overrides import Options

GROUP = "sweeps"
SCHEME = "sweeps"
_KEYS = ("params", "points", "exclude")


@dataclass
class SweepFile:
    """The content of a sweep file; empty when a call uses none."""

    name: str | None = None
    params: dict[str, Any] = field(default_factory=dict)
    points: list[dict[str, Any]] = field(default_factory=list)
    exclude: list[dict[str, Any]] = field(default_factory=list)


class SweepSource(FileConfigSource):
    """Shows Hydra the folder `sweeps/` as the group ``sweeps``, whose options fill the sweeper's own settings.

    (The repository's root on the search path would make every folder of it a group.)
    """

    @staticmethod
    def scheme() -> str:
        return SCHEME

    def available(self) -> bool:
        return (Path(self.path) / GROUP).is_dir()

    def is_group(self, config_path: str) -> bool:
        return config_path == "" or (self._mine(config_path) and super().is_group(config_path))

    def is_config(self, config_path: str) -> bool:
        return self._mine(config_path) and super().is_config(config_path)

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        if config_path == "":
            return [GROUP] if results_filter in (None, ObjectType.GROUP) and self.available() else []
        return super().list(config_path, results_filter) if self._mine(config_path) else []

    def load_config(self, config_path: str) -> ConfigResult:
        if not self._mine(config_path):
            raise ConfigLoadError(f"Config not found : {config_path}")
        result = super().load_config(config_path)
        if problem := _shape_problem(result.config, config_path):
            raise ConfigCompositionException(problem)
        result.header["package"] = "hydra.sweeper"
        return result

    @staticmethod
    def _mine(config_path: str) -> bool:
        return config_path == GROUP or config_path.startswith(f"{GROUP}/")


def _shape_problem(content: Any, where: str) -> str | None:
    """What is wrong with the outer form of a sweep file, in one sentence."""
    from omegaconf import OmegaConf

    data = OmegaConf.to_container(content, resolve=False)
    if not isinstance(data, dict):
        return f"{where}.yaml: a sweep file is a mapping with {', '.join(_KEYS)}"
    for key in map(str, data):
        if key not in _KEYS:
            hint = f"; perhaps {near(str(key), _KEYS)[0]} was meant" if near(str(key), _KEYS) else ""
            return f"{where}.yaml: there is no key '{key}' in a sweep file{hint}. Keys: {', '.join(_KEYS)}"
    if not isinstance(data.get("params") or {}, dict):
        return f"{where}.yaml: params is a mapping of a field or group to its values"
    for key in ("points", "exclude"):
        entries = data.get(key) or []
        if not isinstance(entries, list) or not all(isinstance(e, dict) and e for e in entries):
            return f"{where}.yaml: {key} is a list of mappings of fields or groups to values"
    if not data.get("params") and not data.get("points"):
        return f"{where}.yaml: the file has neither params nor points, so there is nothing to run"
    return None


def read(hydra_node: Any) -> SweepFile:
    """The sweep file that a composition chose, out of Hydra's own node of it."""
    from omegaconf import OmegaConf

    node = OmegaConf.to_container(hydra_node.sweeper, resolve=False)
    name = hydra_node.runtime.choices.get(GROUP)
    assert isinstance(node, dict)
    return SweepFile(
        name=name,
        params=dict(node.get("params") or {}),
        points=list(node.get("points") or []),
        exclude=list(node.get("exclude") or []),
    )


def grid(params: Mapping[str, Any]) -> list[str]:
    """The grid of a sweep file as overrides in Hydra's sweep grammar."""
    out = []
    for key, value in params.items():
        if isinstance(value, list):
            out.append(f"{key}=choice({','.join(write(v) for v in value)})")
        elif isinstance(value, str):
            out.append(f"{key}={value}")
        else:
            out.append(f"{key}={write(value)}")
    return out


def listed(points: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The listed points of a sweep file as overrides; values are taken as they are."""
    return [[f"{key}={write(value)}" for key, value in point.items()] for point in points]


# -------------------------------------------------------------------------------------------------------------- excluding


def condition_problems(exclude: Sequence[Mapping[str, Any]], options: Options) -> list[Problem]:
    """Conditions that name what doesn't exist, so could never be met."""
    out: list[Problem] = []
    for i, entry in enumerate(exclude, start=1):
        for key, wanted in entry.items():
            for value in wanted if isinstance(wanted, list) else [wanted]:
                problem = _condition_problem(str(key), value, options)
                if problem:
                    where = f"exclude, entry {i}: {problem.rule}"
                    out.append(Problem(problem.field, problem.value, where, problem.way_out))
    return out


def _condition_problem(key: str, value: Any, options: Options) -> Problem | None:
    if choices := options(key):
        if value in choices:
            return None
        return Problem(key, value, "there is no such option", f"Options: {', '.join(choices)}")
    if hint_of(key) is None:
        return Problem(key, value, "there is no such field or group", near_fields(key))
    return type_problem(key, value)


def excluded_by(composition: Composition, exclude: Sequence[Mapping[str, Any]]) -> int | None:
    """Number (from 0) of the first entry whose conditions this point meets all, or None."""
    for i, entry in enumerate(exclude):
        if all(_meets(composition, str(key), wanted) for key, wanted in entry.items()):
            return i
    return None


def _meets(composition: Composition, key: str, wanted: Any) -> bool:
    from omegaconf import OmegaConf

    from europa_exp.config.io import plain

    if key in composition.choices:
        actual = composition.choices[key]
    else:
        actual = plain(OmegaConf.select(composition.cfg, key, default=None))
    return any(_equal(actual, value) for value in (wanted if isinstance(wanted, list) else [wanted]))


def _equal(actual: Any, wanted: Any) -> bool:
    if isinstance(actual, bool) or isinstance(wanted, bool) or actual is None or wanted is None:
        return actual is wanted
    if isinstance(actual, (int, float)) and isinstance(wanted, str):
        return str(actual) == wanted
    if isinstance(actual, str):
        return actual == str(wanted)
    return bool(actual == wanted)
