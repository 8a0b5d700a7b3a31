"""The command line: ``python launch.py [-m] [group=option] [field=value]`` and ``python launch.py rerun=RUN ...``.

Hydra parses and composes; `plugins` takes over. Whatever is wrong with a call ends here as one message on stderr and exit
code 2, with nothing submitted and nothing on disk.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from europa_exp.config.errors import ConfigError
from europa_exp.launch.arguments import refuse_hydra_settings, split_flags
from europa_exp.launch.hand_over import hand_over
from europa_exp.launch.overrides import normalize

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

    def submit(plan: Plan) -> int:
        os.environ.pop(_FULL_ERROR, None)  # ours, not for the ranks
        return hand_over(plan, command)

    plugins.hand_over = submit

    def single(_: object) -> None:
        from hydra.core.global_hydra import GlobalHydra
        from hydra.core.hydra_config import HydraConfig

        config = cast("DictConfig", HydraConfig.instance().cfg)
        loader = GlobalHydra.instance().config_loader()
        texts = plugins.plain_list(config.hydra.overrides.task)
        plugins.outcome.take(lambda: submit(plugins.plan_call(loader, config, texts, multirun=False)))

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
