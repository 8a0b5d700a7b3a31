"""What is wrong with overrides, said in words: field, value, rule and what to type instead, where Hydra only refuses."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, get_args, get_origin

from europa_exp.config.errors import Problem
from europa_exp.launch.fields import field_types, free_mapping, group_names, hint_of, near, takes_text
from europa_exp.launch.overrides import Options, parse, plain_value, split
from europa_exp.runs.commands import for_shell

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

_NAMES = re.compile(r"[A-Za-z_][\w-]*(?:[./][\w-]+)*(?:@[\w.:-]*)?", re.ASCII)


def problems_of(texts: Sequence[str], options: Options, *, multirun: bool) -> list[Problem]:
    """Everything that can be said to be wrong with these overrides without composing them."""
    out: list[Problem] = []
    for i, text in enumerate(texts):
        out += _problems_of_one(text, texts[i - 1] if i else None, options, multirun)
    return list({str(p): p for p in out}.values())


def _problems_of_one(text: str, before: str | None, options: Options, multirun: bool) -> list[Problem]:
    _, key, raw = split(text)
    if not key:
        return [_nameless(text)]
    try:
        override = parse(text)
    except Exception:
        return [_grammar(text, key, raw, before)]
    if override.is_hydra_override():
        return []
    if key == "sweeps":
        choices = options(key)
        return [
            p for p in [_option_problem(f"+{key}", plain_value(override._value), choices)] if p and choices
        ]
    if override.is_sweep_override() and not multirun:
        return [_needs_multirun(override)]
    if override.is_delete():
        problem = _delete_problem(key, options)
        return [problem] if problem else []
    try:
        values = list(override.sweep_iterator()) if override.is_sweep_override() else [override._value]
    except Exception:  # glob() needs the config loader; its result holds existing options only
        return []
    found = [_value_problem(override, plain_value(v), options) for v in values]
    if raw is not None and not override.is_sweep_override():  # show what was typed: 1e3, not 1000.0
        found = [p and replace(p, value=raw) if isinstance(p and p.value, float) else p for p in found]
    return [p for p in found if p is not None]


def _nameless(text: str) -> Problem:
    rule = "names no field and no group"
    return Problem(
        "command line", text, rule, "Write field=value or group=option; python launch.py --help lists them"
    )


def _grammar(text: str, key: str, raw: str | None, before: str | None) -> Problem:
    if raw is None:
        rule = "is no field=value and no group=option"
        way_out = "Write field=value or group=option; python launch.py --help lists them"
        if before is not None and (value := split(before)[2]) is not None:
            name = split(before)[1]
            way_out = f"If it is part of the value before it, the shell needs quotes: {for_shell(name, f'{value} {text}')}"
            if value.endswith(","):
                way_out = f"Without the blank it is a list of values: {name}={value}{text}"
        return Problem("command line", text, rule, way_out)
    if not _NAMES.fullmatch(key):
        return Problem(key, raw, "is no name of a field or group", near_fields(key))
    hint = hint_of(key)
    rule = "holds characters with a meaning in Hydra's grammar, unquoted"
    if get_origin(hint) is dict:
        way_out = f"Write +{key}.NAME=text for each, or '{key}={{NAME:text}}' in quotes"
    elif raw[:1] in "[{" or "(" in raw:
        way_out = f"For text, type {for_shell(key, raw)}; in a list or a call, quote the parts"
    elif hint is not None and not takes_text(hint) and get_origin(hint) is not list:  # quotes would not help
        from europa_exp.config.io import type_text

        rule = f"must be {type_text(hint)}"
        way_out = (
            f"Several, with -m, go with one comma between two: {key}=A,B; `europa fields {key}` explains it"
        )
    else:
        way_out = f"Quotes inside quotes make it plain text: {for_shell(key, raw)}"
    return Problem(key, raw, rule, way_out)


def _delete_problem(key: str, options: Options) -> Problem | None:
    """Why a name can't be taken out with ``~``; None where only the composition can tell."""
    hint = field_types().get(key)
    if hint is None:
        known = options(key) or key in group_names() or free_mapping(key)
        return (
            None
            if known
            else Problem("command line", f"~{key}", "there is no such field or group", near_fields(key))
        )
    if "." not in key:
        return None
    if get_origin(hint) is dict:
        way_out = f"Take entries out one by one, ~{key}.NAME"
    elif type(None) in get_args(hint):
        way_out = f"Write {key}=null"
    else:
        way_out = f"Leave it out, then conf/'s value counts, or give another: {key}=<value>"
    return Problem("command line", f"~{key}", "a field can't be taken out, only given a value", way_out)


