"""Settings that are one person's: account, mail, paths. They live in a YAML file outside the project, a mapping a cluster:

    jupiter:
      account: mybudget
      mail_user: me@example.org
      runs_dir: /p/project/mybudget/runs
      checkpoint_dir: $SCRATCH/me

They replace what ``conf/cluster/`` says and give way to the command line. Only what can't change a result may stand there. In
the two folders ``~`` and ``$NAME`` stand for what they mean in the shell that calls, so that the record holds the path itself.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

from europa_exp.config.errors import ConfigError, Problem
from europa_exp.config.io import Invalid, convert, hints, plain, read_plain
from europa_exp.config.schema import IDENTITY_EXCLUDES, Cluster, Launch

VARIABLE = "EUROPA_USER_CONFIG"
"""Names another file; empty for none."""

_NOT_PERSONAL = ("name", "executor", "inside_allocation")
RUNS_DIR = "runs_dir"
"""The one key that is no field of ``cluster``: it sets launch.runs_dir."""

_FOLDERS = (RUNS_DIR, "checkpoint_dir")


def path() -> Path | None:
    """Where the file is looked for, there or not; None if the environment says that there is none."""
    named = os.environ.get(VARIABLE)
    if named is not None:
        return Path(named).expanduser() if named.strip() else None
    home = Path(os.environ.get("XDG_CONFIG_HOME") or Path("~/.config").expanduser())
    return home / "europa_exp" / "cluster.yaml"


def keys() -> dict[str, Any]:
    """What may stand there for a cluster: key -> type."""
    names = [f.name for f in fields(Cluster) if f.name not in _NOT_PERSONAL]
    found = {name: hints(Cluster)[name] for name in names if f"cluster.{name}" in IDENTITY_EXCLUDES}
    return found | {RUNS_DIR: hints(Launch)[RUNS_DIR]}


def settings(clusters: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The file's content: cluster -> dotted field -> plain value. Empty if there is no file.

    ``clusters`` are the names that may stand there. Raises ConfigError naming the file and all that is wrong in it.
    """
    where = path()
    if where is None:
        return {}
    try:
        text = where.read_text(encoding="utf-8")
    except FileNotFoundError as e:
        if VARIABLE in os.environ:
            rule = "there is no such file"
            raise ConfigError([("", Problem(VARIABLE, str(where), rule, "Correct it, or unset it"))]) from e
        return {}
    except (OSError, UnicodeDecodeError) as e:
        reason = e.strerror if isinstance(e, OSError) else "it is not UTF-8 text"
        problem = Problem("personal settings", str(where), f"can't be read: {reason}", "Correct the file")
        raise ConfigError([("", problem)]) from e
    return _checked(read_plain(text, str(where)), str(where), list(clusters))


def _checked(data: Any, where: str, clusters: list[str]) -> dict[str, dict[str, Any]]:
    if data is None:
        return {}
    problems: list[Problem] = []
    if not isinstance(data, dict):
        problems = [
            Problem("personal settings", data, "must be a mapping", "Begin with a cluster: 'jupiter:'")
        ]
        raise ConfigError([(where, p) for p in problems])
    out: dict[str, dict[str, Any]] = {}
    known = keys()
    for cluster, values in data.items():
        if cluster not in clusters:
            rule, way_out = "there is no such cluster", _near(str(cluster), clusters)
            problems.append(Problem(str(cluster), plain(values), rule, way_out))
            continue
        if values is not None and not isinstance(values, dict):
            problems.append(
                Problem(cluster, values, "must be a mapping", f"Indent its settings under {cluster}:")
            )
            continue
        out[cluster] = {}
        for key, value in (values or {}).items():
            name = f"{cluster}.{key}"
            if key not in known:
                problems.append(Problem(name, value, *_unknown(str(key), list(known))))
                continue
            try:
                dotted = f"launch.{key}" if key == RUNS_DIR else f"cluster.{key}"
                here = _written_out(value) if key in _FOLDERS else value
                out[cluster][dotted] = plain(convert(here, known[key]))
            except Invalid as e:
                problems.append(Problem(name, value, e.rule, e.way_out))
    if problems:
        raise ConfigError([(where, p) for p in problems])
    return out


def _written_out(folder: Any) -> Any:
    """A path with ``~`` and ``$NAME`` replaced. Raises Invalid for a name that means nothing here."""
    if not isinstance(folder, str):
        return folder
    path = os.path.expandvars(os.path.expanduser(folder))
    if path.startswith("~") or "$" in path:
        raise Invalid(
            f"{path} stands for no folder in this shell", "Write the path itself, or export the variable"
        )
    return path


def _unknown(key: str, known: list[str]) -> tuple[str, str]:
    if key in {f.name for f in fields(Cluster)}:
        rule = "can change a result or a speed, so every record must say it"
        return rule, f"Give cluster.{key}=... on the command line, or set it in conf/cluster/"
    return "there is no such personal setting", _near(key, known)


def _near(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"Did you mean {close[0]}?" if close else f"There are {', '.join(sorted(known))}"
