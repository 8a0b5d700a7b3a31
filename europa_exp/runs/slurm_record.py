"""What Slurm says of a job, in words that the run records can be held against. Asking Slurm is ``launch.squeue``'s work."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

SUCCESS = "COMPLETED"
CANCELLED = "CANCELLED"

ENDED = frozenset(
    {
        SUCCESS,
        CANCELLED,
        "FAILED",
        "TIMEOUT",
        "NODE_FAIL",
        "PREEMPTED",
        "OUT_OF_MEMORY",
        "BOOT_FAIL",
        "DEADLINE",
        "REVOKED",
    }
)
"""States in which a job is over. Slurm may start a job again that it lists under one of them for a moment."""

WAITING = frozenset(
    {"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT", "CONFIGURING"}
)
"""States in which nothing of the job runs yet, or nothing at the moment."""

_JOB_ID = re.compile(r"(?P<job>\d+)(?:_(?P<task>\d+|\[(?P<tasks>[\d,\-:]+)(?:%\d+)?\]))?")


@dataclass(frozen=True)
class Step:
    """One step of a job in the accounting: ``name`` is ``batch`` or the number of an srun."""

    name: str
    state: str
    exit_code: int = 0
    signal: int = 0
    nodes: str = ""


@dataclass(frozen=True)
class SlurmState:
    """What Slurm says of one job, or of one task of an array.

    ``state`` is Slurm's word without additions, ``source`` is ``squeue`` or ``sacct``. ``reason`` says why a job waits or
    failed, empty if Slurm has none. ``nodes`` is Slurm's list (``n[1-3,7]``), empty while there are none. ``exit_code`` and
    ``signal`` are those of the job script and None where the source does not know them. Times are Slurm's, in local time.
    ``by`` is the user who cancelled it. ``steps`` and ``earlier`` (the same job before it was requeued, the oldest first)
    come from the accounting and are empty without it.
    """

    job_id: str
    state: str
    source: str
    reason: str = ""
    nodes: str = ""
    exit_code: int | None = None
    signal: int | None = None
    started: str = ""
    ended_at: str = ""
    by: str = ""
    steps: tuple[Step, ...] = ()
    earlier: tuple[SlurmState, ...] = ()

    @property
    def ended(self) -> bool:
        """The job is over."""
        return self.state in ENDED

    @property
    def waiting(self) -> bool:
        """The job waits for nodes, for the first time or again."""
        return self.state in WAITING

    def text(self) -> str:
        """``NODE_FAIL (sacct)``, with the reason if there is one."""
        by = f" by user {self.by}" if self.by else ""
        reason = f", {self.reason}" if self.reason else ""
        return f"{self.state}{by} ({self.source}{reason})"


@dataclass(frozen=True)
class Answer:
    """``jobs`` holds what Slurm knows, by the id asked for. ``silent`` has a phrase for each command without an answer.

    ``known`` tells whether an absent job is known to be absent from the queue: squeue answered.
    """

    jobs: dict[str, SlurmState] = field(default_factory=dict)
    silent: tuple[str, ...] = ()
    known: bool = False


def is_job(text: str) -> bool:
    """Whether it is the id of one job (``7``) or of one task of an array (``7_3``)."""
    return re.fullmatch(r"[0-9]+(_[0-9]+)?", text) is not None


def job_ids(text: str) -> list[str]:
    """The jobs that Slurm's id stands for: ``7`` and ``7_3`` themselves, ``7_[1-3,9%2]`` the four tasks; else nothing."""
    found = _JOB_ID.fullmatch(text.strip())
    if found is None:
        return []
    job, tasks = found["job"], found["tasks"]
    if tasks is None:
        return [text.strip()]
    numbers: list[int] = []
    for part in tasks.split(","):
        span, _, every = part.partition(":")
        first, _, last = span.partition("-")
        numbers += range(int(first), int(last or first) + 1, int(every or 1))
    return [f"{job}_{number}" for number in numbers]


def node_names(text: str) -> list[str]:
    """The nodes of Slurm's list: ``n[01-03,7],login`` is n01, n02, n03, n7, login. Empty for an empty or odd list."""
    names: list[str] = []
    for entry in re.findall(r"[^,\[\]]+(?:\[[^\]]*\][^,\[\]]*)*", text.strip()):
        names += _expanded(entry)
    return [name for name in names if name not in ("None assigned", "(null)", "N/A")]


def _expanded(entry: str) -> list[str]:
    found = re.search(r"\[([^\]]*)\]", entry)
    if found is None:
        return [entry]
    names: list[str] = []
    for part in found[1].split(","):
        first, _, last = part.partition("-")
        if not first.isdigit() or (last and not last.isdigit()):
            return []
        for number in range(int(first), int(last or first) + 1):
            text = str(number).zfill(len(first))
            names += _expanded(entry[: found.start()] + text + entry[found.end() :])
    return names