def _needs_multirun(override: Override) -> Problem:
    from hydra.core.override_parser.types import ValueType

    text = override.input_line or ""
    _, key, raw = split(text)
    raw = raw or ""
    rule = "asks for several runs, but this call is for one"
    way_out = "Add -m to run each"
    if override.value_type == ValueType.SIMPLE_CHOICE_SWEEP:
        rule = "a comma asks for several runs, but this call is for one"
        hint = hint_of(key)
        if hint is not None and takes_text(hint):
            way_out = f"Add -m to run each; for one text with a comma, type {for_shell(key, raw)}"
        elif hint is not None and "list" in str(hint):
            way_out = f"Add -m to run each; for one list, type {shlex.quote(f'{key}=[{raw}]')}"
    return Problem(key, raw, rule, way_out)


def _value_problem(override: Override, value: Any, options: Options) -> Problem | None:
    key = override.key_or_group
    choices = [] if override.package else options(key)
    if isinstance(value, dict) and key in group_names():
        inner = [(f"{key}.{name}", v) for name, v in value.items()]
        found = (_unknown(k, v) if hint_of(k) is None else type_problem(k, v) for k, v in inner)
        return next((p for p in found if p), None)
    if choices:
        return _option_problem(key, value, choices)
    if key in group_names():
        return None
    hint = hint_of(key)
    if hint is None:
        return _unknown(key, value)
    return type_problem(key, value)


def _option_problem(key: str, value: Any, choices: list[str]) -> Problem | None:
    wanted = value if isinstance(value, list) else [value]
    if all(isinstance(v, str) and (v in choices or "${" in v) for v in wanted):
        return None
    near_ones = near(str(value), choices)
    start = f"Perhaps {key}={near_ones[0]} was meant. " if near_ones else ""
    return Problem(key, value, "there is no such option", f"{start}Options: {', '.join(choices)}")


def _unknown(key: str, value: Any) -> Problem:
    return Problem(key, value, "there is no such field or group", near_fields(key))


def near_fields(key: str) -> str:
    """A way out for a name that doesn't exist: near names, else what exists there."""
    if matches := near(key, [*field_types(), *group_names()]):
        return f"Perhaps {' or '.join(matches)} was meant"
    group = key.split(".")[0]
    if group in group_names():
        names = [k.split(".", 1)[1] for k in field_types() if k.startswith(f"{group}.")]
        return f"Fields of {group}: {', '.join(names)}"
    return f"Groups: {', '.join(group_names())}; europa fields lists their fields"


def type_problem(key: str, value: Any) -> Problem | None:
    """What is wrong with the type of a plain value for a field of the schema; None if it fits.

    It fits if OmegaConf takes it; but of numbers a boolean takes 0 and 1 only, where OmegaConf takes all that are not 0 for true.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from europa_exp.config.io import type_text

    if isinstance(value, str) and ("${" in value or value == "???"):
        return None  # interpolations are resolved and missing values found in the composition
    yes_or_no = f"Write {key}=true or {key}=false"
    if hint_of(key) is bool and _counts(value):
        return Problem(key, value, "must be true or false", yes_or_no)
    try:
        OmegaConf.update(_scratch(), key, value, force_add=free_mapping(key) is not None)
    except OmegaConfBaseException:
        hint = hint_of(key)
        wanted = type_text(hint)
        optional = wanted.endswith(" or null")
        if isinstance(value, float) and value.is_integer() and "whole number" in wanted:
            way_out = f"Write {key}={int(value)}"
        elif mapping := key if get_origin(hint) is dict else free_mapping(key):
            way_out = f"Write +{mapping}.NAME=text, or {mapping}={{NAME:text}}; ~{mapping}.NAME takes one out"
        elif get_origin(hint) is list:
            way_out = f"Write {key}=[a,b], or {key}=[] for none"
        elif value in ("None", "none", None):
            way_out = f"Write {key}=null" if optional else f"Every run needs a {key}"
        elif hint is bool:
            way_out = yes_or_no
        else:
            way_out = f"`europa fields {key}` explains it"
        return Problem(key, value, f"must be {wanted}", way_out)
    return None


def wrong_booleans(override: Override) -> list[Problem]:
    """Numbers other than 0 and 1 that an override (no sweep) gives to boolean fields, in a group's mapping too."""
    if override.is_delete():
        return []
    out: list[Problem] = []

    def walk(key: str, value: Any) -> None:
        if isinstance(value, dict):
            for name, inner in value.items():
                walk(f"{key}.{name}", inner)
        elif hint_of(key) is bool and _counts(value):
            problem = type_problem(key, value)
            out.extend([problem] if problem else [])

    walk(override.key_or_group, plain_value(override._value))
    return out


def _counts(value: Any) -> bool:
    """Whether a value is a number, or the text of one, that is neither 0 nor 1."""
    try:
        return not isinstance(value, bool) and int(value) not in (0, 1)
    except (TypeError, ValueError, OverflowError):
        return False


@lru_cache(maxsize=1)
def _scratch() -> Any:
    from omegaconf import OmegaConf

    from europa_exp.config.schema import Config

    return OmegaConf.structured(Config)
