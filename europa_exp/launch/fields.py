"""The fields of the schema by their dotted names: what an override may name and what type it must have."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from functools import lru_cache
from typing import Any, cast, get_args, get_origin


@lru_cache(maxsize=1)
def field_types() -> dict[str, Any]:
    """Every field of the schema that is no group: dotted name -> type hint."""
    from europa_exp.config.io import hints
    from europa_exp.config.schema import Config

    out: dict[str, Any] = {}

    def walk(cls: type, prefix: str) -> None:
        for f in fields(cls):
            hint = hints(cls)[f.name]
            if is_dataclass(hint):
                walk(cast(type, hint), f"{prefix}{f.name}.")
            else:
                out[f"{prefix}{f.name}"] = hint

    walk(Config, "")
    return out


@lru_cache(maxsize=1)
def group_names() -> tuple[str, ...]:
    """The groups of the schema, in its order."""
    from europa_exp.config.io import hints
    from europa_exp.config.schema import Config

    return tuple(f.name for f in fields(Config) if is_dataclass(hints(Config)[f.name]))


def hint_of(key: str) -> Any | None:
    """Type of a field, or of one entry of a free mapping (``nccl.extra.NCCL_ALGO``); None if there is no such field."""
    types = field_types()
    if key in types:
        return types[key]
    mapping = free_mapping(key)
    return get_args(types[mapping])[1] if mapping else None


def free_mapping(key: str) -> str | None:
    """The field of free names that ``key`` is an entry of: ``cluster.env`` for ``cluster.env.TZ``, else None."""
    parts = key.split(".")
    for n in range(1, len(parts)):
        name = ".".join(parts[:n])
        if get_origin(field_types().get(name)) is dict:
            return name
    return None


def takes_text(hint: Any) -> bool:
    """Whether a field holds text (or null)."""
    return hint is str or (str in get_args(hint) and get_origin(hint) not in (dict, list))


def near(name: str, known: Iterable[str], n: int = 3) -> list[str]:
    """Known names that a mistyped one may have meant: near in spelling, or the same last part in another group."""
    known = list(known)
    leaf = name.rsplit(".", 1)[-1]
    if same_leaf := [k for k in known if k.rsplit(".", 1)[-1] == leaf]:
        return same_leaf[:n]
    if close := difflib.get_close_matches(name, known, n=2, cutoff=0.8):
        return close[:n]
    leaves = {k.rsplit(".", 1)[-1]: k for k in known}
    return [leaves[x] for x in difflib.get_close_matches(leaf, leaves, n=min(2, n), cutoff=0.75)]


def schema_order(key: str) -> tuple[int, str]:
    """Sort key: fields in the order of the schema, entries of a free mapping at its place."""
    names = list(field_types())
    name = free_mapping(key) or key
    return (names.index(name) if name in names else len(names)), key
