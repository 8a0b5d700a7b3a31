"""The command that goes on from the newest checkpoint of a run that did not complete."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from europa_exp.config.errors import ConfigError
from europa_exp.launch.overrides import for_shell, split
from europa_exp.runs import checkpoints
from europa_exp.runs.folder import RunFolder, RunFolderError

_OVER = ("failed", "cancelled", "lost")
_RUNS = Path("runs")
"""launch.runs_dir unless somebody says otherwise."""


def go_on_command(run: RunFolder, state: str) -> str | None:
    """What to type in the project's folder to go on as a new run; None if there is nothing to go on from, or no step left.

    ``state`` is a recorded state or ``lost``. The new run goes to the runs folder of the old one, and to the cluster that was
    named for it: a rerun takes neither from the record. The path is absolute, as ranks may start in another folder.
    """
    newest = checkpoints.newest(run.checkpoints) if state in _OVER else None
    if newest is None:
        return None
    try:
        if newest >= run.config().training.steps:
            return None
    except (ConfigError, RunFolderError, OSError):
        return None
    words = ["python launch.py", shlex.quote(f"rerun={run.name}")]
    clusters = [text for text in run.overrides() if split(text)[1] == "cluster"]
    words += [shlex.quote(text) for text in clusters[-1:]]
    runs = Path(os.path.abspath(run.path)).parent
    if runs.resolve() != _RUNS.resolve():
        words.append(for_shell("launch.runs_dir", str(runs)))
    saved = runs / run.name / "checkpoints" / f"step-{newest}"
    words.append(for_shell("training.initial_checkpoint", str(saved)))
    return " ".join(words)
