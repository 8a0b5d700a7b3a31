"""Runs inside an allocation that the shell holds (salloc): one srun after the other, each run a step of its own.

The process that drives them (``python -m europa_exp.launch.allocation FOLDER``) outlasts the command that was typed, like the
agent of a local job, and can be asked to stop in the same ways. Stopping ends steps, never the allocation. When the allocation
ends, so do all runs; those that had not begun are cancelled, and the same call runs them in another one.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from europa_exp.config.errors import Problem
from europa_exp.config.schema import Config, Launch
from europa_exp.launch import environment, job_folder, processes, slurm, squeue
from europa_exp.launch.agents import STOP_FILE, AgentRecord, cancel_file
from europa_exp.launch.dispatch import LocalJob
from europa_exp.runs import attempts
from europa_exp.runs.folder import RunFolder
from europa_exp.runs.status import State

JOB = "SLURM_JOB_ID"
SCRIPT = "job.sh"
_PLAN = "plan.json"
_LOG = "driver.log"
_OPEN = (State.created, State.queued, State.running)
_LOOK_EVERY_S = 0.5
_END_S = 60.0
"""Longest wait for srun to end after SIGTERM; Slurm's own KillWait is 30 s by default."""


def problem(cfg: Config, environ: Mapping[str, str]) -> Problem | None:
    """Why these ranks can't run in the allocation of this shell, if they can't."""
    layout, job = cfg.parallelism, environ.get(JOB)
    if not job:
        ask = ["salloc", f"--nodes={layout.nodes}", f"--ntasks-per-node={layout.gpus_per_node}"]
        ask += [f"--gres={cfg.cluster.gres}"] if cfg.cluster.gres else []
        ask += [f"--account={cfg.cluster.account or '<budget>'}"] if cfg.cluster.needs_account else []
        rule = f"this shell holds no allocation ({JOB} is not set)"
        way_out = f"Get one first: {shlex.join(ask)}, or leave cluster.inside_allocation out to use sbatch"
        return Problem("cluster.inside_allocation", True, rule, way_out)
    nodes = environ.get("SLURM_JOB_NUM_NODES", "")
    if nodes.isdigit() and int(nodes) < layout.nodes:
        rule = f"job {job}, the allocation of this shell, has {nodes}"
        return Problem(
            "parallelism.nodes", layout.nodes, rule, f"Take {nodes} or fewer, or a larger allocation"
        )
    return None


