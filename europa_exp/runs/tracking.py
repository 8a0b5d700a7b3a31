"""Weights & Biases on rank 0: a view of the run folder. Nothing that happens to it reaches the training.

The client lives in a thread of its own, fed by a queue: starting it (about a second, or many without a network) overlaps
with the training, a hang of it costs a bounded wait at the end, and no exception of it passes the thread. What became of it
is under ``tracking`` in ``status.json``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import re
import shutil
import signal
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from europa_exp.config.secrets import redact
from europa_exp.runs.folder import CONFIG_FILE, DIFF_FILE, OVERRIDES_FILE, PROVENANCE_FILE, RunFolder
from europa_exp.runs.metrics import numbers

if TYPE_CHECKING:
    from europa_exp.config.schema import Config

STEP_KEY = "train/step"
"""The axis of every metric. W&B's own step starts at 0 again after a restart, so it is never used."""
FROZEN_FILE = "frozen_config.yaml"
"""The frozen configuration among the files of the W&B run (W&B has a ``config.yaml`` of its own there)."""
CONFIG_KEY = "provenance"
"""The key of the W&B config that is no group of ours: identity, sweep, parent, commit."""

INIT_TIMEOUT_S = 20.0
FINISH_TIMEOUT_S = 30.0
"""For W&B's uploads at the end."""
WAIT_S = {"online": 60.0, "offline": 30.0}
"""The longest that ``finish`` waits for everything: a start that is still going on, uploads, the end of W&B's process."""

_MAX_WAITING = 100_000
_INHERITED = (
    "WANDB_SERVICE",
    "WANDB_RUN_ID",
    "WANDB_RESUME",
    "WANDB_SWEEP_ID",
    "WANDB_NAME",
    "WANDB_NOTES",
    "WANDB_TAGS",
)

log = logging.getLogger(__name__)


class _Finish(NamedTuple):
    exit_code: int


