"""The fields of configurations: which are switched on, which differ between two runs, which between many."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from europa_exp.config.experiment import typed
from europa_exp.config.identity import flatten
from europa_exp.config.io import plain
from europa_exp.config.schema import NEVER_OFF, Config
from europa_exp.runs.compare.member import AROUND, SEEDS, Member
from europa_exp.runs.folder import RunFolder


def names(token: str, field: str) -> bool:
    """Whether ``token`` is the field or a group that it is in."""
    return field == token or field.startswith(f"{token}.")


def ends(token: str, field: str) -> bool:
    """Whether ``token`` is an end of the field's name."""
    return field.endswith(f".{token}")


def off_values() -> dict[str, Any]:
    """Dotted field -> off value as plain data, for the fields that have one."""
    found: dict[str, Any] = {}

    def walk(cls: Any, prefix: str) -> None:
        for f in fields(cls):
            if is_dataclass(f.default_factory):
                walk(f.default_factory, f"{prefix}{f.name}.")
            elif (off := f.metadata.get("off", NEVER_OFF)) != NEVER_OFF:
                found[f"{prefix}{f.name}"] = plain(off)

    walk(Config, "")
    return found


# ------------------------------------------------------------------------------------------------------- one run


def switched_on(run: RunFolder) -> dict[str, Any]:
    """The knobs of a run that are not at their ``off`` value. Raises what reading the configuration raises."""
    off = off_values()
    found = flatten(run.config())
    # An entry of a free dict (nccl.extra.NCCL_ALGO) has no off value of its own: it is there or it isn't.
    return {k: v for k, v in found.items() if (off[k] != v if k in off else k.rpartition(".")[0] in off)}


def field_changes(run: RunFolder, parent: str) -> dict[str, tuple[Any, Any]] | None:
    """Dotted field -> (value of the parent, value of the run); None if the parent is not beside the run any more."""
    try:
        old, new = flatten(RunFolder(run.path.parent / Path(parent).name).config()), flatten(run.config())
    except Exception:
        return None
    return {k: (old.get(k), new.get(k)) for k in dict.fromkeys([*old, *new]) if old.get(k) != new.get(k)}


# ------------------------------------------------------------------------------------------------------ many runs


@dataclass(frozen=True)
class Differences:
    """The fields whose values differ, in the order of the schema, the cluster, code and data last.

    ``merged`` are seeds in which runs may differ and yet share a row, ``implied`` what the names of experiments tell.
    """

    fields: list[str]
    merged: set[str]
    implied: list[str]

    @property
    def shown(self) -> list[str]:
        """What columns are for."""
        return [name for name in self.fields if name not in self.merged and name not in self.implied]


def differences(members: Sequence[Member], by: Sequence[str], each: bool) -> Differences:
    """What differs between the members that can be read; ``by`` and ``each`` are those of ``compare``."""
    found = _differing([m for m in members if m.fields is not None])
    merged = set() if each else _merged_seeds(found, by)
    implied = [] if by else _implied([name for name in found if name not in merged], members)
    return Differences(found, merged, implied)


def _differing(members: Sequence[Member]) -> list[str]:
    every = dict.fromkeys(name for m in members for name in m.fields or {})
    off = off_values()

    def key(m: Member, name: str) -> str:
        assert m.fields is not None
        return json.dumps(m.fields.get(name, off.get(name)), sort_keys=True, default=str)

    found = [name for name in every if len({key(m, name) for m in members}) > 1]
    return [n for n in found if n not in AROUND] + [n for n in AROUND if n in found]


def _merged_seeds(differing: Sequence[str], by: Sequence[str]) -> set[str]:
    asked = {name for name in SEEDS for token in by if names(token, name) or ends(token, name)}
    seeds = {name for name in differing if name in SEEDS} - asked
    return seeds if set(differing) - seeds else set()


def _implied(differing: Sequence[str], members: Sequence[Member]) -> list[str]:
    """Differing fields that are told by the experiments: the same in all runs of one, and typed for none."""
    if not all(m.experiment for m in members):
        return []
    found: list[str] = []
    for name in differing:
        values: dict[str | None, set[str]] = {}
        for m in members:
            if m.fields is not None:
                value = json.dumps(m.fields.get(name), default=str)
                values.setdefault(m.experiment, set()).add(value)
        told = all(len(of_one) == 1 for of_one in values.values())
        if told and name not in AROUND and not any(typed(name, m.overrides) for m in members):
            found.append(name)
    return found