class AllocationJob(LocalJob):
    """The job in this shell's allocation. Raises OSError when its folder can't be made or the driver not started."""

    def __init__(self, runs: Sequence[RunFolder], runs_dir: Path, entry: str, launch: Launch) -> None:
        self.folder = job_folder.make(runs_dir)
        self._agent: AgentRecord | None = None
        plan = []
        for number, run in enumerate(runs):
            place = self.folder / str(number)
            place.mkdir()
            executor = slurm.make_executor(run.config(), launch, folder=place, name=run.name)
            (place / SCRIPT).write_text(executor.text())
            # Each run is a job of its own, in a folder of its own, under the allocation's number.
            job_folder.write_tasks(place, [((str(run.path),), entry)])
            job_folder.mark(place, os.environ[JOB]).touch()
            plan.append([str(run.path), str(place)])
        (self.folder / _PLAN).write_text(json.dumps(plan))
        # srun needs to know the allocation and nothing else of it: what salloc was told must not shape the steps.
        environ = environment.for_submission(os.environ) | {JOB: os.environ[JOB]}
        paths = [str(slurm.ROOT), *filter(None, [environ.get("PYTHONPATH")])]
        with (self.folder / _LOG).open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "europa_exp.launch.allocation", str(self.folder)],
                env=environ | {"PYTHONPATH": os.pathsep.join(paths)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def active(self) -> bool:
        """Whether the driver still works on the runs."""
        return self._process.poll() is None

    def kill(self) -> None:
        """End everything now: srun takes a SIGTERM for an order to kill the step."""
        processes.send(self._process.pid, signal.SIGTERM)

    def last_words(self) -> str:
        """The end of what the driver and srun wrote."""
        return last_lines(self.folder / _LOG)

    def _controller(self) -> Any:
        return self._process


def last_lines(file: Path, most: int = 8) -> str:
    """The end of the file; nothing where there is none."""
    with contextlib.suppress(OSError):
        return "\n".join(file.read_text(errors="replace").strip().splitlines()[-most:])
    return ""


# ------------------------------------------------------------------------------------------------------------ the driver


class Driver:
    """Runs the steps of one job folder in turn. Whatever happens to one run, the next one gets its turn."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        plan = json.loads((folder / _PLAN).read_text())
        self._turns = [(RunFolder(run), Path(place)) for run, place in plan]
        self._stops = 0
        self._over: dict[str, Any] | None = None
        """The error of its runs, once the allocation has ended."""

    def work(self) -> None:
        """Run everything and record what came of it."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        AgentRecord.of_this_process(run for run, _ in self._turns).write(self._folder)
        for run, place in self._turns:
            self._one(run, place)

    def _on_signal(self, *_: object) -> None:
        self._stops += 1

    def _stopped(self) -> bool:
        return bool(self._stops) or (self._folder / STOP_FILE).exists()

    def _one(self, run: RunFolder, place: Path) -> None:
        if run.status().state not in (State.created, State.queued):
            cancel_file(run).unlink(missing_ok=True)
            return  # cancelled while it waited
        if self._over is not None:
            run.set_state(State.cancelled, only_from=_OPEN, error=self._over)
            return
        if self._stopped():
            run.set_state(State.cancelled, only_from=_OPEN)
            return
        with (place / _LOG).open("ab") as log:
            step = subprocess.Popen(
                ["bash", str(place / SCRIPT)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        told = 0.0
        while step.poll() is None:
            time.sleep(_LOOK_EVERY_S)
            if told and time.monotonic() > told + _END_S:
                processes.send(step.pid, signal.SIGKILL, group=True)
            elif not told and (self._stopped() or cancel_file(run).exists()):
                told = time.monotonic()
                processes.send(step.pid, signal.SIGTERM, group=True)
        self._settle(run, place, step.returncode, cancelled=bool(told))
        cancel_file(run).unlink(missing_ok=True)

    def _settle(self, run: RunFolder, place: Path, code: int, *, cancelled: bool) -> None:
        """The step is over; see that the record says how, also where its ranks had no time to."""
        status = run.status()
        began = attempts.attempts_of(status)[-1:]
        fields: dict[str, Any] = {}
        if cancelled:
            if began:
                start = str(began[0].get("start"))
                fields["attempts"] = attempts.closed(status, start, attempts.Reason.cancelled)
            # Ranks that die of the cancellation may have called it a failure a moment ago.
            run.set_state(
                State.cancelled, only_from=(*_OPEN, State.failed), error=None, reason=None, **fields
            )
            return
        if code:
            self._over = _end_of_allocation()
        if self._over is not None:
            print(self._over["message"], flush=True)
            if status.state in _OPEN and began:
                start = str(began[0].get("start"))
                fields["attempts"] = attempts.closed(status, start, attempts.Reason.cancelled)
            # One that could record its end knows only that it was told to.
            run.set_state(State.cancelled, only_from=(*_OPEN, State.cancelled), error=self._over, **fields)
            return
        if began and began[0].get("ended_at") is None:
            start = str(began[0].get("start"))
            fields["attempts"] = attempts.closed(status, start, attempts.Reason.lost_rank)
        words = last_lines(place / _LOG)
        started = "srun ended" if began else "the ranks did not start: srun ended"
        error = {
            "rank": None,
            "type": "StepEnded",
            "message": f"{started} with exit code {code}; see {place}",
            "traceback": words,
        }
        run.set_state(State.failed, only_from=_OPEN, error=error, **fields)


def _end_of_allocation() -> dict[str, Any] | None:
    """What to record of runs whose allocation has ended; None while it lasts, and while Slurm gives no answer."""
    job = os.environ[JOB]
    answer = squeue.ask([job])
    found = answer.jobs.get(job)
    if found is not None and (found.ended or found.state == "COMPLETING"):
        how = f"job {job}, {found.state}"
    elif found is None and answer.known:
        how = f"Slurm does not know job {job} any more"
    else:
        return None
    message = f"the allocation has ended: {how}"
    return {"rank": None, "type": "AllocationEnded", "message": message, "traceback": ""}


if __name__ == "__main__":
    Driver(Path(sys.argv[1])).work()
