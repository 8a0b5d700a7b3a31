"""What a task of a Slurm job knows about itself from its environment, and what it asks of Slurm."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from europa_exp.config.schema import Config
from europa_exp.launch import processes
from europa_exp.runs.slurm_record import node_names

SENT = (signal.SIGTERM, signal.SIGUSR2)
"""What Slurm sends to every process of a step, those that ask Slurm on its behalf included."""

_TIMEOUT_S = 20

_ASK_EVERY_S = 10.0
_ASK_FOR_S = 600.0
"""Longest time for which a controller that is away is asked to start the job again."""

_ASK_UNTIL_S = 60.0
"""Seconds before the end of the job at which that stops."""

_AWAY = re.compile(
    r"does not answer|unable to contact|unexpected message|timed?[ -]?out|connect|zero bytes|standby|temporarily",
    re.IGNORECASE,
)
"""In what scontrol says when no controller answers, or one that is about to come or go."""


class LayoutError(Exception):
    """The tasks that Slurm started are not the ranks that the configuration asks for."""


@dataclass(frozen=True)
class Task:
    """One task of a job step: one rank."""

    rank: int
    local_rank: int
    node: int
    """Index of the node within the step."""

    tasks: int
    nodes: tuple[str, ...]
    host: str
    """This node's name, as Slurm has it."""

    job: int
    """Slurm's plain job id; each task of an array has one of its own."""

    job_id: str
    """The id that people use: ``123_4`` for a task of an array."""

    restarts: int
    """How often this job was started before."""

    step: int = 0

    ends_at: float | None = None
    """When the job has to end, in seconds since 1970, as far as Slurm says so."""

    @property
    def start(self) -> str:
        """The name of this start of this job."""
        return f"{self.job}.{self.restarts}.{self.step}"

    @classmethod
    def here(cls, environ: Mapping[str, str]) -> Task:
        """The task that this process is. Raises LayoutError when it is none."""
        try:
            array, index = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
            job = environ["SLURM_JOB_ID"]
            nodes = node_names(environ.get("SLURM_STEP_NODELIST") or environ["SLURM_JOB_NODELIST"])
            return cls(
                rank=int(environ["SLURM_PROCID"]),
                local_rank=int(environ["SLURM_LOCALID"]),
                node=int(environ["SLURM_NODEID"]),
                tasks=int(environ.get("SLURM_STEP_NUM_TASKS") or environ["SLURM_NTASKS"]),
                nodes=tuple(nodes),
                host=environ.get("SLURMD_NODENAME") or os.uname().nodename,
                job=int(job),
                job_id=f"{array}_{index}" if array and index else job,
                restarts=int(environ.get("SLURM_RESTART_COUNT") or 0),
                step=int(environ.get("SLURM_STEP_ID") or 0),
                ends_at=float(end) if (end := environ.get("SLURM_JOB_END_TIME", "")).isdigit() else None,
            )
        except (KeyError, ValueError) as error:
            raise LayoutError(f"this is no task of a Slurm job step: {error!r} in its environment") from error

    def check(self, cfg: Config) -> None:
        """Raise LayoutError unless this step is nodes x gpus_per_node ranks, node after node."""
        nodes, per_node = cfg.parallelism.nodes, cfg.parallelism.gpus_per_node
        asked = f"the configuration asks for {nodes} x {per_node} (parallelism.nodes x gpus_per_node)"
        if self.tasks != nodes * per_node or len(self.nodes) != nodes:
            raise LayoutError(f"Slurm started {self.tasks} tasks on {len(self.nodes)} nodes; {asked}")
        if self.rank != self.node * per_node + self.local_rank:
            raise LayoutError(
                f"task {self.rank} is number {self.local_rank} on node {self.node}; {asked}, in blocks: leave --distribution "
                "out of cluster.srun_args"
            )


