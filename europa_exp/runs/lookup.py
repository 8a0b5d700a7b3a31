"""Finding runs again: by folder, name, unique prefix or hash; whatever state their folders are in."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from europa_exp.runs.folder import (
    CONFIG_FILE,
    OVERRIDES_FILE,
    PROVENANCE_FILE,
    RunFolder,
    RunFolderError,
    list_runs,
)
from europa_exp.runs.metrics import METRICS_FILE
from europa_exp.runs.status import STATUS_FILE, State, Status

_MARKS = (STATUS_FILE, PROVENANCE_FILE, METRICS_FILE, OVERRIDES_FILE)
_TAIL = 65_536
_SHOWN = 10


class LookupFailed(Exception):
    """No run, or more than one, answers to what was typed; the message says where it looked and what comes close."""


@dataclass(frozen=True)
class Entry:
    """A run with the small records that lists need, each read once and only when asked for. No property raises."""

    run: RunFolder

    @property
    def name(self) -> str:
        return self.run.name

    @cached_property
    def status(self) -> Status:
        return self.run.status()

    @cached_property
    def provenance(self) -> dict[str, Any]:
        return self.run.provenance()

    @cached_property
    def identity(self) -> str | None:
        """The recorded hash; without a record the one in the folder's name; None if there is neither."""
        found = self.provenance.get("identity")
        if isinstance(found, str) and found:
            return found
        match = re.search(r"(?:^|-)([0-9a-f]{12})(?:-r\d+)?$", self.name)
        return match[1] if match else None

    @property
    def sweep(self) -> str | None:
        found = self.provenance.get("sweep")
        return found if isinstance(found, str) and found else None

    @property
    def created_at(self) -> str:
        """ISO 8601, UTC; empty if it is not recorded."""
        return self.status.created_at or str(self.provenance.get("created_at") or "")

    @cached_property
    def made(self) -> int:
        """When the configuration was written, in ns: it orders the runs of a sweep that were created in one millisecond."""
        try:
            return (self.run.path / CONFIG_FILE).stat().st_mtime_ns
        except OSError:
            return 0

    @property
    def state(self) -> str:
        """The state in a word; ``lost`` for a run that claims to go on but whose process is gone."""
        return "lost" if self.status.orphaned else str(self.status.state)

    @cached_property
    def last(self) -> tuple[dict[str, Any], bool]:
        """The last whole line of the metrics (empty if there is none), and whether the file was cut in a line."""
        return _last_row(self.run.metrics_file)

    def problems(self, *, deep: bool = False) -> list[str]:
        """What is wrong with the folder, a phrase each. ``deep`` reads the configuration and all metrics, too."""
        found: list[str] = []
        try:
            empty = (self.run.path / CONFIG_FILE).stat().st_size == 0
            found += [f"{CONFIG_FILE} is empty"] if empty else []
        except OSError:
            found.append(f"{CONFIG_FILE} is missing")
        if self.status.state is State.unknown:
            found.append(self.status.reason or f"{STATUS_FILE} can't be read")
        elif self.status.orphaned:
            found.append(f"it claims to be running, but process {self.status.pid} on this machine is gone")
        if not self.provenance:
            found.append(f"{PROVENANCE_FILE} is missing or broken")
        if deep and not found:
            try:
                self.run.config()
            except Exception as error:
                found.append(f"{CONFIG_FILE}: {brief(error)}")
        if self.last[1]:
            found.append(f"the last line of {METRICS_FILE} is cut off and left out")
        if deep:
            try:
                skipped = self.run.read_metrics().skipped
                if skipped:
                    lines = ", ".join(str(n) for n, _ in skipped[:5])
                    found.append(
                        f"{METRICS_FILE}: {len(skipped)} unreadable lines are left out (line {lines})"
                    )
            except RunFolderError as error:
                found.append(str(error))
        return found


def entries(runs_dir: str | os.PathLike[str]) -> list[Entry]:
    """Every run in ``runs_dir``, the oldest first; folders that once were runs (no configuration left) included.

    Raises RunFolderError when the folder can't be read; one that is not there has no runs.
    """
    runs = {run.name: run for run in list_runs(runs_dir)}
    for folder in _folders(runs_dir):
        if folder.name not in runs and any((folder / mark).exists() for mark in _MARKS):
            runs[folder.name] = RunFolder(folder)
    return sorted(
        (Entry(run) for run in runs.values()), key=lambda e: (e.created_at, e.made, _natural(e.name))
    )


