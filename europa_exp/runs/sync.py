"""Sending runs to the W&B server from where there is a network, with ``wandb beta sync``.

What is sent of a run are the rows of its ``metrics.jsonl``, in their order, under one W&B run with ``train/step`` as the axis.
A whole run that ended goes as the client's own offline folders (one an attempt: a requeued run has several). Those can't
always be used: the client writes its log in blocks of 32 KiB, so the log of a live run lags, that of a killed rank lacks its
end and is often cut inside a record, and a log of which a part was sent before would be sent again from its beginning. Then the
client writes the rows that are missing on the server into a new offline folder, which is sent instead; no row gets lost. (The
client stamps those with a run time of its own, ``_runtime``; step and wall time are the training's.)

How far a run was sent stands in ``wandb/sent.json`` of its folder, and the server is asked before and after: a row that
arrived is not sent again, even when a sync was interrupted.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from europa_exp.runs import wandb_process
from europa_exp.runs.files import replace_text
from europa_exp.runs.folder import RunFolder
from europa_exp.runs.lookup import brief
from europa_exp.runs.status import State
from europa_exp.runs.tracking import wandb_id
from europa_exp.runs.wandb_log import Log, read_log
from europa_exp.runs.wandb_process import Complaints, WandbUnavailable

if TYPE_CHECKING:
    from europa_exp.config.schema import Config

SENT_FILE = "sent.json"
BATCH = 16
"""Runs in one call of ``wandb beta sync``."""
SEND_S = 120.0
"""The longest that a call may take, besides what its data needs at ``BYTES_PER_S``."""
BYTES_PER_S = 100_000.0
ROW_BYTES = 4_000
CONFIRM_PAUSES_S = (0.0, 2.0, 5.0)
"""Pauses before each question whether everything arrived."""


@dataclass
class Outcome:
    """What became of one run in one pass.

    ``what`` is ``sent``, ``current`` (all was there before), ``nothing`` (it has nothing to send; ``why``) or ``failed``
    (``why``). ``rows`` were sent now, ``live`` says that more may come, ``notes`` name logs that could not be used.
    """

    run: RunFolder
    what: str
    rows: int = 0
    live: bool = False
    why: str = ""
    notes: list[str] = field(default_factory=list)


@dataclass
class _Look:
    """A run before anything is sent."""

    run: RunFolder
    cfg: Config
    rows: int
    live: bool
    exit_code: int
    sent: dict[str, Any]
    folders: list[Path]
    logs: list[Log] = field(default_factory=list)
    path: str = ""
    start: int = 0
    before: int = 0

    @property
    def end(self) -> bool:
        """Whether the server is to be told that the run ended."""
        return not self.live and not self.sent.get("ended")

    @property
    def pending(self) -> bool:
        return self.end or self.rows > int(self.sent.get("rows", 0))

    @property
    def usable(self) -> bool:
        """Whether the client's own folders hold exactly what the server lacks."""
        return (
            self.start == 0
            and not self.live
            and bool(self.logs)
            and all(log.whole and (log.appends or len(self.logs) == 1) for log in self.logs)
            and sum(log.rows for log in self.logs) == self.rows
        )


def sync(
    runs: Sequence[RunFolder], tell: Callable[[Outcome], None], over: Collection[RunFolder] = ()
) -> list[Outcome]:
    """Send what the server lacks of the runs; ``tell`` gets each outcome as soon as it is known.

    ``over`` are runs on which nobody works any more, whatever their record says (Slurm knows of no job, for example).

    Raises WandbUnavailable when there is something to send and W&B can't be asked; nothing was changed then.
    """
    outcomes: list[Outcome] = []

    def done(outcome: Outcome) -> None:
        outcomes.append(outcome)
        tell(outcome)

    waiting: list[RunFolder] = []
    for run in runs:
        found = _looked(run, over)
        if isinstance(found, Outcome):
            done(found)
        else:
            waiting.append(run)
    for first in range(0, len(waiting), BATCH):
        try:
            for outcome in _batch(waiting[first : first + BATCH], over):
                done(outcome)
        except WandbUnavailable as error:
            if first == 0:
                raise
            for run in waiting[first:]:
                done(Outcome(run, "failed", why=str(error)))
            break
    return outcomes


def _batch(runs: Sequence[RunFolder], over: Collection[RunFolder]) -> list[Outcome]:
    outcomes: list[Outcome] = []
    looks: list[_Look] = []
    with contextlib.ExitStack() as stack:
        for run in runs:
            try:
                free = stack.enter_context(_lock(run))
            except OSError as error:
                outcomes.append(Outcome(run, "failed", why=f"its wandb folder can't be used: {error}"))
                continue
            # Again, under the lock: another process may have sent it in the meantime.
            busy = Outcome(run, "failed", why="another `europa sync` is sending it")
            found = _looked(run, over) if free else busy
            if isinstance(found, Outcome):
                outcomes.append(found)
            else:
                looks.append(found)
        if looks:
            place = Path(
                stack.enter_context(
                    tempfile.TemporaryDirectory(prefix="europa-sync-", ignore_cleanup_errors=True)
                )
            )
            _ask(looks, place)
            outcomes += _send(looks, place)
    return outcomes


