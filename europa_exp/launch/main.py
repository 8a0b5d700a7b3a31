"""The command line: ``python launch.py [-m] [group=option] [field=value]`` and ``python launch.py rerun=RUN ...``.

Hydra parses and composes; `plugins` takes over. Whatever is wrong with a call ends here as one message on stderr and exit
code 2, with nothing submitted and nothing on disk.
"""

from __future__ import annotations

import os
import re
import secrets
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from europa_exp.config.errors import ConfigError, Problem
from europa_exp.launch.overrides import key_of, normalize

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from europa_exp.launch.expand import Plan
    from europa_exp.launch.overrides import Options

BAD_INPUT = 2
"""Exit code of a call that can't be run as it is."""

FAILED = 1
"""Exit code of a call that was right, but whose runs can't be made or did not all complete."""

INTERRUPTED = 130
"""Exit code after Ctrl-C, as a shell gives it."""

_FULL_ERROR = "HYDRA_FULL_ERROR"


def main(root: Path, argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code.

    ``root`` is the folder with `conf/` and `sweeps/`; ``argv`` defaults to the process's own arguments.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if any(a.startswith("rerun=") for a in arguments):
            from europa_exp.launch.rerun import rerun

            return rerun(root, arguments)
        return _through_hydra(root, arguments)
    except ConfigError as e:
        print(e, file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:  # while composing; once runs exist, submit sees to them
        print("interrupted; nothing was submitted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as e:
        from europa_exp.runs.folder import RunFolderError

        if not isinstance(e, RunFolderError):
            raise
        print(e, file=sys.stderr)
        return FAILED


def _through_hydra(root: Path, arguments: list[str]) -> int:
    import hydra

    from europa_exp.launch import plugins
    from europa_exp.launch.compose import explained

    plugins.register(root)
    command = [sys.argv[0], *arguments]
    plugins.outcome = plugins.Outcome()
    plugins.hand_over = lambda plan: hand_over(plan, command)

    def single(_: object) -> None:
        from hydra.core.global_hydra import GlobalHydra
        from hydra.core.hydra_config import HydraConfig

        config = cast("DictConfig", HydraConfig.instance().cfg)
        loader = GlobalHydra.instance().config_loader()
        texts = plugins.plain_list(config.hydra.overrides.task)
        plugins.outcome.take(
            lambda: hand_over(plugins.plan_call(loader, config, texts, multirun=False), command)
        )

    flags, typed = split_flags(arguments)
    refuse_hydra_settings(flags, typed)
    # What Hydra is given is also what a message is made from: typed as it was, a right value could look wrong.
    overrides = [normalize(text) for text in typed]
    multirun = "-m" in flags or "--multirun" in flags
    argv = sys.argv
    sys.argv = [argv[0], *flags, *overrides]
    before = os.environ.get(_FULL_ERROR)
    os.environ[_FULL_ERROR] = "1"  # Hydra then raises instead of printing and exiting by itself
    try:
        app = hydra.main(version_base="1.3", config_path=str(root / "conf"), config_name="config")(single)
        with explained(overrides, _options(root), multirun=multirun):
            app()
    finally:
        sys.argv = argv
        _restore(before)
    if plugins.outcome.error is not None:
        raise plugins.outcome.error
    return plugins.outcome.code


def _options(root: Path) -> Options:
    """Options of a group for messages, read when there is something to say."""

    def options(group: str) -> list[str]:
        from europa_exp.launch.plugins import composer

        with composer(root / "conf") as found:
            return found.options(group)

    return options


def _restore(before: str | None) -> None:
    if before is None:
        os.environ.pop(_FULL_ERROR, None)
    else:
        os.environ[_FULL_ERROR] = before


def split_flags(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Flags (with their values) and overrides, wherever in the line they stand: ``a=1 -m b=2`` is one call."""
    with_value = {
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
    flags: list[str] = []
    overrides: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument in with_value and rest:
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


_OURS = ("hydra/launcher", "hydra/sweeper", "hydra.launcher", "hydra.sweeper", "hydra.run", "hydra.sweep")
_OURS_TOO = (
    "hydra.output_subdir",
    "hydra.job.chdir",
    "hydra/job_logging",
    "hydra/hydra_logging",
    "hydra/output",
)


_NOT_OURS = ("--experimental-rerun", "--config-name", "-cn", "--config-path", "-cp")


def refuse_hydra_settings(flags: Sequence[str], overrides: Sequence[str]) -> None:
    """Raise ConfigError for what would make Hydra write files, load pickles, or pass our sweeper and launcher by."""
    problems = []
    for flag in flags:
        if flag.split("=")[0] in _NOT_OURS:
            rule, way_out = (
                "this flag of Hydra's has no use here",
                "rerun=RUN runs a record again; conf/ is composed",
            )
            problems.append(("", Problem("command line", flag, rule, way_out)))
    for text in overrides:
        key = key_of(text)
        if any(key == name or key.startswith(f"{name}.") for name in (*_OURS, *_OURS_TOO)):
            rule = "is fixed here: Hydra keeps nothing on disk, and runs are submitted by our own launcher"
            problems.append(
                ("", Problem(key, text, rule, "Leave it out; launch.* and cluster.* say how to run"))
            )
    if problems:
        raise ConfigError(problems)


def named_sweep(plan: Plan) -> str | None:
    """The sweep's name for the record: as asked for, or with a time and a random part that keep two calls apart."""
    if plan.sweep is None or plan.points[0].cfg.launch.sweep_name is not None:
        return plan.sweep
    stem = re.sub(r"[^A-Za-z0-9._-]+", "_", plan.sweep)[:60]
    return f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def hand_over(plan: Plan, command: Sequence[str]) -> int:
    """Preview or submit checked points; the end of every call, whether single run, sweep or rerun."""
    for notice in plan.notices:
        print(f"note: {notice}", file=sys.stderr)
    launch = plan.points[0].cfg.launch
    if launch.preview:
        from europa_exp.launch.preview import show

        show(plan)
        return 0
    os.environ.pop(_FULL_ERROR, None)  # ours, not for the ranks
    from europa_exp.launch.submit import submit

    return submit(plan.points, launch, sweep=named_sweep(plan), command=list(command))


def refuse(field: str, value: object, rule: str, way_out: str) -> ConfigError:
    """A ConfigError about one thing in the call itself."""
    return ConfigError([("", Problem(field, value, rule, way_out))])
