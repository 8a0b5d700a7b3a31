"""The columns of what differs."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from europa_exp.config.experiment import EXPERIMENT
from europa_exp.runs.compare.comparison import Column, CompareError
from europa_exp.runs.compare.fields import Differences, ends, names, off_values
from europa_exp.runs.compare.member import Member


def columns_of(differ: Differences, members: Sequence[Member], by: Sequence[str]) -> list[Column]:
    """The columns that ``by`` names, else one for all that differs, and the experiment where there are several.

    Raises CompareError for a token of ``by`` that names no field, or several by their ends.
    """
    if by:
        return _asked_for(differ.shown, members, by)
    columns = _all_columns(differ.shown)
    if len({m.experiment for m in members}) > 1:
        columns.insert(0, Column(EXPERIMENT, (EXPERIMENT,)))
    return columns


def _asked_for(shown: Sequence[str], members: Sequence[Member], by: Sequence[str]) -> list[Column]:
    every = list(dict.fromkeys(name for m in members for name in m.fields or {}))
    every += [name for name in off_values() if name not in every]
    every += [EXPERIMENT] if any(m.experiment for m in members) else []
    columns: list[Column] = []
    for token in dict.fromkeys(by):
        fitting = [n for n in every if names(token, n)]
        if not fitting:
            fitting = [n for n in every if ends(token, n)]
            if len(fitting) != 1:
                raise CompareError(_no_field(token, fitting, every))
        differ = tuple(n for n in fitting if n in shown)
        if differ:
            columns.append(Column(token if len(differ) > 1 else _short(differ[0], shown), differ))
        else:
            # It was asked for, so it is shown, although it is the same everywhere; a group in one column.
            columns.append(Column(fitting[0] if len(fitting) == 1 else token, tuple(fitting)))
    return columns


def _no_field(token: str, fitting: Sequence[str], every: Sequence[str]) -> str:
    if fitting:
        return f"by={token}: several fields end like that ({', '.join(fitting)}); name one of them"
    pool = list(
        dict.fromkeys([*(n.split(".")[0] for n in every), *every, *(n.split(".")[-1] for n in every)])
    )
    close = difflib.get_close_matches(token, pool, n=3)
    hint = f"did you mean {' or '.join(close)}?" if close else "`europa fields` lists them"
    return f"by={token}: there is no such field or group; {hint}"


def _all_columns(shown: Sequence[str]) -> list[Column]:
    """A column a field; a group with more than two differing fields shares one, or the table would be all configuration."""
    by_group: dict[str, list[str]] = {}
    for name in shown:
        by_group.setdefault(name.split(".")[0], []).append(name)
    columns: list[Column] = []
    for group, within in by_group.items():
        if len(within) > 2:
            columns.append(Column(group, tuple(within)))
        else:
            columns += [Column(_short(name, shown), (name,)) for name in within]
    return columns


def _short(name: str, among: Sequence[str]) -> str:
    leaf = name.rsplit(".", 1)[-1]
    unique = sum(n.rsplit(".", 1)[-1] == leaf for n in among) <= 1
    return leaf if unique and leaf not in ("name", "source") else name
