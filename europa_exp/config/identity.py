"""What makes two runs the same experiment: a hash of everything that can change a result.

The canonical form is the fully resolved configuration without (1) the fields and groups in ``IDENTITY_EXCLUDES`` and
(2) fields that equal their ``off`` value. So a knob that a later version adds changes no recorded hash as long as it is
off, while a changed default in ``conf/`` does.
"""

from __future__ import annotations

import enum
import hashlib
import json
import math
import re
import typing
from collections.abc import Collection
from dataclasses import fields, is_dataclass
from typing import Any

from europa_exp.config.errors import ConfigError, Problem
from europa_exp.config.io import Invalid, convert, hints, plain
from europa_exp.config.schema import IDENTITY_EXCLUDES, NEVER_OFF

MAX_NAME = 100
"""Most characters of a run's name, with the suffix that a repeat gets."""

SUFFIX_ROOM = 8
"""Characters that `run_name` leaves free for a suffix such as -r12."""

_MAX_VALUE = 24
_HASH_LENGTH = 12
_INT_LIMIT = 2**63


def is_excluded(dotted: str, excludes: frozenset[str] = IDENTITY_EXCLUDES) -> bool:
    """Whether a field is no part of the identity, because it or a group above it is excluded."""
    parts = dotted.split(".")
    return any(".".join(parts[: i + 1]) in excludes for i in range(len(parts)))


def canonical(cfg: Any) -> dict[str, Any]:
    """The part of a configuration that can change a result, as nested JSON-able data.

    Raises ConfigError for values without a stable form: NaN, infinities, integers beyond 64 bits, wrong types.
    """
    return _canonical(cfg, "")


def identity(cfg: Any) -> str:
    """12 hex characters that name the experiment (SHA-256 of the canonical form as JSON with sorted keys)."""
    text = json.dumps(
        canonical(cfg), sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    )
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:_HASH_LENGTH]


def delta(cfg: Any, base: Any) -> dict[str, Any]:
    """Identity-relevant fields whose value differs from ``base``: dotted name -> plain value, in schema order.

    Free dicts are compared by key (``nccl.extra.NCCL_ALGO``); a key that only ``base`` has comes with None.
    """
    mine, other = flatten(cfg), flatten(base)
    changed = {k: v for k, v in mine.items() if k not in other or other[k] != v}
    changed.update({k: None for k in other if k not in mine})
    return changed


def flatten(cfg: Any, prefix: str = "") -> dict[str, Any]:
    """Every identity-relevant field, dotted name -> canonical plain value, off or not."""
    out: dict[str, Any] = {}
    for f in fields(cfg):
        dotted = f"{prefix}{f.name}"
        value = getattr(cfg, f.name)
        if is_excluded(dotted):
            continue
        if is_dataclass(value):
            out.update(flatten(value, f"{dotted}."))
        elif isinstance(value, dict):
            out.update(
                {f"{dotted}.{k}": v for k, v in _stable(value, hints(type(cfg))[f.name], dotted).items()}
            )
        else:
            out[dotted] = _stable(value, hints(type(cfg))[f.name], dotted)
    return out


def _canonical(cfg: Any, prefix: str) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for f in fields(cfg):
        dotted = f"{prefix}{f.name}"
        value = getattr(cfg, f.name)
        if is_excluded(dotted):
            continue
        if is_dataclass(value):
            if group := _canonical(value, f"{dotted}."):
                out[f.name] = group
            continue
        hint = hints(type(cfg))[f.name]
        stable = _stable(value, hint, dotted)
        off = f.metadata["off"]
        if off == NEVER_OFF or stable != _stable(off, hint, dotted):
            out[f.name] = stable
    return out


def _stable(value: Any, hint: Any, dotted: str) -> Any:
    """One value in the only form in which it enters the hash: by the type of its field, -0.0 as 0.0, enums by name."""
    try:
        data = plain(convert(plain(value), hint))
    except Invalid as e:
        raise ConfigError([("", Problem(dotted, value, e.rule, e.way_out))]) from e
    if isinstance(data, float):
        if not math.isfinite(data):
            raise ConfigError(
                [("", Problem(dotted, value, "must be a finite number", "Give a finite number"))]
            )
        return data + 0.0  # -0.0 + 0.0 is 0.0
    if type(data) is int and not -_INT_LIMIT <= data < _INT_LIMIT:
        raise ConfigError([("", Problem(dotted, value, "must fit in 64 bits", "Give a smaller number"))])
    return data


# ---------------------------------------------------------------------------------------------------------------- names


def run_name(
    delta: dict[str, Any], identity: str, lead: str = "", varied: Collection[str] = frozenset()
) -> str:
    """A name for people and file systems: what differs, then the hash, for example ``expert_all_gather=fp8-1a2b3c4d5e6f``.

    Only letters, digits and ``._=-``; never a leading ``-`` or ``.``; at most 92 characters, so that a suffix for a
    repeat still fits in 100. The same for the same content, whatever the order of the dict. Different experiments
    differ in the hash, so a name may leave out what doesn't fit (``plus3`` says how many fields). ``lead`` comes first, then
    the fields in ``varied``, which tell the run from others of its sweep.
    """
    tail = _clean(identity) or "run"
    room = MAX_NAME - SUFFIX_ROOM - len(tail) - len("-plus999")
    keys = sorted(delta, key=lambda k: (k.startswith("model.") and "model.flavor" in delta, *_order(k)))
    if (
        "model.flavor" in keys
    ):  # the name of the model says most, so its fields give way to those of other groups
        keys = ["model.flavor", *(k for k in keys if k != "model.flavor")]
    keys.sort(key=lambda k: k not in varied)
    leaves = [k.rsplit(".", 1)[-1] for k in keys]
    words: list[str] = []
    for key, leaf in zip(keys, leaves, strict=True):
        short = leaf if leaves.count(leaf) == 1 else ".".join(key.split(".")[-2:])
        words.append(f"{_clean(short)[:32]}={_clean(_text(delta[key]))[:_MAX_VALUE].rstrip('.-')}")
    first = _clean(lead)[:32].lstrip(".-=").rstrip(".-")
    shown: list[str] = [first] if first else []
    for word in words:
        if len("-".join([*shown, word])) > room:
            break
        shown.append(word)
    if left := len(words) + bool(first) - len(shown):
        shown.append(f"plus{left}")
    name = "-".join([*(shown or ["default"]), tail])
    return name.lstrip(".-=")[: MAX_NAME - SUFFIX_ROOM]


def _order(key: str) -> tuple[int, str]:
    """Schema order; unknown names last, by name."""
    index = _schema_index()
    return index.get(key, index.get(key.rsplit(".", 1)[0], len(index))), key


_index: dict[str, int] = {}


def _schema_index() -> dict[str, int]:
    if not _index:
        from europa_exp.config.schema import Config

        def walk(cls: type, prefix: str) -> None:
            for f in fields(cls):
                hint = hints(cls)[f.name]
                _index[f"{prefix}{f.name}"] = len(_index)
                if is_dataclass(hint):
                    walk(typing.cast(type, hint), f"{prefix}{f.name}.")

        walk(Config, "")
    return _index


def _text(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "null"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, str):
        return value.rstrip("/").rsplit("/", 1)[-1]  # of a path its last part says most
    if isinstance(value, (list, tuple)):
        return "_".join(_text(v) for v in value)
    if isinstance(value, dict):
        return "_".join(f"{k}={_text(value[k])}" for k in sorted(value, key=str))
    try:
        return str(value)
    except ValueError:  # an integer with more digits than Python prints
        return "huge"


def _clean(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._=-]+", "_", text).strip("_")
