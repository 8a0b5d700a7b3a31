"""Which points of a sweep have been run already."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path

from europa_exp.runs.folder import PROVENANCE_FILE, RunFolder
from europa_exp.runs.status import State, read_status

_IDENTITY = re.compile(rb'"identity":\s*"([^"]*)"')


def completed_twins(
    runs_dir: str | os.PathLike[str], wanted: Mapping[str, tuple[str, str | None, str]]
) -> dict[str, list[RunFolder]]:
    """The completed runs with the same configuration, code, data and cluster: identity -> runs, the oldest first.

    ``wanted`` maps the identity to the fingerprints of code and data and the name of the cluster. With ``launch.repeat=N`` a
    point needs ``N - len(...)`` more runs. Reads two small files a run, each once, and makes no guess: a run whose record is
    missing or broken is no twin.
    """
    twins: dict[str, list[tuple[str, RunFolder]]] = {identity: [] for identity in wanted}
    identities = {identity.encode() for identity in wanted}
    try:
        with os.scandir(runs_dir) as entries:
            paths = [entry.path for entry in entries if not entry.name.startswith(".")]
    except OSError:
        paths = []
    for path in paths:
        record = _record(path, identities)
        identity = record.get("identity") if record is not None else None
        if record is None or not isinstance(identity, str) or wanted.get(identity) != _key(record):
            continue
        if read_status(Path(path)).state is State.completed:
            twins[identity].append((str(record.get("created_at", "")), RunFolder(path)))
    return {
        identity: [run for _, run in sorted(found, key=lambda twin: (twin[0], twin[1].name))]
        for identity, found in twins.items()
    }


def is_of(provenance: bytes, identities: Collection[bytes]) -> bool:
    """Whether the text of a provenance names one of these identities: told without parsing it, which would take most of the
    time where a runs folder holds hundreds of other runs."""
    return any(found in identities for found in _IDENTITY.findall(provenance))


def _record(folder: str, identities: Collection[bytes]) -> dict[str, object] | None:
    try:
        with open(os.path.join(folder, PROVENANCE_FILE), "rb") as file:
            data = file.read()
        found = json.loads(data) if is_of(data, identities) else None
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _key(record: dict[str, object]) -> tuple[object, ...]:
    code = record.get("code")
    fingerprint = code.get("fingerprint") if isinstance(code, dict) else None
    return (fingerprint, record.get("data_fingerprint"), record.get("cluster"))
