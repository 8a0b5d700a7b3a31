"""The schema explained: every field with its type, its choices or range, its off value and its docstring.

Docstrings under fields don't exist at run time, so they are read from the schema's source.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import typing
from dataclasses import fields, is_dataclass
from types import ModuleType
from typing import Any, NamedTuple

from europa_exp.config import schema
from europa_exp.config.errors import ConfigError, Problem, show
from europa_exp.config.io import hints, type_text
from europa_exp.config.rules.values import Interval


class FieldDoc(NamedTuple):
    """What there is to know about one field."""

    field: str
    """Dotted name, as on the command line."""

    type: str
    """Type in words, with the choices of an enum or the range of a number."""

    off: str
    """The value that means "as if there were no such field"; ``required`` where ``conf/`` has to give one."""

    doc: str
    """The docstring, on one line."""


def groups() -> dict[str, str]:
    """Every group of the schema and what it is about."""
    found = {f.name: hints(schema.Config)[f.name] for f in fields(schema.Config)}
    return {name: " ".join((cls.__doc__ or "").split()) for name, cls in found.items() if is_dataclass(cls)}


def describe(name: str | None = None) -> list[FieldDoc]:
    """The fields of one group (``nccl``), one field (``nccl.max_ctas``), or all, in the order of the schema.

    Raises ConfigError for a name that is neither.
    """
    everything = _describe(schema.Config, "", field_docs(schema))
    found = [d for d in everything if name is None or d.field == name or d.field.startswith(f"{name}.")]
    if not found:
        known = [*groups(), *(d.field for d in everything)]
        close = difflib.get_close_matches(str(name), known, n=1)
        way_out = f"Did you mean {close[0]}?" if close else f"Groups are {', '.join(groups())}"
        raise ConfigError([("", Problem("fields", name, "there is no such group or field", way_out))])
    return found


def field_docs(module: ModuleType) -> dict[tuple[str, str], str]:
    """Docstrings under the fields of a module's classes: (class name, field name) -> text on one line."""
    out: dict[tuple[str, str], str] = {}
    for cls in ast.parse(inspect.getsource(module)).body:
        if not isinstance(cls, ast.ClassDef):
            continue
        for statement, after in zip(cls.body, cls.body[1:], strict=False):
            named = isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
            text = after.value if isinstance(after, ast.Expr) else None
            if named and isinstance(text, ast.Constant) and isinstance(text.value, str):
                target = typing.cast(ast.Name, typing.cast(ast.AnnAssign, statement).target)
                out[cls.name, target.id] = " ".join(text.value.split())
    return out


def _describe(cls: type, prefix: str, docs: dict[tuple[str, str], str]) -> list[FieldDoc]:
    out: list[FieldDoc] = []
    for f in fields(cls):
        hint = hints(cls)[f.name]
        if is_dataclass(hint):
            out += _describe(typing.cast(type, hint), f"{prefix}{f.name}.", docs)
        else:
            within = f.metadata.get("within")
            doc = docs.get((cls.__name__, f.name), "")
            out.append(FieldDoc(f"{prefix}{f.name}", _type(hint, within), _off(f.metadata["off"]), doc))
    return out


def _type(hint: Any, within: str | None) -> str:
    text = type_text(hint)
    if within is None:
        return text
    null = ", or null" if text.endswith(" or null") else ""
    return f"{text.removesuffix(' or null')}, {Interval.parse(within)}{null}"


def _off(off: Any) -> str:
    return "required" if off == schema.NEVER_OFF else show(off)
