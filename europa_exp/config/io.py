"""A configuration as YAML and back.

The frozen form is plain data: every value resolved, enums by name, groups and fields in the order of the schema. Reading
it back neither resolves interpolations nor imports or builds anything but the schema's own dataclasses, so a record from
somebody else is data and no more.
"""

from __future__ import annotations

import difflib
import enum
import re
import types
import typing
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml

from europa_exp.config.errors import ConfigError, Problem
from europa_exp.config.schema import NEVER_OFF, Config

T = TypeVar("T")

FLOAT = re.compile(r"^[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)[eE][-+]?[0-9]+$")
"""Numbers such as 1e-3, which YAML 1.1 takes for text and OmegaConf for numbers: written quoted if text, read as numbers."""


class Invalid(Exception):
    """A value that doesn't fit its field: the rule and the way out."""

    def __init__(self, rule: str, way_out: str) -> None:
        super().__init__(rule)
        self.rule, self.way_out = rule, way_out


# ------------------------------------------------------------------------------------------------------- to plain data


def to_dict(cfg: Any) -> dict[str, Any]:
    """The configuration (or one group of it) as nested dicts, lists, strings, numbers, booleans and None.

    Fields come in the order of the schema, enums by name, keys of free dicts (``cluster.env``) sorted.
    """
    return {f.name: plain(getattr(cfg, f.name)) for f in fields(cfg)}


def plain(value: Any) -> Any:
    """One value of a configuration as JSON-able data."""
    if is_dataclass(value) and not isinstance(value, type):
        return to_dict(value)
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, dict):
        return {str(k): plain(value[k]) for k in sorted(value, key=str)}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value


class _Dumper(yaml.SafeDumper):
    """Quotes text that OmegaConf would read as a number; never writes anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    # Only double quotes bring every line break of Unicode back as it was.
    style = None if text.isprintable() else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


class _Loader(yaml.SafeLoader):
    """Refuses duplicate keys, anchors and aliases; knows the numbers that `_Dumper` knows."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise yaml.constructor.ConstructorError(
                None, None, "anchors and aliases (& and *) have no place in a configuration", event.start_mark
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        refuse_duplicate_keys(node)
        return super().construct_mapping(node, deep=deep)


for _cls in (_Dumper, _Loader):
    _cls.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, list("-+0123456789."))


def refuse_duplicate_keys(node: yaml.Node) -> None:
    """Raise a ConstructorError with file and lines if a mapping of this YAML node has a key twice."""
    if not isinstance(node, yaml.MappingNode):
        return
    first: dict[str, int] = {}
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            continue
        line = key.start_mark.line + 1
        if key.value in first:
            raise yaml.constructor.ConstructorError(
                None,
                None,
                f"the key '{key.value}' stands in line {first[key.value]} and again in line {line}; keep one of them",
                key.start_mark,
            )
        first[key.value] = line


def to_yaml(cfg: Config) -> str:
    """The frozen form of a configuration: the same text for equal configurations, read back by `from_yaml`."""
    return yaml.dump(to_dict(cfg), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100_000)


# ----------------------------------------------------------------------------------------------------- from plain data