@dataclass(frozen=True)
class JobNow:
    """What Slurm says of the job at this moment. ``state`` is empty when it does not answer."""

    state: str = ""
    restarts: int = 0
    preempted: bool = False
    overtime: bool = False
    """The time limit is over, or nearly."""
    failed: bool = False
    """The job script has ended, and not with 0."""
    exclude: tuple[str, ...] = ()


def ask(task: Task, *, margin_s: float = 0) -> JobNow:
    """Ask the controller about the job. ``margin_s`` before the time limit count as overtime already."""
    done = _call("scontrol", "--oneliner", "show", "job", str(task.job))
    if done is None or done.returncode:
        return JobNow()
    fields = dict(re.findall(r"(\S+?)=(\S*)", done.stdout))
    limit, run = _seconds(fields.get("TimeLimit", "")), _seconds(fields.get("RunTime", ""))
    return JobNow(
        state=fields.get("JobState", ""),
        restarts=int(fields.get("Restarts") or 0),
        preempted=fields.get("PreemptTime", "None") not in ("None", "N/A", "Unknown", ""),
        overtime=limit is not None and run is not None and run >= limit - margin_s,
        failed=fields.get("JobState") == "FAILED" or fields.get("Reason") == "NonZeroExitCode",
        exclude=tuple(node_names(fields.get("ExcNodeList", ""))),
    )


def down(nodes: Sequence[str]) -> list[str]:
    """Those of the nodes that Slurm calls down or failing at this moment."""
    # Not sinfo: it does not list a node that is down and still ends a job.
    done = _call("scontrol", "--oneliner", "show", "node", ",".join(nodes))
    if done is None:
        return []
    states = re.findall(r"^NodeName=(\S+).*?\bState=(\S+)", done.stdout, re.MULTILINE)
    return [node for node, state in states if re.search(r"DOWN|FAIL|NOT_RESPONDING|\*", state)]


def requeue(task: Task, *, pause: Callable[[float], object], say: Callable[[str], object]) -> str | None:
    """Make Slurm start the job again; why it does not, or None. Slurm ends this process soon after.

    A controller that is away (for minutes, where it is restarted) is asked again and again, as long as the job has time.
    ``pause`` waits so many seconds, ``say`` writes a line for people.
    """
    end = time.time() + _ASK_FOR_S
    if task.ends_at is not None:
        end = min(end, task.ends_at - _ASK_UNTIL_S)
    told = False
    while True:
        trouble = _trouble("scontrol", "requeue", str(task.job))
        if trouble is None or ask(task).restarts > task.restarts:
            return None  # in the second case Slurm was faster
        if not _AWAY.search(trouble) or time.time() + _ASK_EVERY_S > end:
            return trouble
        if not told:
            say(f"scontrol requeue: {trouble}; it is asked again every {_ASK_EVERY_S:.0f} s")
            told = True
        pause(_ASK_EVERY_S)


def avoid(job: str, nodes: Sequence[str]) -> str | None:
    """Keep a job away from nodes; what went wrong, or None. Slurm takes this only while a job waits (again)."""
    return _trouble("scontrol", "update", f"JobId={job}", f"ExcNodeList={','.join(nodes)}")


def cancel(jobs: Sequence[str]) -> str | None:
    """Cancel jobs; what went wrong, or None."""
    return _trouble("scancel", *jobs)


def _trouble(*command: str) -> str | None:
    """Why a command of Slurm failed; None when it did not."""
    done = _call(*command)
    if done is None:
        return f"{command[0]} does not answer"
    return None if done.returncode == 0 else (done.stderr or done.stdout).strip() or f"{command[0]} refuses"


def _call(*command: str) -> subprocess.CompletedProcess[str] | None:
    try:
        with processes.held_back(*SENT):
            return subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
                check=False,
                stdin=subprocess.DEVNULL,
                # Slurm signals the whole process group of a job that it ends.
                start_new_session=True,
            )
    except (OSError, subprocess.TimeoutExpired):
        return None


def _seconds(text: str) -> int | None:
    """Seconds of Slurm's D-HH:MM:SS; None for UNLIMITED and the like."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", text)
    if found is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
