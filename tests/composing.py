"""Calls in tests: the whole command line in this process, or only the making of a plan."""

from __future__ import annotations

import contextlib
import io
import shutil
from dataclasses import dataclass
from pathlib import Path

from europa_exp.launch.expand import Plan, make_plan
from europa_exp.launch.main import main
from europa_exp.launch.plugins import composer
from europa_exp.launch.sweep_file import read

ROOT = Path(__file__).resolve().parents[1]


@dataclass
class Result:
    """What a call left behind."""

    code: int
    out: str
    err: str


def call(*arguments: str, root: Path = ROOT) -> Result:
    """``python launch.py ARGUMENTS`` in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(root, list(arguments))
        except SystemExit as e:
            code = e.code if isinstance(e.code, int) else 1
    return Result(code, out.getvalue(), err.getvalue())


def plan(*arguments: str, multirun: bool = False, root: Path = ROOT) -> Plan:
    """The checked points of a call, without Hydra's own command line."""
    with composer(root / "conf") as made:
        chosen = [a for a in arguments if a.startswith("+sweeps=")]
        sweep_file = read(made.load(chosen, multirun=True).hydra) if chosen else None
        return make_plan(
            made,
            arguments,
            multirun=multirun,
            sweep_file=sweep_file,
            base=made.default(),
            loader=made.loader,
        )


def copied_root(folder: Path) -> Path:
    """A copy of conf/ and sweeps/ that a test may spoil."""
    root = folder / "root"
    for name in ("conf", "sweeps"):
        shutil.copytree(ROOT / name, root / name)
    return root


def overrides(found: Plan) -> list[list[str]]:
    return [p.overrides for p in found.points]
