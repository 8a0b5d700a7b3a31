"""Our sweeper and launcher, as Hydra plugins: Hydra parses the call and composes, these two do the rest.

The sweeper takes the sweep apart and checks all points; only then does it hand them to the launcher, which submits. Neither
writes anything of Hydra's own.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra import initialize_config_dir
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.plugins.sweeper import Sweeper
from omegaconf import DictConfig, OmegaConf

from europa_exp.config import register as register_schema
from europa_exp.launch import conf_files, sweep_file
from europa_exp.launch.compose import Composer
from europa_exp.launch.expand import Plan, make_plan

if TYPE_CHECKING:
    from hydra.types import HydraContext, TaskFunction

_NAMESPACE = "hydra_plugins.europa_exp"
"""Hydra makes plugins of this name space only; registered classes say that they belong to it."""

_root = Path.cwd()


@dataclass
class Outcome:
    """What became of a call, for the process's exit code."""

    code: int = 0
    error: Exception | None = None
    """Kept for `launch.main` to raise: inside a job Hydra would print it in its own way."""

    def take(self, work: Callable[[], int]) -> int:
        """Do the work and keep what became of it."""
        try:
            self.code = work()
        except Exception as e:
            self.error, self.code = e, 1
        return self.code


outcome = Outcome()
"""Hydra returns nothing from a call, so the launcher leaves the exit code here."""

hand_over: Callable[[Plan], int] | None = None
"""What the launcher does with checked points; `launch.main` sets it."""


class EuropaLauncher(Launcher):
    """Hands checked points to `launch.submit`; the same path for single runs and for sweeps."""

    def __init__(self) -> None:
        self._composer: Composer | None = None
        self._loader: Any = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._loader = hydra_context.config_loader
        self._composer = Composer(self._loader, plain_list(config.hydra.overrides.hydra))

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """For other sweepers: compose and check these points, then submit them all."""
        assert self._composer is not None
        points = []
        for overrides in job_overrides:
            points += make_plan(self._composer, overrides, multirun=False, loader=self._loader).points
        code = self.submit(Plan(points, None))
        returned = []
        for overrides in job_overrides:
            job = JobReturn(overrides=list(overrides), status=JobStatus.COMPLETED)
            job.return_value = code
            returned.append(job)
        return returned

    def submit(self, plan: Plan) -> int:
        """Submit checked points and return the exit code."""
        assert hand_over is not None
        return outcome.take(functools.partial(hand_over, plan))


class EuropaSweeper(Sweeper):
    """Takes sweeps apart, composes and checks every point, and only then lets the launcher have them."""

    def __init__(self, params: Any = None, points: Any = None, exclude: Any = None) -> None:
        self._launcher: Launcher | None = None
        self._context: HydraContext | None = None
        self._config: DictConfig | None = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._context = hydra_context
        self._config = config
        self._launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> Any:
        """Submit all points of a sweep. Raises ConfigError, with nothing submitted, if any of them can't run."""
        assert self._context is not None
        assert self._config is not None
        assert isinstance(self._launcher, EuropaLauncher)
        plan = plan_call(self._context.config_loader, self._config, arguments, multirun=True)
        return self._launcher.submit(plan)


def plan_call(loader: Any, config: DictConfig, arguments: Sequence[str], *, multirun: bool) -> Plan:
    """The checked points of a call that Hydra has composed once. Raises ConfigError."""
    composer = Composer(loader, plain_list(config.hydra.overrides.hydra))
    return make_plan(
        composer,
        arguments,
        multirun=multirun,
        sweep_file=sweep_file.read(config.hydra),
        base=composer.default(),
        loader=loader,
    )


def plain_list(node: Any) -> list[str]:
    """Overrides as Hydra keeps them, their ``${...}`` unresolved."""
    texts = OmegaConf.to_container(node, resolve=False)
    assert isinstance(texts, list)
    return [str(text) for text in texts]


# ----------------------------------------------------------------------------------------------------------- registering


class OurSearchPath(SearchPathPlugin):
    """Puts the folder `sweeps/` on Hydra's search path, and lets `conf/` be read by our own source."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for entry in search_path.get_path():
            if entry.provider == "main":
                entry.path = f"{conf_files.SCHEME}://{str(entry.path).removeprefix('file://')}"
        search_path.append(provider="sweeps", path=f"{sweep_file.SCHEME}://{_root}")


def register(root: Path) -> None:
    """Make schema, sweeper, launcher and the `sweeps/` folder under ``root`` known to Hydra. May be called again."""
    global _root
    _root = root.resolve()
    register_schema()
    _enter_namespace()
    plugins = Plugins.instance()
    for cls in (EuropaLauncher, EuropaSweeper):
        cls.__module__ = _NAMESPACE
        plugins.register(cls)
    plugins.register(sweep_file.SweepSource)
    plugins.register(conf_files.ConfSource)
    plugins.register(OurSearchPath)


@contextlib.contextmanager
def composer(conf: Path) -> Iterator[Composer]:
    """A composer for a `conf/` folder outside `hydra.main` (reruns, tests, tools)."""
    register(conf.parent)
    with initialize_config_dir(str(conf), version_base="1.3", job_name="launch"):
        yield Composer(GlobalHydra.instance().config_loader())


def _enter_namespace() -> None:
    """Let this module be found as `hydra_plugins.europa_exp` too, beside whatever plugins are installed."""
    package, _, name = _NAMESPACE.rpartition(".")
    try:
        parent = importlib.import_module(package)
    except ModuleNotFoundError:
        parent = types.ModuleType(package)
        parent.__path__ = []
        sys.modules[package] = parent
    sys.modules[_NAMESPACE] = sys.modules[__name__]
    setattr(parent, name, sys.modules[__name__])
