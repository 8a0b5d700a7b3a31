"""What ``sync`` asks of the W&B client, in a process of its own that can be ended whatever the client does.

The client retries for many minutes without a network, asks terminals, and starts a process that outlives a thread. Here it
gets a process, a time limit and no terminal. ``python -m europa_exp.runs.wandb_process`` reads one task as JSON from standard
input and writes the answer as the last line of standard output.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from europa_exp.config.secrets import redact
from europa_exp.runs.folder import RunFolder

API_TIMEOUT_S = 15
ASK_TIMEOUT_S = 45.0
"""For the first answer of the server; each further question adds ``EACH_S``."""
EACH_S = 3.0
LEFT_OVER = frozenset(
    f"WANDB_{name}"
    for name in (
        "MODE",
        "DISABLED",
        "SERVICE",
        "RUN_ID",
        "RESUME",
        "SWEEP_ID",
        "NAME",
        "NOTES",
        "TAGS",
        "RUN_GROUP",
        "JOB_TYPE",
        "PROJECT",
        "ENTITY",
    )
)
"""Variables of the user's shell that would change which run is written or stop it from being sent."""


class WandbUnavailable(ConnectionError):
    """W&B can't be asked: no package, no login, no network, or no answer in time. The message has the way out."""


def ask(runs: Sequence[Mapping[str, Any]], place: Path) -> dict[str, Any]:
    """How far the server knows some runs: ``{"server": address, "runs": [{"path", "rows" or None if it has no such run}]}``.

    A run is ``{project, entity or None, id}``. Raises WandbUnavailable.
    """
    patience = ASK_TIMEOUT_S + EACH_S * len(runs)
    return _call({"task": "ask", "runs": list(runs)}, place, patience)


def write(parts: Sequence[Mapping[str, Any]], place: Path) -> list[dict[str, Any]]:
    """Have the client write parts of recorded runs as offline runs below ``place``.

    A part is ``{run: folder, start, end: rows of metrics.jsonl, exit_code, unfinished: bool}``. For each part comes
    ``{folder}`` or ``{problem}``. Raises WandbUnavailable.
    """
    rows = sum(part["end"] - part["start"] for part in parts)
    answer = _call({"task": "write", "parts": list(parts)}, place, 60 + 20 * len(parts) + rows / 100)
    found: list[dict[str, Any]] = answer["parts"]
    return found


@dataclass
class Complaints:
    """What ``wandb beta sync`` complained of: about all runs (``general``, empty if about none), and by the id of a run."""

    general: str = ""
    runs: dict[str, str] = field(default_factory=dict)

    def of(self, run_id: str) -> str:
        """What concerns one run."""
        return self.runs.get(run_id) or self.general


def send(folders: Sequence[Path], place: Path, patience: float) -> Complaints:
    """Run ``wandb beta sync`` on the folders of offline runs.

    Its exit code tells nothing: it is 0 for a run that the server refused. Whoever calls asks the server afterwards.
    """
    options = ["--no-skip-synced", "-n", "8"]
    command = [sys.executable, "-m", "wandb", "beta", "sync", *options, *map(str, folders)]
    for _ in range(2):
        code, out, err = _run(command, place, patience)
        lines = [line.strip() for line in (out + "\n" + err).splitlines()]
        # On a busy machine it gives up on its own process, before anything was sent: that may be tried again.
        if not code or any("View run" in line for line in lines):
            break
    if code is None:
        return Complaints(f"`wandb beta sync` did not end within {patience:.0f} s and was stopped")
    found = Complaints()
    for line in lines:
        if about := re.search(r"ERROR.*?\[(?:[^\s\]]+/)?([^\s\]/]+)\] (.*)", line):
            found.runs[about[1]] = _plain(about[2])
        elif "ERROR" in line or re.match(r"[\w.]*(?:Error|Exception)\b", line):
            found.general = _plain(line)
    if code and not found.general:
        found.general = f"`wandb beta sync` ended with exit code {code}"
    return found


def _call(task: Mapping[str, Any], place: Path, patience: float) -> dict[str, Any]:
    code, out, err = _run([sys.executable, "-m", __name__], place, patience, json.dumps(task))
    if code is None:
        raise WandbUnavailable(f"W&B did not answer within {patience:.0f} s; {_way_out()}")
    try:
        answer = json.loads(out.strip().splitlines()[-1])
    except (ValueError, IndexError):
        lines = err.strip().splitlines() or [f"exit code {code}"]
        raise WandbUnavailable(f"W&B's client failed: {_plain(lines[-1])}; {_way_out()}") from None
    if "problem" in answer:
        raise WandbUnavailable(answer["problem"])
    found: dict[str, Any] = answer
    return found


