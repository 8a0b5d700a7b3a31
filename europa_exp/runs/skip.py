"""Which points of a sweep have been run already."""

from __future__ import annotations

import json
import os
from pathlib import Path

from europa_exp.runs.folder import PROVENANCE_FILE, RunFolder
from europa_exp.runs.status import State, read_status


def completed_twins(
    runs_dir: str | os.PathLike[str],
    identity: str,
    code_fingerprint: str,
    data_fingerprint: str | None,
    cluster_name: str,
) -> list[RunFolder]:
    """The completed runs with the same configuration, code, data and cluster, the oldest first.

    With ``launch.repeat=N`` a point needs ``N - len(...)`` more runs. Reads two small files a run and makes no guess: a run
    whose record is missing or broken is no twin.
    """
    wanted = (identity, code_fingerprint, data_fingerprint, cluster_name)
    twins: list[tuple[str, RunFolder]] = []
    try:
        with os.scandir(runs_dir) as entries:
            paths = [entry.path for entry in entries if not entry.name.startswith(".")]
    except OSError:
        return []
    for path in paths:
        record = _record(Path(path), identity)
        if record is None or _key(record) != wanted:
            continue
        if read_status(Path(path)).state is State.completed:
            twins.append((str(record.get("created_at", "")), RunFolder(path)))
    return [run for _, run in sorted(twins, key=lambda twin: (twin[0], twin[1].name))]


def completed_twin(
    runs_dir: str | os.PathLike[str],
    identity: str,
    code_fingerprint: str,
    data_fingerprint: str | None,
    cluster_name: str,
) -> RunFolder | None:
    """The newest completed run with the same configuration, code, data and cluster, or None."""
    twins = completed_twins(runs_dir, identity, code_fingerprint, data_fingerprint, cluster_name)
    return twins[-1] if twins else None


def _record(folder: Path, identity: str) -> dict[str, object] | None:
    try:
        data = (folder / PROVENANCE_FILE).read_bytes()
        # Most runs are of another identity; parsing their package lists would be most of the time.
        found = json.loads(data) if identity.encode() in data else None
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _key(record: dict[str, object]) -> tuple[object, ...]:
    code = record.get("code")
    fingerprint = code.get("fingerprint") if isinstance(code, dict) else None
    return (record.get("identity"), fingerprint, record.get("data_fingerprint"), record.get("cluster"))
