"""From overrides to typed configurations: Hydra composes, this module resolves and says what doesn't fit.

`Composer` composes many points quickly: points that choose the same groups share one composition of `conf/`, on a copy of
which their field overrides are applied, as Hydra's own last step does.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any, cast

from europa_exp.config.errors import ConfigError, Problem
from europa_exp.launch.override_problems import near_fields, problems_of, wrong_booleans
from europa_exp.launch.overrides import key_of, parse

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from europa_exp.config.schema import Config

CONFIG_NAME = "config"
GLOBAL_GROUPS = ("experiment",)
"""Groups whose options set fields of other groups and leave nothing under their own name."""


@dataclass
class Composition:
    """What Hydra composed: interpolations and missing values still in place."""

    cfg: DictConfig
    choices: dict[str, str | None]
    """Group -> chosen option."""


class Composer:
    """Composes points from `conf/`.

    ``loader`` is Hydra's config loader; ``fixed`` are overrides of Hydra's own settings that all points share.
    """

    def __init__(self, loader: Any, fixed: Sequence[str] = ()) -> None:
        self.loader = loader
        self._fixed = list(fixed)
        self._options: dict[str, list[str]] = {}
        self._bases: dict[tuple[str, ...], tuple[DictConfig, dict[str, str | None]]] = {}
        self._personal: dict[str, dict[str, Any]] | None = None

    def options(self, group: str) -> list[str]:
        """Options of a group of `conf/`; empty for a name that is no group."""
        if group not in self._options:
            from hydra.core.object_type import ObjectType

            found = []
            if group and not group.startswith("hydra") and "." not in group:
                found = _options_below(self.loader, group, ObjectType)
            self._options[group] = found
        return self._options[group]

    def compose(self, overrides: Sequence[str]) -> Composition:
        """Compose one point (no sweeps in it). Raises ConfigError with all that is wrong in the overrides."""
        with explained(overrides, self.options):
            parsed = parse_all(overrides)
            groups = tuple(
                str(p.input_line)
                for p in parsed
                if self.options(p.key_or_group) and p.key_or_group != "sweeps"
            )
            values = [p for p in parsed if not self.options(p.key_or_group) and p.key_or_group != "sweeps"]
            base, choices = self._base(groups)
            cfg = copy.deepcopy(base)
            self._add_personal(cfg, choices.get("cluster"))
            apply_overrides(values, cfg)
        return Composition(cfg, choices)

    def personal(self) -> dict[str, dict[str, Any]]:
        """The user's own settings: cluster -> field -> value. Raises ConfigError for a file that is not right."""
        from europa_exp.config import personal

        if self._personal is None:
            self._personal = personal.settings(self.options("cluster"))
        return self._personal

    def _add_personal(self, cfg: DictConfig, cluster: str | None) -> None:
        from omegaconf import OmegaConf

        for dotted, value in self.personal().get(cluster or "", {}).items():
            OmegaConf.update(cfg, dotted, value, force_add=True)  # free mappings get new keys

    def default(self) -> Config | None:
        """The composition that nothing was changed in, which names are relative to; None if `conf/` has none that resolves.

        Raises ConfigError for personal settings that are not right, so that they are told once and not for every point.
        """
        self.personal()
        try:
            return resolve(self.compose([]).cfg)
        except ConfigError:
            return None

    def load(self, overrides: Sequence[str], *, multirun: bool) -> DictConfig:
        """Hydra's whole composition, its own node included, as it is before sweeps are taken apart."""
        from hydra.types import RunMode

        mode = RunMode.MULTIRUN if multirun else RunMode.RUN
        with explained(overrides, self.options, multirun=multirun):
            return self.loader.load_configuration(CONFIG_NAME, [*self._fixed, *overrides], mode)

    def _base(self, groups: tuple[str, ...]) -> tuple[DictConfig, dict[str, str | None]]:
        if groups not in self._bases:
            from hydra.types import RunMode
            from omegaconf import flag_override

            cfg = self.loader.load_configuration(CONFIG_NAME, [*self._fixed, *groups], RunMode.RUN)
            choices = {str(k): v for k, v in cfg.hydra.runtime.choices.items()}
            with flag_override(cfg, ["struct", "readonly"], [False, False]):
                del cfg["hydra"]
            self._bases[groups] = cfg, choices
        return self._bases[groups]


def _options_below(loader: Any, group: str, kinds: Any) -> list[str]:
    """Options of a group, those in its folders with their path (``ladder/00_baseline``)."""
    out = list(loader.get_group_options(group, kinds.CONFIG))
    for folder in loader.get_group_options(group, kinds.GROUP):
        out += [f"{folder}/{option}" for option in _options_below(loader, f"{group}/{folder}", kinds)]
    return out


def parse_all(texts: Sequence[str]) -> list[Any]:
    """The overrides of one point, parsed. Raises Hydra's exceptions, and ConfigError for numbers given to booleans."""
    parsed = [parse(text) for text in texts]
    if problems := [problem for override in parsed for problem in wrong_booleans(override)]:
        raise ConfigError([("", p) for p in problems])
    return parsed


