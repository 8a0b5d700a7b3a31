"""Virtual Slurm clusters for tests: started by ``cluster.sh``, spoken to with Slurm's own commands."""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SCRIPT = HERE / "cluster.sh"

_PORTS = 200
_ENDED = (
    "COMPLETED",
    "FAILED",
    "TIMEOUT",
    "CANCELLED",
    "NODE_FAIL",
    "PREEMPTED",
    "OUT_OF_MEMORY",
    "DEADLINE",
)

T = TypeVar("T")


def why_not() -> str | None:
    """Why no cluster can be started on this machine; None when one can."""
    missing = subprocess.run([SCRIPT, "missing"], capture_output=True, text=True)
    if missing.returncode:
        return f"no Slurm on this machine: {missing.stdout.strip()}"
    if os.geteuid() != 0:
        return "a virtual Slurm needs root: sudo make test"
    return None


def outside(environ: dict[str, str]) -> dict[str, str]:
    """The environment without what a surrounding Slurm or a wandb account would bring in."""
    return {k: v for k, v in environ.items() if not k.startswith(("SLURM", "SBATCH", "SRUN", "WANDB"))}


class Cluster:
    """One virtual cluster of ``nodes`` nodes called 127.0.0.1, 127.0.0.2, ...

    It stops with ``stop()``, and by itself when the process that made it is gone.
    """

    def __init__(self, nodes: int = 4, **settings: int) -> None:
        """``settings``: MAX_ARRAY_SIZE, SLURMD_TIMEOUT, CPUS (see cluster.sh)."""
        self.nodes = nodes
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))
        self._settings = {name: str(value) for name, value in settings.items()}
        self._settings |= {"PORT": str(_free_ports()), "OWNER": str(os.getpid())}
        try:
            self.script("start", str(nodes))
        except BaseException:
            print(self.logs())
            shutil.rmtree(self.folder, ignore_errors=True)
            raise

    @property
    def conf(self) -> str:
        """What SLURM_CONF has to say."""
        return str(self.folder / "slurm.conf")

    def environ(self, **more: str) -> dict[str, str]:
        """The environment of somebody who is logged in to this cluster."""
        return {**outside(dict(os.environ)), "SLURM_CONF": self.conf, **more}

    def script(self, action: str, *arguments: str) -> None:
        """An action of cluster.sh, such as ``down``."""
        # No pipe: the daemons would hold it open.
        with tempfile.TemporaryFile("w+") as output:
            done = subprocess.run(
                [SCRIPT, action, self.folder, *arguments],
                env={**outside(dict(os.environ)), **self._settings},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                timeout=180,
            )
            output.seek(0)
            assert done.returncode == 0, f"cluster.sh {action}: {output.read()}"

    def stop(self) -> None:
        """End every process of the cluster and remove its folder."""
        self.script("stop")
        shutil.rmtree(self.folder, ignore_errors=True)

    def run(self, *command: str, timeout: float = 60, **environ: str) -> str:
        """What a command, such as ``squeue``, prints for somebody on this cluster; it has to succeed."""
        done = subprocess.run(
            command,
            env=self.environ(**environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def queue(self) -> dict[str, str]:
        """Jobs that Slurm still holds, with their state; array tasks one by one (``12_3``)."""
        lines = self.run("squeue", "--noheader", "--array", "--format=%i %T").splitlines()
        return dict(line.split(maxsplit=1) for line in lines)

    def job(self, job_id: str) -> dict[str, str]:
        """What ``scontrol show job`` says of one job or array task: JobState, Reason, Restarts, NodeList, ..."""
        text = self.run("scontrol", "show", "job", "--oneliner", job_id)
        return dict(field.partition("=")[::2] for field in text.split() if "=" in field)

    def wait_until_over(self, *job_ids: str, seconds: float = 120) -> dict[str, str]:
        """Wait for the jobs; their last state in Slurm."""
        states: dict[str, str] = {}

        def over() -> bool:
            states.update({job_id: self.job(job_id)["JobState"] for job_id in job_ids})
            return all(state in _ENDED for state in states.values())

        until(over, seconds, lambda: f"{states}\n{self.logs()}")
        return states

    def clear(self) -> None:
        """Back to how it was after the start: no jobs, all nodes idle, controller and accounting up."""
        if not self.answers():
            self.script("start-controller")
        if not self.counts():
            self.script("start-dbd")
        self.run("scancel", "--quiet", "--full", "--user=root")
        for line in self.run(
            "sinfo", "--noheader", "--Node", "--partition=main", "--format=%N %T"
        ).splitlines():
            node, state = line.split()
            if state.startswith(("down", "drain")):
                self.script("up", node)
        idle = ("sinfo", "--noheader", "--Node", "--partition=main", "--states=idle", "--format=%N")
        until(
            lambda: not self.queue() and len(self.run(*idle).splitlines()) == self.nodes,
            60,
            lambda: self.run("squeue") + self.run("sinfo") + self.logs(),
        )

    def answers(self) -> bool:
        """Whether the controller is up."""
        return self._succeeds("scontrol", "ping")

    def counts(self) -> bool:
        """Whether the accounting is up."""
        return self._succeeds("sacctmgr", "--noheader", "show", "cluster")

    def _succeeds(self, *command: str) -> bool:
        return subprocess.run(command, env=self.environ(), capture_output=True, timeout=60).returncode == 0

    def logs(self, lines: int = 15) -> str:
        """The ends of the daemons' logs, for messages."""
        text = ""
        for path in sorted((self.folder / "log").glob("*.log")):
            tail = path.read_text(errors="replace").splitlines()[-lines:]
            text += f"== {path.name}\n" + "\n".join(tail) + "\n"
        return text

    def processes(self) -> list[int]:
        """Living processes that belong to the cluster: its daemons, and what jobs left behind."""
        found = []
        needles = (f"EUROPA_TEST_CLUSTER={self.folder}\0".encode(), f"SLURM_CONF={self.conf}\0".encode())
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                environ = (entry / "environ").read_bytes()
                zombie = (entry / "stat").read_text().rpartition(")")[2].split()[0] in "ZX"
            except OSError:
                continue
            if not zombie and int(entry.name) != os.getpid() and any(needle in environ for needle in needles):
                found.append(int(entry.name))
        return found


def until(condition: Callable[[], T], seconds: float = 60, explain: Callable[[], object] | None = None) -> T:
    """Wait for a condition and return its value; fails after ``seconds`` with what ``explain`` says."""
    end = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < end, f"waited {seconds} s in vain: {explain() if explain else ''}"
        time.sleep(0.2)


def _free_ports() -> int:
    """The first of enough free ports in a row, below those that the system gives to outgoing connections."""
    for _ in range(100):
        first = random.randrange(20_000, 31_000, _PORTS)
        if all(_is_free(first + offset) for offset in range(_PORTS)):
            return first
    raise OSError("no free ports")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
