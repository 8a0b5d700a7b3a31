"""Rules of checkpoints: which are written and kept, where they lie, and from which one a run may start."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from europa_exp.config.errors import ConfigError, Problem
from europa_exp.config.rules import reads
from europa_exp.config.schema import Config, Model


@reads("training.checkpoint_every", "training.checkpoint_keep")
def kept(cfg: Config) -> Iterator[Problem]:
    """What is to be kept is written at all, and one isn't deleted before the next is complete."""
    every, keep = cfg.training.checkpoint_every, cfg.training.checkpoint_keep
    if keep and not every:
        yield Problem(
            "training.checkpoint_keep",
            keep,
            "keeps nothing while training.checkpoint_every=0 writes nothing",
            "Give training.checkpoint_every=<steps>, or training.checkpoint_keep=0",
        )
    elif keep == 1:
        yield Problem(
            "training.checkpoint_keep",
            keep,
            "must be 0 (all) or at least 2: the newest may still be being written",
            "Take 2",
        )


@reads("training.checkpoint_every", "training.checkpoint_keep", "training.checkpoint_keep_every")
def kept_for_good(cfg: Config) -> Iterator[Problem]:
    """What is to be kept for good is written, and would be removed otherwise."""
    every, keep = cfg.training.checkpoint_every, cfg.training.checkpoint_keep
    dotted, value = "training.checkpoint_keep_every", cfg.training.checkpoint_keep_every
    if not value:
        return
    if not every:
        yield Problem(
            dotted,
            value,
            "keeps nothing while training.checkpoint_every=0 writes nothing",
            f"Give training.checkpoint_every=<steps>, or {dotted}=0",
        )
    elif value % every:
        yield Problem(
            dotted,
            value,
            f"must be a multiple of training.checkpoint_every={every}: only those steps are saved ({value} % {every} = "
            f"{value % every})",
            f"Take {-(-value // every) * every}, or another multiple of {every}",
        )
    elif not keep:
        yield Problem(
            dotted,
            value,
            "says nothing while training.checkpoint_keep=0 keeps every checkpoint",
            f"Give training.checkpoint_keep=2 or more, or {dotted}=0",
        )


@reads("training.checkpoint_every", "training.checkpoint_async")
def written_while_training(cfg: Config) -> Iterator[Problem]:
    """A way of writing checkpoints means nothing where none is written."""
    if cfg.training.checkpoint_async and not cfg.training.checkpoint_every:
        yield Problem(
            "training.checkpoint_async",
            True,
            "has no effect while training.checkpoint_every=0 writes nothing",
            "Give training.checkpoint_every=<steps>, or training.checkpoint_async=false",
        )


@reads("cluster.checkpoint_dir", "training.checkpoint_every", "launch.runs_dir", "launch.preview")
def checkpoint_dir(cfg: Config) -> Iterator[Problem]:
    """Checkpoints have a folder that means the same on every node, and that can be made or written from here."""
    value, dotted = cfg.cluster.checkpoint_dir, "cluster.checkpoint_dir"
    if value is None:
        return
    path, inside = Path(value), "null to keep them in the run folders"
    if value.startswith("~") or "$" in value:
        rule = "~ and $NAME are written out in your own file of settings only"
        yield Problem(dotted, value, rule, _written_out(value))
    elif not path.is_absolute():
        rule = "must be an absolute path: it lies outside the run folders, and every node reads it"
        yield Problem(dotted, value, rule, f"Give {dotted}=/<scratch>/<you>, or {inside}")
    elif (runs := Path(cfg.launch.runs_dir).resolve()) in (real := path.resolve(), *real.parents):
        rule = f"lies in launch.runs_dir={cfg.launch.runs_dir} ({runs}), where every folder is a run"
        yield Problem(dotted, value, rule, f"Give a folder outside it, or {inside}")
    elif (
        cfg.training.checkpoint_every and not cfg.launch.preview and (trouble := unwritable(path)) is not None
    ):
        yield Problem(dotted, value, trouble, f"Give a folder that you may write to, or {inside}")


def _written_out(value: str) -> str:
    """What to type instead of a path with ``~`` or ``$NAME`` in it."""
    path = os.path.expandvars(os.path.expanduser(value))
    if unset := re.findall(r"\$\{?(\w+)", path):
        names = " and ".join(dict.fromkeys(unset))
        return (
            f"Write the path itself; {names} {'is' if len(set(unset)) == 1 else 'are'} not set in this shell"
        )
    if path.startswith("~") or "$" in path:
        return "Write the path itself, without ~ and $"
    return f"Write the path itself: {path}"


