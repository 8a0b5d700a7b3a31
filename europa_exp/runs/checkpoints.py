"""The checkpoints of a run on disk: where they lie, which are whole, which may go, from which one the run goes on.

A checkpoint is a folder ``step-N``. Its file ``.metadata`` is written last, so a folder without it was cut while being written.
Whether the data files that it names are all there takes torch to read; the training looks when it goes on, and gives one that
lacks some the name ``damaged-N-...``: it counts for nothing from then on, and nobody here removes it.

They lie in ``checkpoints/`` of the run folder, or, with ``cluster.checkpoint_dir``, in a folder of their own there::

    runs/<run>/checkpoints  ->  <checkpoint_dir>/<run>-<uid>/
    <checkpoint_dir>/<run>-<uid>/run  ->  runs/<run>/

``uid`` is that of the run's ``provenance.json``: runs of one name, from two runs folders or from one that was removed, never
meet. Such a place may be cleaned by somebody else, so the run folder itself remembers which checkpoints were finished
(``logs/checkpoints.jsonl``).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from europa_exp.runs import commands
from europa_exp.runs.files import append_line, read_lines
from europa_exp.runs.folder import RunFolder, RunFolderError
from europa_exp.runs.status import now

SAVED_FILE = "checkpoints.jsonl"
"""Under ``logs/``: one line for each checkpoint that was finished."""

BACK_LINK = "run"
"""In a checkpoint folder outside the run folder: the link that says whose it is."""

_NAME = re.compile(r"step-(\d+)")
_LAST_FILE = ".metadata"
# Not a name that torchtitan's own search for "step-N" would find.
_ASIDE = ".removed-"
_DAMAGED = "damaged-"


@dataclass(frozen=True, order=True)
class Checkpoint:
    """One folder ``step-N``; it is ``whole`` once its last file is there."""

    step: int
    path: Path
    whole: bool


def place(run: RunFolder, checkpoint_dir: str | None) -> Path:
    """Where the checkpoints of a run lie, or will lie. Touches nothing.

    What is there wins: a run that has begun goes on in its place, whatever ``checkpoint_dir`` (``cluster.checkpoint_dir``).
    """
    inside = run.checkpoints
    try:
        mode = os.lstat(inside).st_mode
    except OSError:
        mode = 0
    if stat.S_ISLNK(mode):
        return run.path / os.readlink(inside)
    if checkpoint_dir is None or stat.S_ISDIR(mode):
        return inside
    uid = run.provenance().get("uid")
    return Path(checkpoint_dir) / (f"{run.name}-{uid}" if uid else run.name)


def make_place(run: RunFolder, folder: Path) -> None:
    """Make the folder that ``place`` gave, and the links if it lies elsewhere. Raises RunFolderError where that can't be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if folder != run.checkpoints:
            for link, target in ((folder / BACK_LINK, run.path), (run.checkpoints, folder)):
                if not os.path.lexists(link):
                    link.symlink_to(target)
    except OSError as error:
        elsewhere = folder != run.checkpoints
        way_out = "; cluster.checkpoint_dir must be a folder that every node sees" if elsewhere else ""
        raise RunFolderError(
            f"{folder}: no checkpoints can be kept there, on {os.uname().nodename} ({error.strerror or error}){way_out}"
        ) from error


# ------------------------------------------------------------------------------------------------------------ what is there


def found(folder: Path) -> list[Checkpoint]:
    """The checkpoints in a folder, by step, those that were cut included; none in a folder that can't be read."""
    with contextlib.suppress(OSError):
        return sorted(
            Checkpoint(int(name[1]), Path(entry.path), os.path.isfile(os.path.join(entry.path, _LAST_FILE)))
            for entry in os.scandir(folder)
            if (name := _NAME.fullmatch(entry.name))
        )
    return []


def newest(folder: Path, without: Collection[int] = ()) -> int | None:
    """Step of the newest whole checkpoint in a folder, those of some steps left out; None without any."""
    return max((c.step for c in found(folder) if c.whole and c.step not in without), default=None)


