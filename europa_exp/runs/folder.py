"""The run folder: the record of one run, made whole or not at all.

::

    runs/<run>/
      config.yaml      the frozen configuration; all that the job reads
      overrides.yaml   what was typed
      provenance.json  code, packages, machine, command line
      code.diff        what differed from the commit (only when something did)
      status.json      where the run stands
      metrics.jsonl    one line a logged step
      collectives.jsonl  what the collectives of each logged step carried (profiling.collectives=true)
      runtime.json     what rank 0 met: device, backend, environment
      logs/  checkpoints/  wandb/

A new folder is filled under a hidden name beside its place and then renamed: the rename is the one moment in which the run
comes to exist, so two sweeps in the same second can't meet in one folder, and a full disk leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets as randomness
import shutil
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from europa_exp.runs.files import replace_text, sync_folder, write_text
from europa_exp.runs.metrics import METRICS_FILE, MetricsRead, read_metrics
from europa_exp.runs.status import STATUS_FILE, State, Status, first_record, read_status, write_status

if TYPE_CHECKING:
    from europa_exp.config.schema import Config
    from europa_exp.runs.provenance import CodeState

CONFIG_FILE = "config.yaml"
OVERRIDES_FILE = "overrides.yaml"
PROVENANCE_FILE = "provenance.json"
DIFF_FILE = "code.diff"
RUNTIME_FILE = "runtime.json"
MAX_NAME = 100
"""Longest name of a run folder; W&B takes 128, file systems 255 bytes."""

_HIDDEN = ".new-"
_TAKEN = {errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR}


class RunFolderError(Exception):
    """A run folder can't be made or read; the message names the folder, the reason and a way out."""


@dataclass(frozen=True)
class NewRun:
    """One run to be created; see ``create_run`` for the fields."""

    cfg: Config
    name: str
    identity: str
    overrides: list[str] = field(default_factory=list)
    repeat: int = 0
    parent: str | None = None
    data_fingerprint: str | None = None
    imports: dict[str, Any] | None = None
    """Where a job that starts later takes its code from: ``{path, frozen}``."""


