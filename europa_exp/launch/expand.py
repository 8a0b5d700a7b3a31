"""From one call to its points: sweeps taken apart, composed, thinned out, checked."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from europa_exp.config.errors import ConfigError, Problem
from europa_exp.launch.compose import Composition, explained, resolve
from europa_exp.launch.override_problems import problems_of
from europa_exp.launch.overrides import key_of, normalize, parse
from europa_exp.launch.points import Draft, Point, Problems, make_points
from europa_exp.launch.sweep_file import GROUP, SweepFile, condition_problems, excluded_by, grid, listed

if TYPE_CHECKING:
    from europa_exp.config.schema import Config

MAX_POINTS = 10_000
"""More points in one call are taken for a slip of the pen."""


class Composes(Protocol):
    """What turns the overrides of one point into a composition."""

    def options(self, group: str) -> list[str]: ...

    def compose(self, overrides: Sequence[str]) -> Composition: ...


@dataclass
class Plan:
    """The checked points of one call."""

    points: list[Point]
    sweep: str | None
    """Name of the sweep without a time; None for a single run that no sweep was named for."""

    excluded: int = 0
    """Points that the sweep file's conditions left out."""

    notices: list[str] = field(default_factory=list)


def make_plan(
    composer: Composes,
    arguments: Sequence[str],
    *,
    multirun: bool,
    sweep_file: SweepFile | None = None,
    base: Config | None = None,
    parent: str | None = None,
    force: bool = False,
    loader: Any = None,
) -> Plan:
    """Expand, compose and check a call. Raises ConfigError with all problems of all points.

    ``loader`` is Hydra's config loader, which glob() asks for the options of a group.
    """
    sweep_file = sweep_file or SweepFile()
    arguments = [a for a in arguments if key_of(a) != GROUP]
    if not multirun and (sweep_file.params or sweep_file.points):
        raise ConfigError(
            [
                (
                    "",
                    Problem(
                        GROUP,
                        sweep_file.name,
                        "a sweep file asks for several runs",
                        f"Add -m: python launch.py -m +sweeps={sweep_file.name}",
                    ),
                )
            ]
        )
    texts, varied = expand(composer, arguments, sweep_file, multirun=multirun, loader=loader)
    labels = _labels(texts, varied)

    problems: Problems = [
        ("the sweep file", p) for p in condition_problems(sweep_file.exclude, composer.options)
    ]
    drafts: list[Draft] = []
    met: set[int] = set()
    excluded = 0
    for label, overrides in zip(labels, texts, strict=True):
        try:
            composition = composer.compose(overrides)
            entry = None if problems else excluded_by(composition, sweep_file.exclude)
            if entry is not None:
                met.add(entry)
                excluded += 1
                continue
            drafts.append(Draft(label, resolve(composition.cfg), overrides))
        except ConfigError as e:
            problems += [(label, p) for _, p in e.problems]
    if not drafts and not problems:
        rule = f"the conditions leave out all {excluded} points"
        raise ConfigError(
            [("the sweep file", Problem("exclude", sweep_file.exclude, rule, "Loosen a condition"))]
        )

    points = make_points(drafts, base=base, problems=problems, parent=parent, force=force)
    notices = [
        f"{GROUP}/{sweep_file.name}.yaml: exclude, entry {i + 1}, left out no point"
        for i in range(len(sweep_file.exclude))
        if i not in met
    ]
    sweep = points[0].cfg.launch.sweep_name
    if sweep is None and multirun:
        sweep = sweep_file.name or "_".join(key.split(".")[-1] for key in varied) or None
    return Plan(points, sweep, excluded, notices)


def expand(
    composer: Composes, arguments: Sequence[str], sweep_file: SweepFile, *, multirun: bool, loader: Any = None
) -> tuple[list[list[str]], list[str]]:
    """Overrides of every point, in the order of typing with the last sweep running fastest; and the keys that vary.

    The command line replaces a parameter of the sweep file's grid; the keys of its listed points can't be given again.
    Raises ConfigError.
    """
    given = [normalize(a) for a in arguments]
    if not multirun:
        return [given], []
    cli_keys = {key_of(a) for a in given}
    from_grid = [normalize(a) for a in grid(sweep_file.params) if key_of(a) not in cli_keys]
    points = [[normalize(a) for a in point] for point in listed(sweep_file.points)] or [[]]
    _refuse_twice(points, cli_keys | {key_of(a) for a in from_grid})

    axes: list[list[list[str]]] = [points]
    varied = list(dict.fromkeys(key_of(a) for point in points for a in point))
    latest = {key_of(a): a for a in [*from_grid, *given]}  # as in Hydra, the last of two equal names counts
    with explained(list(latest.values()), composer.options, multirun=True):
        for key, text in latest.items():
            values = _values(text, loader)
            if values is None:
                axes.append([[text]])
                continue
            if not values:
                raise ConfigError(
                    [("", Problem(key, text, "the sweep is empty", "Give it at least one value"))]
                )
            name = parse(text).get_key_element()
            axes.append([[f"{name}={value}"] for value in values])
            if len(values) > 1:
                varied.append(key)
    n = 1
    for axis in axes:
        n *= len(axis)
    if n > MAX_POINTS:
        rule = f"the call has {n} points, more than {MAX_POINTS}"
        raise ConfigError([("", Problem("command line", " ".join(arguments), rule, "Narrow a sweep"))])
    texts = [[text for part in combination for text in part] for combination in itertools.product(*axes)]
    return texts, varied


def _values(text: str, loader: Any) -> list[str] | None:
    """The values of a sweep, as override text; None for a plain override."""
    override = parse(text)
    if not override.is_sweep_override():
        return None
    if not override.is_discrete_sweep():
        rule = "an interval has no list of values, and this sweeper takes every point"
        raise ConfigError(
            [("", Problem(key_of(text), text, rule, "Use range(start,stop,step) or list the values"))]
        )
    override.config_loader = loader
    return list(override.sweep_string_iterator())


def _refuse_twice(points: Sequence[Sequence[str]], others: set[str]) -> None:
    twice = dict.fromkeys(key_of(a) for point in points for a in point if key_of(a) in others)
    if twice:
        way_out = "Leave it out here, or take it out of the listed points"
        rule = "is set by the listed points of the sweep file and once more"
        raise ConfigError([("", Problem(key, "", rule, way_out)) for key in twice])


def _labels(texts: Sequence[Sequence[str]], varied: Sequence[str]) -> list[str]:
    """How messages call the points: their number and what is theirs alone."""
    if len(texts) == 1:
        return [""]
    keys = set(varied)
    return [
        f"point {i} ({' '.join(t.lstrip('+') for t in point if key_of(t) in keys)})"
        for i, point in enumerate(texts, start=1)
    ]


def early_problems(composer: Composes, arguments: Sequence[str], *, multirun: bool) -> list[Problem]:
    """What can be said about a command line before Hydra reads it."""
    return problems_of([normalize(a) for a in arguments], composer.options, multirun=multirun)