def _run(command: Sequence[str], place: Path, patience: float, text: str = "") -> tuple[int | None, str, str]:
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=_environment(place),
        start_new_session=True,
    )
    try:
        out, err = process.communicate(text, timeout=patience)
        return process.returncode, out, err
    except subprocess.TimeoutExpired:
        return None, "", ""
    finally:
        if process.poll() is None:
            _kill(process)


def _kill(process: subprocess.Popen[str]) -> None:
    """End it and the client's own process, which has a session of its own and would go on sending."""
    pids = [process.pid]
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{process.pid}/task").iterdir():
            pids += [int(pid) for pid in (task / "children").read_text().split()]
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


def _environment(place: Path) -> dict[str, str]:
    """The user's, for the login and the proxy, with all files in ``place``."""
    kept = {name: value for name, value in os.environ.items() if name not in LEFT_OVER}
    for name in ("DIR", "CACHE_DIR", "DATA_DIR", "ARTIFACT_DIR"):
        kept[f"WANDB_{name}"] = str(place)
    # The module must be found wherever the user stands.
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    return kept | {"WANDB_ERROR_REPORTING": "false", "PYTHONPATH": path}


def _way_out() -> str:
    return "check the network (compute nodes have none: run this on a login node) and, for a server of your own, WANDB_BASE_URL"


def _plain(text: str) -> str:
    return redact(text.removeprefix("wandb: ").removeprefix("ERROR ")[:300])[0]


# ------------------------------------------------------------------------------------------------- in the process


def main() -> None:
    """Do the task on standard input."""
    task = json.load(sys.stdin)
    try:
        answer = _asked(task["runs"]) if task["task"] == "ask" else _written(task["parts"])
    except ImportError as error:
        answer = {"problem": f"the wandb package can't be imported ({error}); install it where `europa` is"}
    print("\n" + json.dumps(answer), flush=True)


def _asked(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    import wandb

    login = "run `wandb login` (or set WANDB_API_KEY) and try again"
    server = os.environ.get("WANDB_BASE_URL", "its default address")
    try:
        server = str(wandb.setup().settings.base_url)
        if not wandb.login(prompt=False, verify=False):
            return {"problem": f"nobody is logged in to W&B at {server}; {login}"}
        _knock(server)
        api = wandb.Api(timeout=API_TIMEOUT_S)
        default = str(api.default_entity)
        found = [_known(api, run.get("entity") or default, run) for run in runs]
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        why = _plain("; ".join(line.strip() for line in lines[:3]))
        refused = re.search(
            r"\b40[13]\b|permission|api.key|unauthorized|not logged in|invalid credentials", why, re.I
        )
        return {"problem": f"W&B at {server} can't be used: {why}; {login if refused else _way_out()}"}
    return {"server": server, "runs": found}


def _knock(server: str) -> None:
    """Fail at once where nothing can answer; the client would try for long and then tell of a busy process."""
    address = urllib.parse.urlsplit(server)
    if address.hostname and not urllib.request.getproxies():
        port = address.port or (443 if address.scheme == "https" else 80)
        socket.create_connection((address.hostname, port), timeout=API_TIMEOUT_S).close()


def _known(api: Any, entity: str, run: Mapping[str, Any]) -> dict[str, Any]:
    path = f"{entity}/{run['project']}/{run['id']}"
    try:
        rows = api.run(path).history_line_count
    except Exception as error:
        # A project or run that is not there yet; anything else concerns all runs.
        if "not find" in str(error).lower() or "not found" in str(error).lower():
            return {"path": path, "rows": None}
        raise
    return {"path": path, "rows": int(rows or 0)}


def _written(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    import wandb  # noqa: F401

    done: list[dict[str, Any]] = []
    for number, part in enumerate(parts):
        try:
            done.append({"folder": _write(part, Path(os.environ["WANDB_DIR"]) / f"part-{number}")})
        except Exception as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            done.append({"problem": _plain(lines[0])})
    return {"parts": done}


def _write(part: Mapping[str, Any], place: Path) -> str:
    from europa_exp.runs.tracking import Client

    run = RunFolder(part["run"])
    rows = run.metrics()
    place.mkdir()
    client = Client(run, run.config(), "offline", place)
    try:
        client.recall(rows[: part["start"]])
        for row in rows[part["start"] : part["end"]]:
            values = {key: value for key, value in row.items() if key not in ("step", "time")}
            client.log(values | _moment(row.get("time")), row["step"])
        if part["unfinished"]:
            client.mark_unfinished()
    finally:
        client.end(part["exit_code"])
    return str(place / client.folder)


def _moment(time: Any) -> dict[str, float]:
    try:
        return {"_timestamp": datetime.fromisoformat(time).timestamp()}
    except (TypeError, ValueError):
        return {}


if __name__ == "__main__":
    main()
