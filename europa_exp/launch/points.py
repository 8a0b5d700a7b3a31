"""Points: the runs that one call asks for, checked together before the first of them is submitted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from europa_exp.config.errors import ConfigError, Problem

if TYPE_CHECKING:
    from europa_exp.config.schema import Config

Problems = list[tuple[str, Problem]]
"""Pairs of a point's label and a problem, as ConfigError takes them."""


@dataclass
class Point:
    """One run to be submitted: a checked configuration and what is known about it before it runs."""

    cfg: Config
    """Fully resolved."""

    overrides: list[str]
    """What was typed for this point, sweeps already taken apart, in Hydra's grammar."""

    delta: dict[str, Any]
    """Identity-relevant fields that differ from the default composition: dotted name -> plain value."""

    identity: str
    """Hash of everything that can change a result; equal for the repeats of one point."""

    name: str
    """Wanted name of the run folder."""

    repeat: int = 0
    """Which repeat of the identity this is, from 0."""

    parent: str | None = None
    """The run that this one was made from with rerun=."""

    force: bool = False
    """Run even if a completed run of the same identity exists (reruns do)."""


@dataclass
class Draft:
    """A composed point before the checks."""

    label: str
    """How messages call the point; empty for a single run."""

    cfg: Config
    overrides: list[str] = field(default_factory=list)


def make_points(
    drafts: Sequence[Draft],
    *,
    base: Config | None,
    problems: Problems,
    parent: str | None = None,
    force: bool = False,
    check: Callable[[Config], Iterable[Problem]] | None = None,
) -> list[Point]:
    """Check all drafts and make points of them, ``launch.repeat`` for each.

    ``base`` is the default composition that names are relative to; ``problems`` are those found while composing. Raises
    ConfigError with every problem of every point, duplicates within the call included.
    """
    from europa_exp.config.identity import delta, identity

    if check is None:
        from europa_exp.config import checks

        check = checks.check
    problems = list(problems)
    hashed: list[tuple[Draft, str]] = []
    for draft in drafts:
        found = list(check(draft.cfg))
        problems += [(draft.label, p) for p in found]
        try:
            hashed.append((draft, identity(draft.cfg)))
        except ConfigError as e:
            if not found:
                problems += [(draft.label, p) for _, p in e.problems]
    problems += _duplicates(hashed)
    problems += _varying_launch(drafts)
    if problems:
        raise ConfigError(problems)

    deltas = [delta(draft.cfg, base) if base is not None else {} for draft, _ in hashed]
    varied = _varied(deltas)
    points: list[Point] = []
    for (draft, digest), differs in zip(hashed, deltas, strict=True):
        name = _name(draft, differs, digest, varied)
        for repeat in range(draft.cfg.launch.repeat):
            points.append(
                Point(
                    cfg=draft.cfg,
                    overrides=list(draft.overrides),
                    delta=differs,
                    identity=digest,
                    name=name,
                    repeat=repeat,
                    parent=parent,
                    force=force,
                )
            )
    return points


def _varied(deltas: Sequence[dict[str, Any]]) -> set[str]:
    """The fields that are not the same in all points."""
    fields = {name for differs in deltas for name in differs}
    same = object()
    return {name for name in fields if any(d.get(name, same) != deltas[0].get(name, same) for d in deltas)}


def _name(draft: Draft, differs: dict[str, Any], digest: str, varied: set[str]) -> str:
    """What differs, first from the other points, and the hash; of a point with an experiment, the experiment stands for what only it sets."""
    from europa_exp.config.experiment import experiment_of, typed
    from europa_exp.config.identity import run_name
    from europa_exp.launch.overrides import key_of

    if (experiment := experiment_of(draft.overrides)) is None:
        return run_name(differs, digest, varied=varied)
    beside = [text for text in draft.overrides if key_of(text) != "cluster"]  # a place is no experiment
    of_its_own = {name: value for name, value in differs.items() if typed(name, beside)}
    return run_name(of_its_own, digest, experiment.rsplit("/", 1)[-1], varied)


def _duplicates(hashed: Sequence[tuple[Draft, str]]) -> Problems:
    """Points of one call that are the same experiment."""
    first: dict[str, Draft] = {}
    out: Problems = []
    for draft, digest in hashed:
        if digest in first:
            out.append(
                (
                    draft.label,
                    Problem(
                        "identity",
                        digest,
                        f"the same experiment as {first[digest].label}: nothing that can change a result differs",
                        "Drop one of the two, or use launch.repeat=N for repeats of one experiment",
                    ),
                )
            )
        else:
            first[digest] = draft
    return out


def _varying_launch(drafts: Sequence[Draft]) -> Problems:
    """Launch settings belong to the call, so they can't differ between its points."""
    if not drafts:
        return []
    from dataclasses import asdict

    first = asdict(drafts[0].cfg.launch)
    out: Problems = []
    for draft in drafts[1:]:
        for name, value in asdict(draft.cfg.launch).items():
            if value != first[name]:
                rule = "launch settings belong to the whole call and can't be swept"
                out.append((draft.label, Problem(f"launch.{name}", value, rule, f"Give launch.{name} once")))
    return out