def resume_step(run: RunFolder, folder: Path, damaged: Mapping[int, str] | None = None) -> int | None:
    """The step that a run goes on from; None for one that saved nothing yet.

    ``damaged`` are checkpoints that were finished and are not whole any more: step -> what is wrong, in words ("lacks ...").

    Raises RunFolderError when checkpoints were finished and none is left: to begin again with the first step, in the same
    record, would pass for a run that goes on.
    """
    damaged = damaged or {}
    there, saved = newest(folder, without=damaged), newest_saved(run)
    if there is None and (saved is not None or damaged):
        saved = max(damaged) if saved is None else saved
        what = "".join(f"; that of step {step} {words}" for step, words in damaged.items())
        raise RunFolderError(
            f"{folder}: {run.name} has saved step {saved} there, and no whole checkpoint is left (a folder on scratch is "
            f"cleaned by the site){what}. Put one back, or begin anew in a run of its own: {commands.rerun(run)}"
        )
    return there


def describe(run: RunFolder) -> str | None:
    """In a line, where the checkpoints of a run lie and what is left of them; None for a run that has none."""
    folder = place(run, None)
    steps = [c.step for c in found(folder) if c.whole]
    saved = newest_saved(run)
    if steps:
        lost = f", but step {saved} is gone" if saved is not None and saved > steps[-1] else ""
        return f"{len(steps)}, the newest of step {steps[-1]}{lost}, in {folder}"
    if saved is not None:
        return f"gone: step {saved} was saved in {folder}, and no whole checkpoint is left there"
    return f"none yet, in {folder}" if os.path.lexists(run.checkpoints) else None


# ---------------------------------------------------------------------------------------------------- what was finished


def note_saved(run: RunFolder, step: int) -> None:
    """Remember in the run folder that the checkpoint of a step is finished. Raises OSError."""
    logs = run.path / "logs"
    logs.mkdir(exist_ok=True)
    append_line(logs / SAVED_FILE, json.dumps({"time": now(), "step": step}))


def newest_saved(run: RunFolder) -> int | None:
    """The step whose checkpoint was finished last, there or not. Not always the highest: a run that went on from an older
    checkpoint saves some steps again."""
    steps = saved_steps(run)
    return steps[-1] if steps else None


def saved_steps(run: RunFolder) -> list[int]:
    """The steps whose checkpoints were finished, in the order in which they were, by all attempts together."""
    lines = read_lines(run.path / "logs" / SAVED_FILE)
    return [line["step"] for line in lines if isinstance(line.get("step"), int)]


# ---------------------------------------------------------------------------------------------------------- what may go


def stale(
    checkpoints: Iterable[Checkpoint], *, keep: int, keep_every: int, writing: int | None
) -> list[Checkpoint]:
    """The checkpoints that the rule removes.

    Kept are the newest ``keep`` whole ones (0: all) and whole ones whose step is a multiple of ``keep_every`` (0: none). Cut
    ones never count, and go; while step ``writing`` is being saved only those before it, as a rank may be ahead of this one.
    """
    known = sorted(checkpoints)
    whole = [c for c in known if c.whole]
    kept = set(whole[-keep:] if keep else whole)
    kept |= {c for c in whole if keep_every and c.step % keep_every == 0}
    return [c for c in known if c not in kept and (c.whole or writing is None or c.step < writing)]


def set_aside(checkpoint: Checkpoint) -> Path:
    """Take a checkpoint out of the way before it is removed, and return where it is now. Raises OSError.

    It disappears in one move: nobody takes what is left of it for a checkpoint if the removal breaks off, and the same step
    can be saved again meanwhile.
    """
    aside = checkpoint.path.with_name(f"{_ASIDE}{checkpoint.step}-{secrets.token_hex(3)}")
    checkpoint.path.rename(aside)
    return aside


def leave_out(checkpoint: Checkpoint) -> Path:
    """Take a damaged checkpoint out of the way for good, and return where it is now. Raises OSError.

    Its step is saved again, and into what is left of it that would look finished from the first file on.
    """
    aside = checkpoint.path.with_name(f"{_DAMAGED}{checkpoint.step}-{secrets.token_hex(3)}")
    checkpoint.path.rename(aside)
    return aside


def half_removed(folder: Path) -> list[Path]:
    """What was set aside and not removed to the end."""
    with contextlib.suppress(OSError):
        return sorted(Path(e.path) for e in os.scandir(folder) if e.name.startswith(_ASIDE))
    return []


def remove_cut(folder: Path) -> list[str]:
    """Remove checkpoints that were never finished, and what an earlier removal left; return the names of the former. Only
    while nobody writes there."""
    cut = stale(found(folder), keep=0, keep_every=0, writing=None)
    for checkpoint in cut:
        with contextlib.suppress(OSError):
            set_aside(checkpoint)
    for path in half_removed(folder):
        shutil.rmtree(path, ignore_errors=True)
    return [c.path.name for c in cut]