def _looked(run: RunFolder, over: Collection[RunFolder]) -> _Look | Outcome:
    try:
        return _look(run, run in over)
    except Exception as error:  # a broken folder must not stop the others
        return Outcome(run, "failed", why=brief(error))


# ------------------------------------------------------------------------------------------------------- looking


def _look(run: RunFolder, over: bool) -> _Look | Outcome:
    """What there is to send of a run, as far as the run folder tells."""
    status = run.status()
    live = not (over or status.ended or status.orphaned)
    sent = _sent(run)
    size = _size(run.metrics_file)
    if sent.get("ended") and not live and sent.get("size") == size and _same_server(sent):
        return Outcome(run, "current")
    folders = offline_folders(run)
    cfg = run.config()
    tracking = status.extra.get("tracking")
    mode = tracking.get("wanted") if isinstance(tracking, dict) else None
    mode = mode or cfg.tracking.mode.name
    if mode == "disabled":
        return Outcome(run, "nothing", live=live, why="tracking=disabled")
    if mode == "online" and not folders:
        return Outcome(run, "nothing", live=live, why="it was tracked online, which sends it by itself")
    if live and not folders and not size:
        return Outcome(run, "nothing", live=True, why=f"it is {status.state} and has no steps yet")
    if not live and not folders and not size:
        return Outcome(run, "nothing", why="it has no steps and no offline W&B folder")
    rows = len(run.metrics())
    look = _Look(run, cfg, rows, live, 0 if status.state is State.completed else 1, sent, folders)
    return look if look.pending else Outcome(run, "current", live=live)


def offline_folders(run: RunFolder) -> list[Path]:
    """The offline W&B folders of a run, the oldest first."""
    found = [path for path in run.wandb_dir.glob("offline-run-*") if any(path.glob("*.wandb"))]
    return sorted(found, key=lambda path: (path.name, path.stat().st_mtime_ns))


