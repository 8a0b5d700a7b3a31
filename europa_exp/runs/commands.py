"""Commands of the console script as they are suggested: pasted into a shell as they are, they do what they say."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from europa_exp.runs.folder import RunFolder


def europa(verb: str, *words: str, runs_dir: str | os.PathLike[str]) -> str:
    """``europa VERB WORDS``, with ``--runs-dir`` where the console script would not look in ``runs_dir`` by itself."""
    return shlex.join(["europa", verb, *words, *_elsewhere(Path(runs_dir))])


def _elsewhere(runs_dir: Path) -> list[str]:
    by_itself = Path(os.environ.get("EUROPA_RUNS_DIR") or "runs")
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
