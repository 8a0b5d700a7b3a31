"""The agents of this machine (see ``agent``), for those who want to watch or stop one."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from europa_exp.launch import processes
from europa_exp.runs.folder import RunFolder

AGENT_FILE = "agent.json"
"""In the job's folder: process id and start time of the agent, its host and its runs."""

STOP_FILE = "stop"
"""In the job's folder: its presence stops an agent that has not begun to listen to signals."""

_CANCEL_FILE = ".cancel"


@dataclass(frozen=True)
class AgentRecord:
    """What an agent said of itself: its process, its host, the folders of its runs."""

    pid: int
    started: str | None
    host: str
    runs: tuple[str, ...]

    @property
    def here(self) -> bool:
        """It is, or was, a process of this machine."""
        return self.host == socket.gethostname()

    @property
    def alive(self) -> bool:
        """Its process is there; for an agent of another machine that can't be seen, and True is assumed."""
        return not self.here or processes.is_alive(self.pid, self.started)


def cancel_file(run: RunFolder) -> Path:
    """The file whose presence asks the agent to stop this one run. It works from another machine, too."""
    return run.path / _CANCEL_FILE


def agents(runs_dir: str | os.PathLike[str]) -> dict[str, AgentRecord]:
    """The newest agent of each run that is in the record of one: path of the run folder -> agent."""
    from europa_exp.launch.dispatch import JOBS_FOLDER

    found: dict[str, AgentRecord] = {}
    # Folders of jobs are named after the time.
    for file in sorted(Path(runs_dir).absolute().glob(f"{JOBS_FOLDER}/*/{AGENT_FILE}")):
        try:
            record = json.loads(file.read_text(encoding="utf-8"))
            agent = AgentRecord(
                int(record["pid"]),
                record.get("started"),
                str(record["host"]),
                tuple(map(str, record["runs"])),
            )
        except (OSError, ValueError, KeyError, TypeError):
            continue
        found.update(dict.fromkeys(agent.runs, agent))
    return found