class RunFolder:
    """One run on disk. Making the object reads nothing; each method reads what it needs, when it is called."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()

    @property
    def name(self) -> str:
        """Name of the run: the name of its folder."""
        return self.path.name

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RunFolder) and self.path == other.path

    def __hash__(self) -> int:
        return hash(self.path)

    # ------------------------------------------------------------------------------------------------- places

    def log(self, rank: int) -> Path:
        """Where the output of a rank goes."""
        return self.path / "logs" / f"rank_{rank}.log"

    def error_file(self, rank: int) -> Path:
        """Where a failing rank leaves ``{rank, type, message, traceback, time}``."""
        return self.path / "logs" / f"rank_{rank}.error.json"

    def nccl_log(self, rank: int) -> Path:
        """Where NCCL writes in a rank, with nccl.record=true; the last attempt's."""
        return self.path / "logs" / f"nccl_rank_{rank}.log"

    @property
    def launcher_log(self) -> Path:
        """Where the launcher of this run writes."""
        return self.path / "logs" / "launcher.log"

    @property
    def metrics_file(self) -> Path:
        return self.path / METRICS_FILE

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def wandb_dir(self) -> Path:
        return self.path / "wandb"

    # ------------------------------------------------------------------------------------------------ reading

    def config(self) -> Config:
        """The frozen configuration. Raises RunFolderError without one, and ``config.io``'s errors for a broken one."""
        from europa_exp.config import io

        return io.from_yaml(self.config_text())

    def config_text(self) -> str:
        """The frozen configuration as it lies on disk. Raises RunFolderError when it is not there."""
        return self._text(CONFIG_FILE)

    def overrides(self) -> list[str]:
        """What was typed for this run; empty when the file is missing or broken."""
        try:
            found = yaml.safe_load((self.path / OVERRIDES_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError):
            return []
        return [str(entry) for entry in found] if isinstance(found, list) else []

    def status(self) -> Status:
        """Where the run stands; a missing or broken record reads as ``unknown`` with a reason."""
        return read_status(self.path)

    def provenance(self) -> dict[str, Any]:
        """Where the run comes from; empty when the file is missing or broken."""
        return self._mapping(PROVENANCE_FILE)

    def runtime(self) -> dict[str, Any]:
        """What rank 0 met (device, backend, environment); empty before it started."""
        return self._mapping(RUNTIME_FILE)

    def metrics(self) -> list[dict[str, Any]]:
        """The logged steps, in the order of writing; a last line that was cut in the middle is left out."""
        return self.read_metrics().rows

    def read_metrics(self) -> MetricsRead:
        """The logged steps with what was wrong in the file. Raises RunFolderError when it is there but can't be read."""
        try:
            return read_metrics(self.metrics_file)
        except OSError as error:
            raise RunFolderError(f"{self.metrics_file} can't be read: {error.strerror or error}") from error

    # ------------------------------------------------------------------------------------------------ writing

    def set_state(
        self, state: State | str, *, only_from: Collection[State | str] | None = None, **fields: Any
    ) -> bool:
        """Change the state and record ``fields`` with it (``error``, ``exit_codes``, ``pid``, ...), in one atomic move.

        With ``only_from`` nothing changes, and False comes back, unless the run is in one of those states: so a rank that
        dies of Ctrl-C does not turn ``cancelled`` into ``failed``. Raises OSError when the file can't be written.
        """
        return write_status(self.path, state, only_from=only_from, **fields)

    def note(self, **fields: Any) -> None:
        """Record fields in ``status.json`` and leave the state as it is. Raises OSError when it can't be written."""
        write_status(self.path, None, **fields)

    def write_runtime(self, runtime: dict[str, Any]) -> None:
        """Replace ``runtime.json``. Raises OSError when it can't be written."""
        replace_text(self.path / RUNTIME_FILE, json.dumps(runtime, indent=2, default=str) + "\n")

    # ------------------------------------------------------------------------------------------------- inside

    def _text(self, name: str) -> str:
        try:
            return (self.path / name).read_text(encoding="utf-8")
        except FileNotFoundError:
            raise RunFolderError(f"{self.path} is no run folder: it has no {name}") from None
        except (OSError, ValueError) as error:
            raise RunFolderError(f"{self.path / name} can't be read: {error}") from error

    def _mapping(self, name: str) -> dict[str, Any]:
        try:
            found = json.loads((self.path / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


# --------------------------------------------------------------------------------------------------------- creating


def create_run(
    runs_dir: str | os.PathLike[str],
    cfg: Config,
    *,
    overrides: Sequence[str],
    name: str,
    identity: str,
    sweep: str | None,
    repeat: int,
    parent: str | None = None,
    command: Sequence[str],
    code: CodeState,
    data_fingerprint: str | None,
) -> RunFolder:
    """Create the folder of one run, whole or not at all, in the state ``created``.

    ``name`` is the wanted name of the folder (at most 100 characters, no slash, no leading dot); if it is taken, ``-r2``,
    ``-r3``, ... are tried. ``identity`` is the hash of the configuration, ``repeat`` counts the repeats of one identity in
    one call, ``parent`` names the run that this one is a rerun of. ``command`` and ``overrides`` are recorded without the
    secrets in them. Raises RunFolderError.
    """
    new = NewRun(cfg, name, identity, list(overrides), repeat, parent, data_fingerprint)
    return create_runs(runs_dir, [new], sweep=sweep, command=command, code=code)[0]


def create_runs(
    runs_dir: str | os.PathLike[str],
    runs: Sequence[NewRun],
    *,
    sweep: str | None,
    command: Sequence[str],
    code: CodeState,
) -> list[RunFolder]:
    """Create the folders of a sweep, all or none of them; see ``create_run``. Raises RunFolderError."""
    from europa_exp.config import io

    place = Path(runs_dir).absolute()
    for run in runs:
        _check_name(run.name)
    texts = [io.to_yaml(run.cfg) for run in runs]
    made: list[Path] = []
    with _nothing_left_behind(place, made):
        for run, text in zip(runs, texts, strict=True):
            hidden = place / f"{_HIDDEN}{randomness.token_hex(8)}"
            made.append(hidden)
            hidden.mkdir()
            _fill(hidden, run, text, sweep, command, code)
        for index, run in enumerate(runs):
            made[index] = _settle(made[index], run.name)
        sync_folder(place)
    return [RunFolder(path) for path in made]


def list_runs(runs_dir: str | os.PathLike[str]) -> list[RunFolder]:
    """The run folders in ``runs_dir``, by name; empty when there is no such folder. Half-made ones are left out."""
    try:
        with os.scandir(runs_dir) as entries:
            names = sorted(entry.name for entry in entries if not entry.name.startswith("."))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise RunFolderError(f"{runs_dir} can't be read: {error.strerror or error}") from error
    return [
        RunFolder(Path(runs_dir) / name) for name in names if (Path(runs_dir) / name / CONFIG_FILE).is_file()
    ]


def _fill(
    folder: Path, run: NewRun, text: str, sweep: str | None, command: Sequence[str], code: CodeState
) -> None:
    from europa_exp.runs.provenance import record  # not above: ranks read run folders, and make none

    origin = record(
        code,
        command=command,
        overrides=run.overrides,
        extra={
            "uid": randomness.token_hex(4),
            "identity": run.identity,
            "name": run.name,
            "sweep": sweep,
            "repeat": run.repeat,
            "parent": run.parent,
            "data_fingerprint": run.data_fingerprint,
            "cluster": run.cfg.cluster.name,
            **({} if run.imports is None else {"imports": run.imports}),
        },
    )
    (folder / "logs").mkdir()
    write_text(folder / CONFIG_FILE, text)
    overrides = yaml.safe_dump(origin["overrides"], allow_unicode=True, width=10**6)
    write_text(folder / OVERRIDES_FILE, overrides)
    write_text(folder / PROVENANCE_FILE, json.dumps(origin, indent=2, default=str) + "\n")
    if code.diff:
        write_text(folder / DIFF_FILE, code.diff)
    write_text(folder / STATUS_FILE, json.dumps(first_record(), indent=2) + "\n")
    sync_folder(folder)


def _settle(hidden: Path, name: str) -> Path:
    """Give the finished folder its name, or the first free one after it. A rename never replaces a run: it is not empty."""
    for count in range(1, 10_000):
        target = hidden.parent / _suffixed(name, count)
        try:
            # A rename onto an empty folder would succeed and onto anything else fails; somebody's empty folder stays.
            if not os.path.lexists(target):
                os.rename(hidden, target)
                return target
        except OSError as error:
            if error.errno not in _TAKEN:
                raise
    raise FileExistsError(errno.EEXIST, f"10,000 runs are named {name}", str(hidden.parent / name))


def _suffixed(name: str, count: int) -> str:
    """``name``, ``name-r2``, ``name-r3``, ... within the longest name; what is cut is the readable part, not the hash."""
    if count == 1:
        return name
    suffix = f"-r{count}"
    head, dash, tail = name.rpartition("-")
    if not dash or len(tail) + len(suffix) > MAX_NAME // 2:
        return name[: MAX_NAME - len(suffix)] + suffix
    return head[: MAX_NAME - len(tail) - 1 - len(suffix)] + "-" + tail + suffix


def _check_name(name: str) -> None:
    if not name or len(name) > MAX_NAME or name.startswith(".") or any(c in "/\\\0\n" for c in name):
        raise RunFolderError(
            f"{name!r} can't name a run folder: 1 to {MAX_NAME} characters, no slash, no line end, no leading dot"
        )


@contextlib.contextmanager
def _nothing_left_behind(place: Path, made: list[Path]) -> Iterator[None]:
    """Make ``place``; if anything fails inside, remove what was made, ``place`` and its new parents included."""
    fresh: list[Path] = []
    try:
        fresh = [folder for folder in (place, *place.parents) if not folder.exists()]
        place.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException as error:
        for path in made:
            shutil.rmtree(path, ignore_errors=True)
        for folder in fresh:
            with contextlib.suppress(OSError):
                folder.rmdir()
        if isinstance(error, OSError):
            raise RunFolderError(_reason(place, error)) from error
        raise


def _reason(place: Path, error: OSError) -> str:
    rest = "; nothing was created, nothing was submitted"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"launch.runs_dir={place}: no space is left there ({error.strerror}); free some or choose another folder{rest}"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"launch.runs_dir={place}: it can't be written ({error.strerror}); choose a folder that you may write to{rest}"
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        return (
            f"launch.runs_dir={place}: a file is in the way ({error.filename}); choose another folder{rest}"
        )
    return f"launch.runs_dir={place}: the run folders can't be made ({error}); choose another folder{rest}"