def apply_overrides(parsed: Sequence[Any], cfg: DictConfig) -> None:
    """Apply parsed field overrides to a composition, by Hydra's own rules (its last step; there is no public name for it)."""
    from hydra._internal.config_loader_impl import ConfigLoaderImpl

    ConfigLoaderImpl._apply_overrides_to_config(list(parsed), cfg)


# ------------------------------------------------------------------------------------------------------------- resolving


def resolve(cfg: DictConfig) -> Config:
    """Resolve a composition. Raises ConfigError: unknown fields, missing values, interpolations that lead nowhere."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from europa_exp.config.schema import Config

    problems: list[Problem] = []
    _inspect(cfg, Config, "", problems)
    if not problems:
        try:
            return cast(Config, OmegaConf.to_object(cfg))
        except (OmegaConfBaseException, RecursionError, TypeError, ValueError) as e:
            problems.append(
                Problem(
                    getattr(e, "full_key", None) or "config", "", _first_line(e), "Give a value that fits"
                )
            )
    raise ConfigError([("", p) for p in problems])


def _raw(node: Any, key: Any) -> Any:
    """An entry as it is written, interpolations and all."""
    from omegaconf import OmegaConf

    return cast(Any, OmegaConf.to_container(node, resolve=False))[key]


def _inspect(node: Any, cls: type | None, prefix: str, problems: list[Problem]) -> None:
    """Collect what keeps this node (a group, or the root) from being resolved."""
    from omegaconf import Container, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from europa_exp.config.io import hints

    names = {f.name for f in fields(cls)} if cls else None
    for key in list(node) if OmegaConf.is_dict(node) else range(len(node)):
        dotted = f"{prefix}{key}"
        if names is not None and key not in names:
            raw = _raw(node, key)
            problems.append(
                Problem(dotted, raw, "there is no such field", near_fields(dotted) or "Leave it out")
            )
            continue
        is_interpolation = OmegaConf.is_interpolation(node, key)
        if not is_interpolation and OmegaConf.is_missing(node, key):
            problems.append(
                Problem(
                    dotted, "???", "every run needs a value here", f"Give {dotted}=... or set it in conf/"
                )
            )
            continue
        try:
            value = node[key]
        except (OmegaConfBaseException, RecursionError) as e:
            raw = _raw(node, key)
            problems.append(
                Problem(
                    dotted,
                    raw,
                    f"can't be resolved: {_first_line(e)}",
                    "Name an existing field, or give the value",
                )
            )
            continue
        if isinstance(value, Container) and not is_interpolation:
            hint = hints(cls).get(str(key)) if cls else None
            _inspect(value, cast(type, hint) if is_dataclass(hint) else None, f"{dotted}.", problems)


# ------------------------------------------------------------------------------------------------------------ explaining


@contextlib.contextmanager
def explained(texts: Sequence[str], options: Any, *, multirun: bool = False) -> Iterator[None]:
    """Turn what Hydra, OmegaConf and YAML raise about these overrides or `conf/` into one ConfigError."""
    import yaml
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        yield
    except yaml.MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        where = f"{mark.name}, line {mark.line + 1}" if mark else "conf/"
        problem = Problem("conf", where, f"not valid YAML: {e.problem}", "Correct that line")
        raise ConfigError([("", problem)]) from e
    except (UnicodeDecodeError, yaml.YAMLError) as e:
        raise ConfigError([("", Problem("conf", "", f"a file can't be read: {e}", "Correct it"))]) from e
    except (HydraException, OmegaConfBaseException, ValueError, AssertionError) as e:
        found = problems_of(texts, options, multirun=multirun)
        if not found and isinstance(e, AssertionError):
            raise  # Hydra's parser asserts on some texts; any other is a mistake of the program
        raise ConfigError([("", p) for p in found or [_as_problem(e, texts)]]) from e


def _as_problem(error: BaseException, texts: Sequence[str]) -> Problem:
    """The last resort: Hydra's own words, without its stack of keys and types."""
    words = [_first_line(error)]
    if error.__cause__ is not None:
        words.append(_first_line(error.__cause__))
    text = "; ".join(dict.fromkeys(w for w in words if w)) or type(error).__name__
    field = getattr(error.__cause__, "full_key", None) or getattr(error, "full_key", None)
    mentioned = max(
        (t for t in texts if key_of(t) and key_of(t) in text), key=lambda t: len(key_of(t)), default=None
    )
    if mentioned and mentioned.startswith("~") and "does not exist" in text:
        return Problem("command line", mentioned, "there is nothing of that name to take out", "Leave it out")
    return Problem(
        field or (key_of(mentioned) if mentioned else "composition"),
        mentioned or " ".join(texts),
        text,
        "python launch.py --help lists groups and options, europa fields the fields",
    )


def _first_line(error: BaseException) -> str:
    """An error's message without what OmegaConf and Hydra add about keys, types and folders."""
    text = str(error).split("Config search path:")[0].split("See https://")[0]
    lines = [line.strip() for line in text.splitlines()]
    return " ".join(
        x for x in lines if x and not x.startswith(("full_key:", "reference_type=", "object_type="))
    )
