"""Where a run comes from: code, packages, machine, command line; and what differs when it is run again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class CodeState:
    """The code of this moment. ``diff`` is a patch against ``commit``, untracked files included, without secrets.

    ``fingerprint`` is equal for equal code; ``root`` is the checkout. Outside a checkout ``commit`` is None and ``notes`` say why.
    """

    commit: str | None
    fingerprint: str
    branch: str | None = None
    dirty: bool = False
    diff: str = ""
    root: str | None = None
    notes: list[str] = field(default_factory=list)


def code_state(root: Path | None = None) -> CodeState:
    """The state of the checkout at ``root`` (without it: the one that holds this package). Never raises."""
    raise NotImplementedError


def record(
    code: CodeState, *, command: Sequence[str], overrides: Sequence[str], extra: Mapping[str, Any]
) -> dict[str, Any]:
    """The content of ``provenance.json``, without secrets."""
    raise NotImplementedError


def differences(recorded: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """What a rerun finds changed since the record, one line each."""
    raise NotImplementedError