class Tracker:
    """Takes metrics for W&B. No method raises or waits, but ``finish``, which waits at most ``WAIT_S``."""

    def __init__(self, run: RunFolder, cfg: Config) -> None:
        mode = cfg.tracking.mode.name
        self.record: dict[str, Any] = {"wanted": mode, "mode": mode, "notes": []}
        """What became of W&B: the mode wanted and the one in use, id, folder, address, and notes on what went wrong."""
        self._run = run
        self._cfg = cfg
        self._waiting: queue.Queue[tuple[dict[str, Any], int] | _Finish] = queue.Queue(_MAX_WAITING)
        self._thread: threading.Thread | None = None
        self._silent = mode == "disabled"
        self._ended = False
        if not self._silent:
            self._thread = threading.Thread(target=self._work, name="wandb", daemon=True)
            self._thread.start()

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Send the metrics of one step; what is no number is left out, NaN and infinities pass."""
        if self._silent or self._ended:
            return
        try:
            # W&B would take the time at which the thread hands the step over, which is late while the client starts.
            self._waiting.put_nowait(({"_timestamp": time.time(), **numbers(metrics)}, int(step)))
        except queue.Full:
            self._note("W&B took no metrics for too long, so some are missing there")

    def finish(self, exit_code: int = 0) -> None:
        """Close the W&B run and its process; a second call does nothing."""
        if self._ended:
            return
        self._ended = True
        thread = self._thread
        if thread is not None:
            with contextlib.suppress(queue.Full):
                self._waiting.put(_Finish(exit_code), timeout=1.0)
            patience = WAIT_S[self.record["wanted"]]
            thread.join(patience)
            if thread.is_alive():
                self._note(
                    f"W&B did not finish within {patience:.0f} s and was stopped; `europa sync` sends what is missing"
                )
                # Its exit hook would wait for a process that hangs.
                _kill_service()
        self._write_record()

    # --------------------------------------------------------------------------------------- in the thread

    def _work(self) -> None:
        client: Client | None = None
        try:
            client = self._start()
            self._write_record()
            exit_code = self._feed(client)
            client.close(exit_code)
        except Exception as error:
            self._silent = True
            self._note(f"W&B stopped: {_short(error)}")
            if client is not None:
                with contextlib.suppress(Exception):
                    client.close(1)
        self._write_record()

    def _start(self) -> Client:
        if self.record["wanted"] == "online":
            before = set(_entries(self._run.wandb_dir))
            try:
                return self._opened("online")
            except Exception as error:
                self._note(f"W&B can't be reached, so this run is tracked offline: {_short(error)}")
                # The client keeps the id in use until it is torn down, and two fragments with one id lose one in a sync.
                _teardown()
                for path in set(_entries(self._run.wandb_dir)) - before:
                    if path.name.startswith("run-"):
                        shutil.rmtree(path, ignore_errors=True)
        return self._opened("offline")

    def _opened(self, mode: str) -> Client:
        client = Client(self._run, self._cfg, mode)
        self.record.update(mode=mode, id=client.id, folder=client.folder, url=client.url)
        return client

    def _feed(self, client: Client) -> int:
        while True:
            entry = self._waiting.get()
            if isinstance(entry, _Finish):
                return entry.exit_code
            client.log(*entry)

    def _note(self, text: str) -> None:
        if text not in self.record["notes"]:
            self.record["notes"].append(text)
            log.warning("%s", text)

    def _write_record(self) -> None:
        with contextlib.suppress(OSError):
            self._run.note(tracking=self.record)


class Client:
    """One W&B run of the real client, its files in ``place``. Every method may raise whatever the client raises."""

    def __init__(self, run: RunFolder, cfg: Config, mode: str, place: Path | None = None) -> None:
        import wandb

        place = place or run.path
        origin = run.provenance()
        self.id = wandb_id(run.name, str(origin.get("uid", "")))
        if mode == "online" and not wandb.login(prompt=False, verify=False):
            # Asked here, because init would ask the terminal, and a rank has nobody who answers.
            raise RuntimeError("nobody is logged in (`wandb login`, or WANDB_API_KEY)")
        (place / "wandb").mkdir(exist_ok=True)
        self._run = wandb.init(
            project=cfg.tracking.project,
            entity=cfg.tracking.entity,
            id=self.id,
            name=run.name,
            group=(cfg.tracking.group or origin.get("sweep") or None),
            job_type=cfg.tracking.job_type,
            tags=list(cfg.tags) or None,
            notes=cfg.tracking.notes,
            config=_config(cfg, origin),
            # Offline it is recorded, and a sync then appends: it moves the client's own steps behind those already there.
            resume="allow",
            settings=_settings(place, mode, origin),
        )
        self.folder = os.path.relpath(self._run.settings.sync_dir, place)
        self.url = self._run.url if mode == "online" else None
        self._run.define_metric(STEP_KEY)
        self._run.define_metric("*", step_metric=STEP_KEY)
        self._save_files(run)

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        self._run.log({STEP_KEY: step, **metrics})

    def recall(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Take the last values of rows that were sent before into the summary, which each part of a run replaces."""
        last: dict[str, Any] = {}
        for row in rows:
            last |= numbers(row) | {STEP_KEY: row["step"]}
        self._run.summary.update(last)

    def mark_unfinished(self) -> None:
        """Say that the run goes on after this part of it, whatever exit code the part gets."""
        self._run.mark_preempting()

    def end(self, exit_code: int) -> None:
        """End the W&B run; the client's process stays for another one."""
        self._run.finish(exit_code)

    def close(self, exit_code: int) -> None:
        try:
            self.end(exit_code)
        finally:
            # The client's process ends with this; left to an exit hook it would outlive a rank that ends without one.
            _teardown()

    def _save_files(self, run: RunFolder) -> None:
        # Copies, not links into the run folder: what W&B uploads must not follow later changes.
        names = {
            CONFIG_FILE: FROZEN_FILE,
            OVERRIDES_FILE: OVERRIDES_FILE,
            PROVENANCE_FILE: PROVENANCE_FILE,
            DIFF_FILE: DIFF_FILE,
        }
        for source, name in names.items():
            try:
                text = (run.path / source).read_bytes().decode("utf-8", "surrogateescape")
            except FileNotFoundError:
                continue
            target = Path(self._run.dir) / name
            target.write_bytes(redact(text)[0].encode("utf-8", "surrogateescape"))
            self._run.save(str(target), base_path=self._run.dir, policy="now", glob=False)


