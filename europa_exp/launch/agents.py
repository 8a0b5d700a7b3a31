"""The agents of this machine (see ``agent`` and ``allocation``): what they say of themselves, for those who want to watch or
stop one."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from europa_exp.launch import processes
from europa_exp.launch.job_folder import JOBS_FOLDER
from europa_exp.runs.files import replace_text
from europa_exp.runs.folder import RunFolder

AGENT_FILE = "agent.json"
"""In the job's folder: the ``AgentRecord``."""

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

    @classmethod
    def of_this_process(cls, runs: Iterable[RunFolder]) -> AgentRecord:
        """What this process says of itself when it is to work on these runs."""
        pid = os.getpid()
        return cls(pid, processes.start_time(pid), socket.gethostname(), tuple(str(run.path) for run in runs))

    def write(self, folder: Path) -> None:
        """Leave the record in the job's folder. Raises OSError."""
        replace_text(folder / AGENT_FILE, json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> AgentRecord | None:
        """What the agent of a job left in its folder; None before it has."""
        try:
            record = json.loads((folder / AGENT_FILE).read_text(encoding="utf-8"))
            return cls(
                int(record["pid"]),
                record.get("started"),
                str(record["host"]),
                tuple(map(str, record["runs"])),
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None

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
    found: dict[str, AgentRecord] = {}
    # Folders of jobs are named after the time.
    for file in sorted(Path(runs_dir).absolute().glob(f"{JOBS_FOLDER}/*/{AGENT_FILE}")):
        if (agent := AgentRecord.read(file.parent)) is not None:
            found.update(dict.fromkeys(agent.runs, agent))
    return found
