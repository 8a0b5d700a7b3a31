"""Handing runs over to this machine, through submitit's local executor."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from europa_exp.launch import environment, job_folder, processes
from europa_exp.launch.agents import STOP_FILE, AgentRecord
from europa_exp.launch.job import Job
from europa_exp.runs.folder import RunFolder

LAST_SECONDS = 3.0
"""What a job that is being stopped gets before it is killed."""

_NO_LIMIT_MIN = 60 * 24 * 365


class LocalJob:
    """The job on this machine: submitit's controller, below it the agent (see ``agent``), below that the ranks."""

    def __init__(self, runs: Sequence[RunFolder], runs_dir: Path, entry: str, preload: str) -> None:
        import submitit

        self.folder = job_folder.make(runs_dir)
        job = Job(tuple(str(run.path) for run in runs), str(self.folder), entry, preload)
        executor = submitit.AutoExecutor(folder=str(self.folder), cluster="local")
        executor.update_parameters(timeout_min=_NO_LIMIT_MIN)
        with _prepared():
            self._job = executor.submit(job)
        self._agent: AgentRecord | None = None

    def agent_pid(self) -> int | None:
        """Process id of the agent, once it has said so."""
        if self._agent is None:
            self._agent = AgentRecord.read(self.folder)
        return self._agent.pid if self._agent else None

    def active(self) -> bool:
        """Whether somebody still works on the runs. The agent counts, not submitit's controller: either can be killed."""
        pid = self.agent_pid()
        if pid is None or self._agent is None:
            return not self._job.done()
        return processes.is_alive(pid, self._agent.started)

    def stop(self) -> None:
        """Ask the agent to stop; asked again it does not wait for the ranks."""
        # The file first: an agent that does not listen yet looks for it when it begins to.
        try:
            (self.folder / STOP_FILE).touch()
            told = True
        except OSError:
            told = False
        pid = self.agent_pid()
        if pid is not None and self.active():
            processes.send(pid, signal.SIGTERM)
        elif not told and (controller := self._controller()) is not None:
            # A full disk leaves no file of either side; submitit's controller forwards the signal.
            controller.terminate()

    def kill(self) -> None:
        """End everything now. The ranks die with the agent."""
        pid = self.agent_pid()
        if pid is not None and self.active():
            processes.send(pid, signal.SIGKILL)
        controller = self._controller()
        if controller is not None:
            controller.terminate()

    def reap(self) -> None:
        """Wait for submitit's controller, which ends soon after the agent."""
        controller = self._controller()
        if controller is None:
            return
        try:
            controller.wait(timeout=LAST_SECONDS)
        except Exception:
            controller.kill()
            controller.wait()

    def last_words(self) -> str:
        """The end of what the agent wrote on stderr."""
        logs = sorted(self.folder.glob("*_log.err"))
        with contextlib.suppress(OSError, IndexError):
            return "\n".join(logs[0].read_text(errors="replace").strip().splitlines()[-8:])
        return ""

    def _controller(self) -> Any:
        return getattr(self._job, "_process", None)


@contextlib.contextmanager
def _prepared() -> Iterator[None]:
    """What the job's processes inherit.

    They start with Ctrl-C and hang-up blocked: a terminal sends both to everything in it, but stopping the ranks in good
    order is the agent's work, on our word. (submitit's controller would kill the agent a second after a Ctrl-C.)
    """
    root = str(Path(__file__).resolve().parents[2])
    before = dict(os.environ)
    paths = [root, *filter(None, [before.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    if "CUDA_VISIBLE_DEVICES" in before:
        os.environ[environment.HOME_VARIABLE] = before["CUDA_VISIBLE_DEVICES"]
    try:
        with processes.held_back(signal.SIGINT, signal.SIGHUP):
            yield
    finally:
        os.environ.clear()
        os.environ.update(before)
