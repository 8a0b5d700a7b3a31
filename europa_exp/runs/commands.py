"""Commands as they are suggested: pasted into a shell as they are, they do what they say."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from europa_exp.runs.folder import RunFolder

_RUNS = Path("runs")
"""Where both commands look for runs, unless somebody says otherwise."""

_OF_CLUSTER = re.compile(r"(?:\+\+|\+|~)?(cluster(?:\.[^=]*)?)(?:=.*)?", re.DOTALL)


# ------------------------------------------------------------------------------------------------------ following runs


def europa(verb: str, *words: str, runs_dir: str | os.PathLike[str]) -> str:
    """``europa VERB WORDS``, with ``--runs-dir`` where the console script would not look in ``runs_dir`` by itself."""
    return shlex.join(["europa", verb, *words, *_elsewhere(Path(runs_dir))])


def about(run: RunFolder, verb: str, *words: str) -> str:
    """``europa VERB RUN WORDS``."""
    return europa(verb, run.name, *words, runs_dir=run.path.parent)


def _elsewhere(runs_dir: Path) -> list[str]:
    by_itself = Path(os.environ.get("EUROPA_RUNS_DIR") or _RUNS)
    if runs_dir.resolve() == by_itself.resolve():
        return []
    relative = os.path.relpath(runs_dir)
    return ["--runs-dir", str(runs_dir.absolute()) if relative.startswith(os.pardir) else relative]


def sweep_of(runs: Sequence[RunFolder]) -> str | None:
    """The sweep that these runs were created for, by those of their records that can be read; None for several or none."""
    sweeps = {record.get("sweep") for run in runs if (record := run.provenance())}
    found = sweeps.pop() if len(sweeps) == 1 else None
    return found if isinstance(found, str) and found else None


def naming(runs: Sequence[RunFolder]) -> list[str]:
    """Words that name the runs for a command: their sweep if they have one in common, else each by itself."""
    sweep = sweep_of(runs)
    return ["--sweep", sweep] if sweep is not None else [run.name for run in runs]


# ------------------------------------------------------------------------------------------------------- starting runs


def rerun(run: RunFolder, *words: str) -> str:
    """``python launch.py rerun=RUN``, to be typed in the project's folder, for the place where the run was.

    A rerun takes neither the cluster nor the runs folder from the record: both are named as they were for this run, with
    every setting of the cluster that was typed. ``words`` follow as they are. Paths are absolute, as ranks may start in
    another folder.
    """
    found = [f"rerun={run.name}", *_of_cluster(run)]
    runs = Path(os.path.abspath(run.path)).parent
    where = [] if runs.resolve() == _RUNS.resolve() else [for_shell("launch.runs_dir", str(runs))]
    return " ".join(["python launch.py", *map(shlex.quote, found), *where, *words])


def _of_cluster(run: RunFolder) -> list[str]:
    """What was typed of the cluster, the last word on each setting; its name where an experiment or a file chose it."""
    typed: dict[str, str] = {}
    for text in run.overrides():
        if match := _OF_CLUSTER.fullmatch(text):
            typed.pop(match[1], None)
            typed[match[1]] = text
    name = run.provenance().get("cluster")
    if "cluster" not in typed and isinstance(name, str) and name not in ("", "local"):
        return [f"cluster={name}", *typed.values()]
    return list(typed.values())


def quoted(text: str) -> str:
    """Text in quotes that Hydra's grammar takes off again."""
    from hydra.core.override_parser.types import Quote, QuotedString

    return QuotedString(text, Quote.single if '"' in text and "'" not in text else Quote.double).with_quotes()


def for_shell(key: str, value: str) -> str:
    """What to type in a shell so that ``key`` gets exactly this text."""
    return shlex.quote(f"{key}={quoted(value)}")
