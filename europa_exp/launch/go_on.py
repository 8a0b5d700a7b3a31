"""The command that goes on from the newest checkpoint of a run that did not complete."""

from __future__ import annotations

import os
from pathlib import Path

from europa_exp.config.errors import ConfigError
from europa_exp.runs import checkpoints, commands
from europa_exp.runs.folder import RunFolder, RunFolderError

_OVER = ("failed", "cancelled", "lost")


def go_on_command(run: RunFolder, state: str) -> str | None:
    """What to type in the project's folder to go on as a new run; None if there is nothing to go on from, or no step left.

    ``state`` is a recorded state or ``lost``. The new run goes where the old one was (see ``commands.rerun``).
    """
    newest = checkpoints.newest(run.checkpoints) if state in _OVER else None
    if newest is None:
        return None
    try:
        if newest >= run.config().training.steps:
            return None
    except (ConfigError, RunFolderError, OSError):
        return None
    saved = Path(os.path.abspath(run.path)) / "checkpoints" / f"step-{newest}"
    return commands.rerun(run, commands.for_shell("training.initial_checkpoint", str(saved)))