def _sent(run: RunFolder) -> dict[str, Any]:
    try:
        found = json.loads((run.wandb_dir / SENT_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _same_server(sent: dict[str, Any]) -> bool:
    """Whether the record is about the server that would be used now, as far as that can be told without asking it."""
    wanted = os.environ.get("WANDB_BASE_URL")
    return wanted is None or wanted.rstrip("/") == str(sent.get("server", "")).rstrip("/")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


@contextlib.contextmanager
def _lock(run: RunFolder) -> Iterator[bool]:
    """True when no other process sends this run. Where the file system has no locks, it is always True."""
    run.wandb_dir.mkdir(exist_ok=True)
    handle = os.open(run.wandb_dir, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError:
            pass
        yield True
    finally:
        os.close(handle)


# ------------------------------------------------------------------------------------------------------- sending


def _named(looks: Sequence[_Look]) -> list[dict[str, Any]]:
    return [
        {
            "project": look.cfg.tracking.project,
            "entity": look.cfg.tracking.entity,
            "id": wandb_id(look.run.name, str(look.run.provenance().get("uid", ""))),
        }
        for look in looks
    ]


def _ask(looks: Sequence[_Look], place: Path) -> None:
    """Where each run begins to be new to the server."""
    answer = wandb_process.ask(_named(looks), place)
    for look, known in zip(looks, answer["runs"], strict=True):
        look.path, look.before = known["path"], known["rows"] or 0
        address = {"server": answer["server"], "path": look.path}
        if look.sent and any(look.sent.get(key) != value for key, value in address.items()):
            look.sent = {}  # it was sent to another place
        if known["rows"] is None:
            look.sent = {}  # somebody deleted it there
        look.sent = address | {k: v for k, v in look.sent.items() if k not in address}
        look.start = max(int(look.sent.get("rows", 0)), look.before)


def _send(looks: Sequence[_Look], place: Path) -> list[Outcome]:
    """Send some runs in one call and ask what arrived."""
    outcomes: list[Outcome] = []
    ready: list[tuple[_Look, Outcome, list[Path]]] = []
    parts: list[tuple[_Look, Outcome]] = []
    for look in looks:
        outcome = Outcome(look.run, "sent", live=look.live)
        # The last log of a live run is always behind: neither read nor complained of.
        look.logs = [read_log(min(f.glob("*.wandb"))) for f in look.folders[: -1 if look.live else None]]
        cut = [log for log in look.logs if not log.whole]
        outcome.notes = [
            f"{os.path.relpath(log.path, look.run.path)} breaks off after {log.rows} steps and is skipped"
            + ("; metrics.jsonl has them all" if look.rows else "")
            for log in cut
        ]
        if not look.rows and not look.live:
            if cut and any(log.rows for log in look.logs):
                why = "its W&B log is cut, and metrics.jsonl has no steps"
                outcomes.append(Outcome(look.run, "failed", why=why, notes=outcome.notes))
                continue
            # With a cut log and no steps at all the run still gets its place, configuration and end.
            look.rows = sum(log.rows for log in look.logs)
        if look.start >= look.rows and not look.end:
            _record(look)
            outcomes.append(Outcome(look.run, "current", live=look.live))
        elif look.usable:
            ready.append((look, outcome, [log.path.parent for log in look.logs]))
        else:
            parts.append((look, outcome))
    ready += _written(parts, outcomes, place)
    if not ready:
        return outcomes
    folders = [folder for _, _, paths in ready for folder in paths]
    size = sum(_size(path) for folder in folders for path in folder.rglob("*") if path.is_file())
    complaints = wandb_process.send(folders, place, SEND_S + size / BYTES_PER_S)
    _confirm([(look, outcome) for look, outcome, _ in ready], complaints, place)
    return outcomes + [outcome for _, outcome, _ in ready]


def _written(
    parts: Sequence[tuple[_Look, Outcome]], outcomes: list[Outcome], place: Path
) -> list[tuple[_Look, Outcome, list[Path]]]:
    """Have the missing rows written as offline runs of their own."""
    wanted = [
        {
            "run": str(look.run.path),
            "start": min(look.start, look.rows),
            "end": look.rows,
            "exit_code": 1 if look.live else look.exit_code,
            "unfinished": look.live,
        }
        for look, _ in parts
    ]
    if not wanted:
        return []
    found = []
    for (look, outcome), answer in zip(parts, wandb_process.write(wanted, place), strict=True):
        if "folder" in answer:
            found.append((look, outcome, [Path(answer["folder"])]))
        else:
            outcomes.append(Outcome(look.run, "failed", why=answer["problem"], notes=outcome.notes))
    return found


def _confirm(sent: Sequence[tuple[_Look, Outcome]], complaints: Complaints, place: Path) -> None:
    """Ask the server what arrived; only that is recorded as sent."""
    waiting = list(sent)
    for pause in CONFIRM_PAUSES_S:
        time.sleep(pause)
        try:
            answer = wandb_process.ask(_named([look for look, _ in waiting]), place)
        except WandbUnavailable as error:
            for _, outcome in waiting:
                outcome.why = str(error)
            continue
        late = []
        for (look, outcome), known in zip(waiting, answer["runs"], strict=True):
            arrived = max(0, (known["rows"] or 0) - look.before)
            wanted = max(0, look.rows - look.start)
            problem = complaints.of(look.path.rpartition("/")[2])
            if known["rows"] is not None and arrived >= wanted and not problem:
                outcome.why, outcome.rows = "", wanted
                look.start = look.rows
                _record(look, outcome)
            else:
                told = f"the server has {arrived} of {wanted} new steps"
                outcome.why = "; ".join(filter(None, (told, problem)))
                late.append((look, outcome))
        waiting = late
        if not waiting:
            return
    for _, outcome in waiting:
        outcome.what, outcome.why = "failed", f"{outcome.why}; try again"


def _record(look: _Look, outcome: Outcome | None = None) -> None:
    record = look.sent | {"rows": max(look.start, int(look.sent.get("rows", 0))), "ended": not look.live}
    record["size"] = _size(look.run.metrics_file) if not look.live else None
    try:
        replace_text(look.run.wandb_dir / SENT_FILE, json.dumps(record, indent=2) + "\n")
        if not look.live:
            # So that somebody's own `wandb sync` leaves them alone.
            for folder in look.folders:
                for log in folder.glob("*.wandb"):
                    log.with_name(log.name + ".synced").touch()
    except OSError as error:
        if outcome is not None:
            outcome.notes.append(
                f"what was sent can't be recorded ({error}); the server will be asked next time"
            )


def summary(outcomes: Sequence[Outcome]) -> str:
    """One line about one pass."""
    count = {
        what: [o for o in outcomes if o.what == what] for what in ("sent", "current", "nothing", "failed")
    }
    rows = sum(o.rows for o in count["sent"])
    live = sum(o.live for o in outcomes)
    parts = [f"{_runs(len(count['sent']))} sent ({rows} steps)", f"{len(count['current'])} up to date"]
    parts += [f"{len(count['nothing'])} with nothing to send"] if count["nothing"] else []
    parts += [f"{len(count['failed'])} failed"] if count["failed"] else []
    return ", ".join(parts) + (f"; {live} not ended yet" if live else "") + "."


def _runs(count: int) -> str:
    return f"{count} run" if count == 1 else f"{count} runs"