def find(runs_dir: str | os.PathLike[str], text: str, *, newest: bool = False) -> RunFolder:
    """The one run that ``text`` names: a folder, a name, a unique prefix of a name, or (a prefix of) a hash.

    With ``newest``, for those who need only the configuration, repeats of one hash are no ambiguity: the newest completed
    one answers, or the newest if none is. Raises LookupFailed if no run answers, or several; the message lists them.
    """
    found = find_all(runs_dir, text)
    if len(found) == 1:
        return found[0]
    known = [Entry(run) for run in found]
    same = known[0].identity is not None and len({e.identity for e in known}) == 1
    if newest and same:
        return ([e for e in known if e.state == "completed"] or known)[-1].run
    repeats = ", repeats of one experiment" if same else ""
    raise LookupFailed(f"{text!r} stands for {len(found)} runs{repeats}; name one of them:{_listed(found)}")


def find_all(runs_dir: str | os.PathLike[str], text: str) -> list[RunFolder]:
    """Like ``find``, but a hash (or a prefix of it) stands for all of its runs, the oldest first.

    A prefix that fits runs of different hashes is an error all the same: it was too short, not meant for all.
    """
    text = text.strip()
    if not text:
        raise LookupFailed("an empty name names no run; give a folder, a name, a unique prefix or a hash")
    if (by_path := _by_path(runs_dir, text)) is not None:
        return [by_path]
    known = entries(runs_dir)
    wanted = text.rstrip("/")
    if exact := [e for e in known if e.name == wanted]:
        return [exact[0].run]
    by_hash = [e for e in known if e.identity and e.identity.startswith(wanted.lower())]
    by_name = [e for e in known if e.name.startswith(wanted)]
    if not by_hash and len(by_name) > 1 and len({e.identity for e in by_name}) == 1 and by_name[0].identity:
        by_hash = by_name  # a prefix of the names of one experiment's repeats
    found = list(dict.fromkeys([*by_hash, *by_name]))
    if not found:
        raise LookupFailed(_nothing(runs_dir, text, known))
    if len(found) > 1 and (len({e.identity for e in found}) > 1 or not by_hash):
        runs = [e.run for e in found]
        raise LookupFailed(f"{text!r} fits {len(found)} runs; type more of the name:{_listed(runs)}")
    return [e.run for e in found]


def find_many(runs_dir: str | os.PathLike[str], texts: Iterable[str]) -> list[RunFolder]:
    """The runs that the texts stand for, in their order, each once. All that can't be found is told in one LookupFailed."""
    runs: list[RunFolder] = []
    wrong: list[str] = []
    for text in texts:
        try:
            runs += find_all(runs_dir, text)
        except LookupFailed as error:
            wrong.append(str(error))
    if wrong:
        raise LookupFailed("\n".join(wrong))
    return list(dict.fromkeys(runs))


def sweeps(known: Sequence[Entry]) -> dict[str, list[Entry]]:
    """The runs of each sweep, the sweep with the newest run last."""
    found: dict[str, list[Entry]] = {}
    for entry in known:
        if entry.sweep:
            found.setdefault(entry.sweep, []).append(entry)
    return dict(sorted(found.items(), key=lambda item: max(e.created_at for e in item[1])))


def named(runs_dir: str | os.PathLike[str], texts: Sequence[str], sweep: str | None) -> list[RunFolder]:
    """The runs that ``texts`` name and those of ``sweep``, each once. Raises LookupFailed."""
    found = find_many(runs_dir, texts)
    return found if sweep is None else list(dict.fromkeys([*found, *find_sweep(runs_dir, sweep)[1]]))


def find_sweep(runs_dir: str | os.PathLike[str], name: str | None) -> tuple[str, list[RunFolder]]:
    """The name and runs of a sweep (by name or unique prefix; None is the latest). Raises LookupFailed."""
    known = sweeps(entries(runs_dir))
    if not known:
        wanted = "" if name is None else f" {name!r}"
        raise LookupFailed(
            f"no sweep{wanted} in {_where(runs_dir)}; name the runs, for example by their hash"
        )
    if name is None:
        name = list(known)[-1]
    elif name not in known:
        fitting = [n for n in known if n.startswith(name)]
        if len(fitting) != 1:
            if fitting:
                raise LookupFailed(
                    f"{name!r} fits {len(fitting)} sweeps; type more of the name:\n  "
                    + "\n  ".join(fitting[-_SHOWN:])
                )
            close = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
            hint = f"close: {', '.join(close)}" if close else f"the latest: {', '.join(list(known)[-3:])}"
            raise LookupFailed(f"no sweep {name!r} in {_where(runs_dir)} ({len(known)} sweeps there; {hint})")
        name = fitting[0]
    return name, [entry.run for entry in known[name]]