def unwritable(folder: Path) -> str | None:
    """Why nothing can be made in a folder, there or not yet; None if it can.

    Found by writing a file without a name where the folder is or would be made: a permission says nothing of a file system
    that takes no files, and root is permitted everything. Leaves nothing.
    """
    place = folder.absolute()
    while not os.path.lexists(place) and place != place.parent:
        place = place.parent
    here = "" if place == folder.absolute() else f" (from {place} on it would have to be made)"
    if not place.is_dir():
        return f"{place} is no folder"
    try:
        with tempfile.TemporaryFile(dir=place):
            return None
    except OSError as error:
        return f"it can't be written{here}: {error.strerror or error}"


@reads(
    "training.initial_checkpoint",
    "training.steps",
    "launch.runs_dir",
    "cluster.checkpoint_dir",
    "trust",
    "model",
)
def initial_checkpoint(cfg: Config) -> Iterator[Problem]:
    """It is there and whole, it leaves steps to train, and it is one of ours unless the user vouches for it."""
    value = cfg.training.initial_checkpoint
    if value is None:
        return
    dotted, path = "training.initial_checkpoint", Path(value)
    if not value.strip() or not path.is_dir():
        yield Problem(
            dotted,
            value,
            "there is no such folder on this machine",
            "Give the folder of one checkpoint, for example runs/<run>/checkpoints/step-100, or null",
        )
        return
    if not (path / ".metadata").is_file():  # written last: without it nothing can be read
        inside = sorted(
            path.glob("step-*/.metadata"), key=lambda file: (len(file.parent.name), file.parent.name)
        )
        yield Problem(
            dotted,
            value,
            "is no complete checkpoint: it has no file .metadata",
            f"Give one of the checkpoints in it, for example {inside[-1].parent}"
            if inside
            else "Give the folder of one checkpoint, for example runs/<run>/checkpoints/step-100, or null",
        )
        return
    # The step goes on from the checkpoint's. The folder's name tells it; the file itself is a pickle, not to be opened here.
    made_at = re.fullmatch(r"step-(\d+)", path.resolve().name)
    if made_at and int(made_at[1]) >= cfg.training.steps:
        yield no_step_left(cfg.training.steps, value, int(made_at[1]))
    # The loader takes what the new model asks for and says nothing of the rest: two layers of four would pass.
    other = _model_of(path)
    if other is not None and other != cfg.model:
        yield Problem(
            dotted,
            value,
            f"holds another model: {_differences(other, cfg.model)}",
            "Give the same model group, or a checkpoint of this model",
        )
    if not cfg.trust and not _is_ours(path, cfg):
        yield Problem(
            dotted,
            value,
            f"lies outside launch.runs_dir={cfg.launch.runs_dir}, and checkpoints hold pickles, which can run code",
            "Add trust=true if you know where it comes from",
        )


def no_step_left(steps: int, checkpoint: str, step: int) -> Problem:
    """The problem of a run whose initial checkpoint has trained as many steps as it asks for."""
    return Problem(
        "training.steps",
        steps,
        f"training.initial_checkpoint={checkpoint} has trained {step} steps already, and steps count from there",
        f"Give training.steps=<more than {step}>",
    )


def _is_ours(path: Path, cfg: Config) -> bool:
    """Whether a checkpoint lies in the runs folder, in the folder for checkpoints, or where a run's own link leads."""
    ours, real = Path(cfg.launch.runs_dir).resolve(), path.resolve()
    elsewhere = cfg.cluster.checkpoint_dir
    if ours in real.parents or (elsewhere is not None and Path(elsewhere).resolve() in real.parents):
        return True
    link = Path(os.path.abspath(path)).parent
    run = link.parent
    return (
        link.name == "checkpoints"
        and ours in run.resolve().parents
        and real.parent == link.resolve()
        # A run that was copied from somebody brings a link to what they can still change.
        and os.stat(link).st_uid == os.stat(run).st_uid
    )


def _model_of(path: Path) -> Model | None:
    """The model of the run that a checkpoint belongs to; None where there is no readable record."""
    from europa_exp.config import io

    real = path.resolve()
    for run in (Path(os.path.abspath(path)).parent.parent, real.parent.parent, real.parent / "run"):
        try:
            return io.load(run / "config.yaml").model
        except (OSError, ConfigError):
            continue
    return None


def _differences(there: Model, here: Model) -> str:
    names = [f.name for f in fields(here) if getattr(there, f.name) != getattr(here, f.name)]
    return ", ".join(
        f"model.{name} is {getattr(there, name)} there and {getattr(here, name)} here" for name in names
    )


RULES = [kept, kept_for_good, written_while_training, checkpoint_dir, initial_checkpoint]
