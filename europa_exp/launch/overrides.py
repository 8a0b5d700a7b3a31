"""Overrides as text: what people type and how a value is quoted.

Hydra parses them; this module writes values that Hydra's grammar reads back unchanged, and spares people its oddities.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, get_origin

from europa_exp.launch.fields import field_types, free_mapping, group_names, hint_of, takes_text
from europa_exp.runs.commands import quoted

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

Options = Callable[[str], list[str]]
"""Name of a group -> its options; empty for a name that is no group."""

_FOLDERS = ("training.initial_checkpoint", "cluster.checkpoint_dir", "launch.runs_dir", "data.path")
_KEY = re.compile(r"^(\+\+|\+|~)?([^=]*?)(?:=(.*))?$", re.DOTALL)


@lru_cache(maxsize=1)
def _parser() -> Any:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return OverridesParser.create()


def parse(text: str) -> Override:
    """One override; raises Hydra's exceptions for text that its grammar doesn't know."""
    return _parser().parse_override(text)


def split(text: str) -> tuple[str, str, str | None]:
    """Prefix (``+``, ``++``, ``~`` or nothing), key and raw value (None without ``=``) of an override."""
    match = _KEY.match(text)
    assert match is not None  # the pattern takes any text
    return match[1] or "", match[2], match[3]


def key_of(text: str) -> str:
    """Field or group that an override names, without prefix and package."""
    return split(text)[1].split("@")[0].strip()


def plain_value(value: Any) -> Any:
    """A parsed value without the grammar's own types."""
    from hydra.core.override_parser.types import Override

    return Override._convert_value(value)


def write(value: Any) -> str:
    """A plain value (text, number, boolean, None, list, dict) in Hydra's grammar; parsing gives the same value again."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(write(v) for v in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{write(str(k))}:{write(v)}" for k, v in value.items()) + "}"
    text = str(value)
    if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_./-]*", text) and text.lower() not in {
        "null",
        "true",
        "false",
        "nan",
        "inf",
    }:
        return text
    return quoted(text)


def normalize(text: str) -> str:
    """Spare people four oddities of Hydra's grammar.

    An entry of a free mapping (``nccl.extra.NCCL_ALGO=Ring``) needs no ``+``, nor do several (``nccl.extra={NCCL_ALGO:Ring}``,
    which leaves the others there as they are); a text field takes what was typed, where
    Hydra would read a number or a boolean and write it differently (``1e3`` as ``1000.0``, ``true`` as ``True``); so does a
    choice that is called ``true``. A folder may have ``=`` in it without quotes, as names of runs have. A ``+`` too many
    (``+training.steps=3``, ``+comm=fp8``) or too few (``sweeps=NAME``) is put right, as it can mean one thing only.
    """
    prefix, key, raw = split(text)
    if raw is None or prefix == "~":
        return text
    if key in field_types() or (key in (*group_names(), "experiment") and not raw.startswith("{")):
        prefix = ""
    elif key == "sweeps":
        prefix = "+"
    hint = hint_of(key)
    if free_mapping(key):
        prefix = "++"
    elif get_origin(hint) is dict:
        return f"++{key}={_entries(raw)}"
    if key in _FOLDERS and "=" in raw and re.fullmatch(r"[\w./=+@%:-]+", raw):
        return f"{prefix}{key}={quoted(raw)}"
    if hint is not None and (takes_text(hint) or "true" in getattr(hint, "__members__", ())):
        try:
            value = parse(text)._value
        except Exception:
            return text  # refused later, with advice
        if isinstance(value, (bool, int, float)):
            raw = quoted(raw.strip())
    return f"{prefix}{key}={raw}"


def _entries(raw: str) -> str:
    """The value of a free mapping, ``{A: 1e3, B: true}``, with what was typed as text; unchanged where it is no such value."""
    try:
        entries = parse(f"entries={raw}")._value
    except Exception:
        return raw  # refused later, with advice
    if not isinstance(entries, dict):
        return raw
    parts = []
    for name, value in entries.items():
        if isinstance(value, (bool, int, float)):
            typed = re.search(rf"[{{,]\s*{re.escape(str(name))}\s*:\s*([^,}}]*)", raw)
            value = typed[1].strip() if typed else value
        parts.append(f"{name}:{write(plain_value(value))}")
    return "{" + ",".join(parts) + "}"