def latest_group(runs_dir: str | os.PathLike[str]) -> tuple[str, list[RunFolder]]:
    """What was asked for last that can be compared, with a title: a sweep, or the repeats of one experiment outside of sweeps.

    Raises LookupFailed if there is neither.
    """
    known = entries(runs_dir)
    groups: dict[str, list[Entry]] = {f"sweep {name}": found for name, found in sweeps(known).items()}
    alone: dict[str, list[Entry]] = {}
    for entry in known:
        if not entry.sweep and entry.identity:
            alone.setdefault(entry.identity, []).append(entry)
    groups |= {f"repeats of {i}": found for i, found in alone.items() if len(found) > 1}
    if not groups:
        raise LookupFailed(
            f"{_where(runs_dir)} has {len(known)} runs, and no sweep or repeats among them; name the runs, for example "
            "by their hash: europa compare RUN RUN"
        )
    title = max(groups, key=lambda t: max((e.created_at, e.made) for e in groups[t]))
    return title, [entry.run for entry in groups[title]]


def brief(error: Exception) -> str:
    """An error in one line: of the many problems of a configuration, the first and how many there are."""
    problems = getattr(error, "problems", None)
    if isinstance(problems, list) and problems:
        more = f" (and {len(problems) - 1} more problems)" if len(problems) > 1 else ""
        return f"{problems[0][1]}{more}"
    return " ".join(str(error).split())


def _by_path(runs_dir: str | os.PathLike[str], text: str) -> RunFolder | None:
    """A path that is typed as one (it has a slash) or a run folder that lies here and not under ``runs_dir``."""
    path = Path(text).expanduser()
    try:
        if not path.is_dir() or (os.sep not in text and (Path(runs_dir) / text).is_dir()):
            return None
        if (path / CONFIG_FILE).is_file() or any((path / mark).exists() for mark in _MARKS):
            return RunFolder(path.resolve())
    except (OSError, ValueError):
        return None
    if os.sep in text:
        raise LookupFailed(f"{path} is no run folder: it has no {CONFIG_FILE}")
    return None


def _nothing(runs_dir: str | os.PathLike[str], text: str, known: Sequence[Entry]) -> str:
    if not Path(runs_dir).is_dir():
        return f"no run {text!r}: there is no folder {Path(runs_dir).absolute()} (--runs-dir or EUROPA_RUNS_DIR names another)"
    if not known:
        return f"no run {text!r}: {Path(runs_dir).absolute()} holds no runs"
    close = _close(text, known)
    hint = f"; these come close:{_listed([e.run for e in close])}" if close else "; `europa list` shows them"
    return f"no run {text!r} in {_where(runs_dir)}, which holds {len(known)} runs{hint}"


def _close(text: str, known: Sequence[Entry]) -> list[Entry]:
    within = [e for e in known if len(text) > 2 and text.lower() in e.name.lower()]
    if within:
        return within[:5]
    labels = {e.name: e for e in known} | {e.identity: e for e in known if e.identity}
    names = difflib.get_close_matches(text, [n for n in labels if n], n=5, cutoff=0.5)
    return list(dict.fromkeys(labels[n] for n in names))


def _where(runs_dir: str | os.PathLike[str]) -> str:
    return str(Path(runs_dir).absolute())


def _listed(runs: Sequence[RunFolder]) -> str:
    lines = [f"\n  {run.name}  ({Entry(run).state}, {Entry(run).created_at[:19]})" for run in runs[:_SHOWN]]
    more = f"\n  and {len(runs) - _SHOWN} more" if len(runs) > _SHOWN else ""
    return "".join(lines) + more


def _folders(runs_dir: str | os.PathLike[str]) -> list[Path]:
    try:
        with os.scandir(runs_dir) as found:
            return [Path(e.path) for e in found if not e.name.startswith(".") and e.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise RunFolderError(f"{runs_dir} can't be read: {error.strerror or error}") from error


def _last_row(path: Path) -> tuple[dict[str, Any], bool]:
    """Reads the end of the file only: a list of a thousand runs must not parse all their steps."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL))
            lines = file.read().split(b"\n")
    except OSError:
        return {}, False
    cut = False
    for index, line in enumerate(reversed(lines)):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                return row, cut
        except ValueError:
            cut = cut or index == 0
    return {}, cut


def _natural(name: str) -> list[tuple[int, int | str]]:
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name)]