def load(path: str | Path) -> Config:
    """Read a frozen configuration from a file.

    Raises ConfigError if the file can't be read or doesn't hold a valid configuration; the label is the path.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        reason = e.strerror if isinstance(e, OSError) else "it is not UTF-8 text"
        problem = Problem(
            "config", str(path), f"the frozen configuration can't be read: {reason}", "Name a run folder"
        )
        raise ConfigError([(str(path), problem)]) from e
    return from_yaml(text, label=str(path))


def from_yaml(text: str, label: str = "config.yaml") -> Config:
    """Read a frozen configuration.

    A knob that the text lacks takes its ``off`` value. Unknown or duplicate keys, values of the wrong type, lacking
    required fields, interpolations and YAML tags are errors, all told in one ConfigError.
    """
    return from_dict(read_plain(text, label), label)


def read_plain(text: str, label: str) -> Any:
    """YAML text as plain data; duplicate keys, anchors and tags raise ConfigError with file and line."""
    try:
        loader = _Loader(text)
        loader.name = label
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        where = f"{label}, line {mark.line + 1}" if mark else label
        problem = Problem("config", where, e.problem or "not valid YAML", "Correct that line")
    except (yaml.YAMLError, ValueError, RecursionError) as e:
        problem = Problem("config", label, f"not valid YAML: {e}", "Restore the file as it was written")
    raise ConfigError([(label, problem)])


def from_dict(data: Any, label: str = "config.yaml") -> Config:
    """Build a configuration from plain nested data (see `from_yaml` for the rules)."""
    problems: list[Problem] = []
    cfg = _build(Config, data, "", problems)
    if problems or cfg is None:
        raise ConfigError([(label, p) for p in problems])
    return cfg


_hints: dict[type, dict[str, Any]] = {}


def hints(cls: type) -> dict[str, Any]:
    """Resolved type hints of a dataclass of the schema."""
    if cls not in _hints:
        _hints[cls] = typing.get_type_hints(cls)
    return _hints[cls]


def _build(cls: type[T], data: Any, prefix: str, problems: list[Problem]) -> T | None:
    if not isinstance(data, dict):
        problems.append(
            Problem(
                prefix or "config",
                data,
                "must be a mapping of fields to values",
                "Restore the file as written",
            )
        )
        return None
    known = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]
    dot = f"{prefix}." if prefix else ""
    for key in data:
        if key not in known:
            problems.append(
                Problem(f"{dot}{key}", data[key], "there is no such field", _suggest(str(key), known))
            )
    values: dict[str, Any] = {}
    for name, f in known.items():
        hint = hints(cls)[name]
        if is_dataclass(hint):
            values[name] = _build(typing.cast(type, hint), data.get(name, {}), f"{dot}{name}", problems)
        elif name not in data:
            if f.metadata.get("off") == NEVER_OFF:
                problems.append(
                    Problem(f"{dot}{name}", "???", "every run needs a value here", f"Give {dot}{name}")
                )
            elif f.default is not NO_DEFAULT:
                values[name] = f.default
        else:
            try:
                values[name] = convert(data[name], hint)
            except Invalid as e:
                problems.append(Problem(f"{dot}{name}", data[name], e.rule, e.way_out))
    return None if problems else cls(**values)


def _suggest(key: str, known: typing.Iterable[str]) -> str:
    close = difflib.get_close_matches(key, list(known), n=1)
    return f"Did you mean {close[0]}?" if close else f"Fields here: {', '.join(known)}"


def convert(value: Any, hint: Any) -> Any:
    """Plain data as the type of its field; strict, but a whole number will do for a float. Raises if it doesn't fit."""
    if isinstance(hint, types.UnionType):
        if value is None:
            return None
        (hint,) = (a for a in typing.get_args(hint) if a is not type(None))
    origin = typing.get_origin(hint)
    if origin is list and isinstance(value, list):
        return [convert(v, typing.get_args(hint)[0]) for v in value]
    if origin is dict and isinstance(value, dict):
        key_hint, value_hint = typing.get_args(hint)
        return {convert(k, key_hint): convert(v, value_hint) for k, v in value.items()}
    if isinstance(hint, enum.EnumMeta):
        members: dict[str, enum.Enum] = dict(hint.__members__)
        if isinstance(value, bool):  # YAML's reading of choices that are called true and false
            value = str(value).lower()
        if isinstance(value, str) and value in members:
            return members[value]
        raise Invalid(f"must be one of {', '.join(members)}", "Take one of these")
    if hint is float and type(value) is int and abs(value) < 2**1023:
        return float(value)
    if hint is str and isinstance(value, str):
        if value == "???":
            raise Invalid("every run needs a value here", "Give one")
        if "${" in value:
            raise Invalid("must be a resolved value, no ${...}", "Write the value itself")
        return str(value)
    if hint in (int, float, bool) and type(value) is hint:
        return value
    raise Invalid(f"must be {type_text(hint)}", "`europa fields` explains every field")


def wrong_booleans(data: Any, file: str | Path, cls: type = Config, prefix: str = "") -> list[Problem]:
    """What a YAML file, as plain data from the root of the configuration, gives to boolean fields that is no boolean.

    Interpolations and ``???`` are left to the composition. Names that are no fields are not looked at.
    """
    out: list[Problem] = []
    for name, value in data.items() if isinstance(data, dict) else ():
        hint = hints(cls).get(name)
        if is_dataclass(hint):
            out += wrong_booleans(value, file, typing.cast(type, hint), f"{prefix}{name}.")
        elif hint is bool and not isinstance(value, bool):
            if isinstance(value, str) and ("${" in value or value == "???"):
                continue
            rule, way_out = f"must be true or false, in {file}", f"Write {name}: true or {name}: false there"
            out.append(Problem(f"{prefix}{name}", value, rule, way_out))
    return out


def type_text(hint: Any) -> str:
    """A type of the schema in words."""
    if isinstance(hint, types.UnionType):
        (hint,) = (a for a in typing.get_args(hint) if a is not type(None))
        return f"{type_text(hint)} or null"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    origin = typing.get_origin(hint)
    if origin is list:
        return "a list of text"
    if origin is dict:
        return "a mapping of names to text"
    if isinstance(hint, enum.EnumMeta):
        return " | ".join(hint.__members__)
    return words.get(hint, str(hint))
