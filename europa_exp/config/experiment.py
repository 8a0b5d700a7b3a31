"""Which experiment of ``conf/experiment/`` a run was started with, read from its overrides: the configuration doesn't say."""

from __future__ import annotations

from collections.abc import Sequence

EXPERIMENT = "experiment"
"""The group whose options set fields of other groups; no field of the configuration."""


def experiment_of(overrides: Sequence[str]) -> str | None:
    """The option that ``experiment=`` chose in the overrides of one run (``ladder/08_fp8_gather``); None without one."""
    found = None
    for text in overrides:
        key, _, value = text.partition("=")
        if key.strip().lstrip("+") == EXPERIMENT:
            found = value.strip().strip("'\"") or None
    return None if found == "null" else found


def typed(name: str, overrides: Sequence[str]) -> bool:
    """Whether overrides name this field (dotted), or a group that it is in."""
    keys = {text.partition("=")[0].strip().lstrip("+~").split("@")[0] for text in overrides}
    return any(name == key or name.startswith(f"{key}.") for key in keys)