def open_tracker(run: RunFolder, cfg: Config) -> Tracker:
    """Start W&B for this run as ``cfg.tracking`` says; never raises and never waits.

    ``online`` without a network, a login or a server that answers becomes ``offline``, with a warning and a note.
    """
    if cfg.tracking.mode.name != "disabled":
        for name in _INHERITED:
            os.environ.pop(name, None)
        for name, value in environment(run).items():
            os.environ.setdefault(name, value)
    return Tracker(run, cfg)


def preload() -> None:
    """Import what the client imports when it starts (over a second of CPU time), for a process that ranks are forked from.

    Best before torch is imported: the client's classes search all loaded modules for their own sources. Starts no thread
    and no process; without the package it does nothing.
    """
    with contextlib.suppress(ImportError):
        import requests  # noqa: F401
        import wandb.sdk.launch  # noqa: F401


def environment(run: RunFolder) -> dict[str, str]:
    """Environment variables that keep W&B's files in the run folder and W&B's own error reports at home.

    A worker sets them before torch starts threads; ``open_tracker`` sets those that are missing.
    """
    place = str(run.wandb_dir / "cache")
    return {
        "WANDB_CACHE_DIR": place,
        "WANDB_DATA_DIR": place,
        "WANDB_ARTIFACT_DIR": place,
        "WANDB_ERROR_REPORTING": "false",
    }


def wandb_id(name: str, uid: str) -> str:
    """The W&B id of a run: its name, with ``uid`` so that two run folders of one name are two runs; at most 64 characters.

    A restart of the same run folder gets the same id.
    """
    safe = re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-") or "run"
    tail = f"-{uid}" if uid else ""
    return safe[: 64 - len(tail)] + tail


def _settings(place: Path, mode: str, origin: Mapping[str, Any]) -> Any:
    import wandb

    code = origin.get("code")
    commit = code.get("commit") if isinstance(code, dict) else None
    return wandb.Settings(
        mode="online" if mode == "online" else "offline",
        root_dir=str(place),
        init_timeout=INIT_TIMEOUT_S,
        finish_timeout=FINISH_TIMEOUT_S,
        # The record of the code was made when the run was submitted; now the checkout may be another one.
        git_commit=commit,
        disable_git=True,
        disable_code=True,
        save_code=False,
        label_disable=True,
        # The logs of all ranks are in the run folder.
        console="off",
        silent=True,
        symlink=False,
        x_disable_stats=True,
        x_disable_machine_info=True,
        x_save_requirements=False,
        # "Stop run" on the web page would raise KeyboardInterrupt in the training.
        stop_fn=_ignore_stop,
    )


def _ignore_stop() -> None:
    log.warning("W&B asked this run to stop; it goes on, stop it where it was started")


def _config(cfg: Config, origin: Mapping[str, Any]) -> dict[str, Any]:
    from europa_exp.config import io

    code = origin.get("code") if isinstance(origin.get("code"), dict) else {}
    assert isinstance(code, dict)
    about = {key: origin.get(key) for key in ("identity", "sweep", "repeat", "parent", "data_fingerprint")}
    about |= {"commit": code.get("commit"), "dirty": code.get("dirty"), "code": code.get("fingerprint")}
    return _redacted({**io.to_dict(cfg), CONFIG_KEY: about})


def _redacted(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _redacted(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_redacted(entry) for entry in value]
    return redact(value, strict=True)[0] if isinstance(value, str) else value


def _teardown() -> None:
    import wandb

    wandb.teardown()


def _kill_service() -> None:
    """End the W&B process that this process started, if it is still there."""
    with contextlib.suppress(OSError):
        for task in Path("/proc/self/task").iterdir():
            for pid in (task / "children").read_text().split():
                with contextlib.suppress(OSError):
                    if b"wandb-core" in Path(f"/proc/{pid}/cmdline").read_bytes():
                        os.kill(int(pid), signal.SIGKILL)


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _short(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {redact(lines[0][:300])[0]}" if lines else type(error).__name__
