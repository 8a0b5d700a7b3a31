"""The words of a command line: flags and overrides, and what of Hydra's own is refused."""

from __future__ import annotations

from collections.abc import Sequence

from europa_exp.config.errors import ConfigError, Problem
from europa_exp.launch.overrides import key_of

_WITH_VALUE = frozenset(
    {
        "--experimental-rerun",
        "--cfg",
        "-c",
        "--package",
        "-p",
        "--config-name",
        "-cn",
        "--config-path",
        "-cp",
        "--config-dir",
        "-cd",
    }
)
_NO_USE = ("--experimental-rerun", "--config-name", "-cn", "--config-path", "-cp")
_FIXED = (
    "hydra/launcher",
    "hydra/sweeper",
    "hydra.launcher",
    "hydra.sweeper",
    "hydra.run",
    "hydra.sweep",
    "hydra.output_subdir",
    "hydra.job.chdir",
    "hydra/job_logging",
    "hydra/hydra_logging",
    "hydra/output",
)


def split_flags(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Flags (with their values) and overrides, wherever in the line they stand: ``a=1 -m b=2`` is one call."""
    flags: list[str] = []
    overrides: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument in _WITH_VALUE and rest:
            flags += [argument, rest.pop(0)]
        elif argument in ("--info", "-i"):
            flags.append(argument)
            if rest and "=" not in rest[0] and not rest[0].startswith("-"):
                flags.append(rest.pop(0))
        elif argument.startswith("-"):
            flags.append(argument)
        else:
            overrides.append(argument)
    return flags, overrides


def refuse_hydra_settings(flags: Sequence[str], overrides: Sequence[str]) -> None:
    """Raise ConfigError for what would make Hydra write files, load pickles, or pass our sweeper and launcher by."""
    problems = []
    for flag in flags:
        if flag.split("=")[0] in _NO_USE:
            rule, way_out = (
                "this flag of Hydra's has no use here",
                "rerun=RUN runs a record again; conf/ is composed",
            )
            problems.append(("", Problem("command line", flag, rule, way_out)))
    for text in overrides:
        key = key_of(text)
        if any(key == name or key.startswith(f"{name}.") for name in _FIXED):
            rule = "is fixed here: Hydra keeps nothing on disk, and runs are submitted by our own launcher"
            problems.append(
                ("", Problem(key, text, rule, "Leave it out; launch.* and cluster.* say how to run"))
            )
    if problems:
        raise ConfigError(problems)


def refuse(field: str, value: object, rule: str, way_out: str) -> ConfigError:
    """A ConfigError about one thing in the call itself."""
    return ConfigError([("", Problem(field, value, rule, way_out))])
