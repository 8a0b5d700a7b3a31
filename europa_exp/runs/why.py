"""Why a run ended as it did: the cause, the rank and node, the lines that prove it, and what to do next.

The order of belief is that of the whole project: what the run recorded itself, then its logs, then Slurm. What can't be told
is said to be unknown, with the places to look; a guess is marked as one.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from europa_exp.runs import checkpoints, symptoms
from europa_exp.runs.attempts import attempts_of
from europa_exp.runs.files import read_lines
from europa_exp.runs.folder import RunFolder
from europa_exp.runs.log_files import ranks, spans
from europa_exp.runs.slurm_record import SlurmState
from europa_exp.runs.status import State, Status
from europa_exp.runs.symptoms import Cause, Symptom

MOST_LINES = 8
"""Most lines of evidence from one place."""

MOST_PLACES = 6
"""Most places that evidence is shown from."""

_LONGEST_LINE = 400
_TAIL = 64 * 1024
_MOST_LOGS = 512
_ATTEMPT = "======== "
"""Begins the first line of an attempt in a rank's log."""

_CRASH = re.compile(r"^Fatal Python error: ")
"""Begins what faulthandler prints of a crash in native code; the stack follows, the innermost frame first."""

_ECHOES = {"RuntimeError", "DistBackendError", "DistNetworkError", "DistStoreError", "DistError"}
_OF_DRIVER = {"JobEnded", "StepEnded"}
_OF_LAUNCHER = {"AgentKilled", "StartError", "ForkServerError"}


@dataclass(frozen=True)
class Evidence:
    """Lines from one place: ``logs/rank_3.log:120``, or ``Slurm`` or ``status.json``."""

    place: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Explanation:
    """Why a run stands where it stands. ``title`` is one line for people; ``sure`` is False for a guess.

    ``behind`` are the ranks that did not arrive at a collective, where that is known.
    """

    cause: Cause
    title: str
    sure: bool = True
    rank: int | None = None
    node: str | None = None
    evidence: tuple[Evidence, ...] = ()
    advice: tuple[str, ...] = ()
    behind: tuple[int, ...] = ()


@dataclass
class _Case:
    """All that is known of the run's last attempt, read once."""

    run: RunFolder
    status: Status
    state: str
    slurm: SlurmState | None
    job_logs: Sequence[Path]
    world: int | None = None
    per_node: int = 1
    nodes: list[str] = field(default_factory=list)
    attempts: list[dict[str, Any]] = field(default_factory=list)
    errors: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Rank -> error record of the last attempt, in the order of ranks."""

    def node(self, rank: int | None) -> str | None:
        if rank is None:
            return None
        recorded = self.errors.get(rank, {}).get("node")
        if isinstance(recorded, str) and recorded:
            return recorded
        index = rank // max(self.per_node, 1)
        if self.nodes:
            return self.nodes[index] if index < len(self.nodes) else None
        return self.status.host

    def text(self, rank: int) -> _Text:
        return _Text(self.run.log(rank), self.run.path, last_attempt=True)


def explain(
    run: RunFolder,
    *,
    state: str | None = None,
    slurm: SlurmState | None = None,
    job_logs: Sequence[Path] = (),
) -> Explanation:
    """Why the run stands where it stands.

    ``state`` is its state where somebody knows better than its own record (``lost``, or Slurm's failure of a job that could
    record nothing), ``slurm`` what Slurm says of its job, ``job_logs`` the output of that job.
    """
    case = _gather(run, state, slurm, job_logs)
    if case.status.state is State.unknown:
        return _unreadable(case)
    if case.state == "completed":
        return _completed(case)
    if case.state in ("created", "queued", "loading", "running"):
        return _going_on(case)
    found = _cancelled(case) or _of_record(case) or _of_slurm(case) or _of_exit_codes(case) or _unknown(case)
    return _too_many(case, found)


# ------------------------------------------------------------------------------------------------------------- reading


def _gather(run: RunFolder, state: str | None, slurm: SlurmState | None, job_logs: Sequence[Path]) -> _Case:
    status = run.status()
    case = _Case(run, status, state or str(status.state), slurm, job_logs, attempts=attempts_of(status))
    try:
        layout = run.config().parallelism
        case.per_node, case.world = layout.gpus_per_node, layout.nodes * layout.gpus_per_node
    except Exception:  # a broken configuration is no reason to say nothing
        pass
    last = case.attempts[-1] if case.attempts else {}
    nodes = last.get("nodes")
    if isinstance(nodes, list) and nodes:
        case.nodes = [str(node) for node in nodes]
    elif slurm is not None:
        from europa_exp.runs.slurm_record import node_names

        case.nodes = node_names(slurm.nodes)
    start = last.get("start")
    errors = {}
    for path in (run.path / "logs").glob("rank_*.error.json"):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            rank = int(record["rank"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
        # A record without a start is from a run of this machine, where each attempt removes the old ones.
        if start is None or record.get("start") in (None, start):
            errors[rank] = record
    case.errors = dict(sorted(errors.items()))
    return case


class _Text:
    """The end of a log, in numbered lines; of a log with several attempts, the last one's."""

    def __init__(self, path: Path, root: Path, *, last_attempt: bool = False, size: int = _TAIL) -> None:
        self.path = path
        try:
            self.name = str(path.relative_to(root))
        except ValueError:
            self.name = str(path)
        self.lines: list[str] = []
        self._offset = self._skipped = 0
        try:
            with open(path, "rb") as file:
                end = file.seek(0, 2)
                self._offset = max(0, end - size)
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return
        if self._offset:
            cut = data.find(b"\n") + 1
            self._offset, data = self._offset + cut, data[cut:]
        self.lines = data.decode(errors="replace").split("\n")
        if self.lines and not self.lines[-1]:
            self.lines.pop()
        if last_attempt:
            begins = [i for i, line in enumerate(self.lines) if line.startswith(_ATTEMPT)]
            if begins:
                # Not in bytes: what is no text has grown by its replacement.
                self._skipped = begins[-1]
                self.lines = self.lines[self._skipped :]

    def find(self, pattern: re.Pattern[str]) -> int | None:
        """Index of the last line that fits: what is said last, the end was about."""
        return next((i for i in range(len(self.lines) - 1, -1, -1) if pattern.search(self.lines[i])), None)

    def evidence(self, index: int, before: int = 0, after: int = 0) -> Evidence:
        """Lines around one, with the number of the first in the whole file."""
        first = max(index - before, 0)
        chosen = self.lines[first : index + after + 1][:MOST_LINES]
        while len(chosen) > 1 and not chosen[-1].strip():
            chosen.pop()
        return Evidence(f"{self.name}:{self._line_number(first)}", tuple(_short(line) for line in chosen))

    def end(self, count: int = MOST_LINES) -> Evidence | None:
        """The last lines that say something."""
        kept = [i for i, line in enumerate(self.lines) if line.strip()]
        return self.evidence(kept[-count:][0], after=count - 1) if kept else None

    def _line_number(self, index: int) -> int:
        number = 1 + self._skipped + index
        if self._offset:
            with open(self.path, "rb") as file:
                left = self._offset
                while left > 0 and (piece := file.read(min(left, 1 << 20))):
                    number += piece.count(b"\n")
                    left -= len(piece)
        return number


def _short(line: str) -> str:
    line = line.rstrip()
    return line if len(line) <= _LONGEST_LINE else line[: _LONGEST_LINE - 3] + "..."


# --------------------------------------------------------------------------------------- completed, going on, cancelled


def _completed(case: _Case) -> Explanation:
    tries = len(case.attempts)
    again = f" in {tries} attempts" if tries > 1 else ""
    note = case.status.extra.get("metrics")
    advice = [f"europa show {case.run.name}"]
    evidence = []
    if isinstance(note, dict) and note.get("incomplete"):
        evidence.append(Evidence("status.json", (f"metrics are incomplete: {note.get('problem')}",)))
    return Explanation(
        Cause.completed, f"it completed{again}", evidence=tuple(evidence), advice=tuple(advice)
    )


def _going_on(case: _Case) -> Explanation:
    title = {
        "running": "it is running",
        "loading": "its job has begun, its ranks have not yet",
    }.get(case.state, "it waits")
    evidence = []
    reason = case.status.extra.get("reason")
    if case.state != "running" and isinstance(reason, str) and reason:
        evidence.append(Evidence("status.json", (reason,)))
    ended = [a for a in case.attempts if a.get("reason")]
    last = None
    if ended:
        evidence.append(_history(ended))
        # While it waits, the error records are still those of the attempt before.
        last = _of_record(case) if case.state in ("queued", "loading") else None
    if case.slurm is not None:
        evidence.append(Evidence("Slurm", (case.slurm.text(),)))
    name = case.run.name
    advice = (f"europa logs {name} -f",) if case.state == "running" else (f"europa status {name} --watch",)
    if last is None:
        return Explanation(Cause.going_on, title, evidence=_bounded(evidence), advice=advice)
    return Explanation(
        Cause.going_on,
        f"{title} to be tried again; the last time: {last.title}",
        rank=last.rank,
        node=last.node,
        evidence=_bounded([*evidence, *last.evidence]),
        advice=advice,
        behind=last.behind,
    )


def _cancelled(case: _Case) -> Explanation | None:
    if case.state != "cancelled":
        return None
    evidence = []
    asked = case.status.extra.get("cancel_asked")
    by = ""
    if isinstance(asked, dict):
        by = f" by {asked.get('by')} (europa cancel)"
        evidence.append(Evidence("status.json", (f"cancelled by {asked.get('by')} at {asked.get('at')}",)))
    elif case.slurm is not None and case.slurm.by:
        by = f" by user id {case.slurm.by} (scancel)"
    launcher = _Text(case.run.launcher_log, case.run.path)
    index = launcher.find(
        re.compile(r"stopping: the launcher was told to|the job is cancelled|SIGTERM; Slurm says")
    )
    if index is not None:
        evidence.append(launcher.evidence(index))
        if not by and "launcher was told to" in launcher.lines[index]:
            by = " at the launcher (Ctrl-C, or a signal to it)"
    evidence += _slurm_lines(case)
    evidence += _in_jobs(case, re.compile(r"\*\*\* (?:JOB|STEP) .* CANCELLED AT"))
    return Explanation(
        Cause.cancelled,
        f"it was cancelled{by}",
        evidence=_bounded(evidence),
        advice=(f"To run it again: python launch.py rerun={case.run.name}",),
    )


def _unreadable(case: _Case) -> Explanation:
    return Explanation(
        Cause.unknown,
        f"its record can't be read: {case.status.reason}",
        sure=False,
        evidence=_bounded(_last_words(case)),
        advice=_where_to_look(case),
    )


# -------------------------------------------------------------------------------------------------- what was recorded


def _of_record(case: _Case) -> Explanation | None:
    """From the run's own word: its error, the reason of the last attempt, the error records of ranks."""
    reason = case.attempts[-1].get("reason") if case.attempts else None
    outside = {
        "time_limit": _time_limit,
        "node_failure": _node_failure,
        "preemption": _preempted,
        "memory_floor": _memory_floor,
    }.get(str(reason))
    if outside is not None and case.state != "lost":
        return outside(case)
    error = case.status.error
    if case.status.state is not State.failed or error is None or error.get("type") in _OF_DRIVER:
        if error is not None and error.get("type") == "StepEnded" and not case.attempts:
            return _no_start(case, error)
        error = _first_error(case)
        if error is None:
            return None
    kind, message = str(error.get("type") or ""), str(error.get("message") or "")
    rank = error.get("rank") if isinstance(error.get("rank"), int) else None
    if kind in _OF_LAUNCHER:
        return _launcher(case, kind, message)
    if kind == "TooManyAttemptsError":
        return Explanation(
            Cause.too_many_attempts,
            f"it was started too often: {message}",
            evidence=_bounded([_history(case.attempts)]),
            advice=(
                "Look at how the earlier attempts ended, and raise cluster.max_attempts if that was bad luck",
            ),
        )
    if kind == "MemoryFloorError":
        return _memory_floor(case)
    # Words of ranks that met the consequence of another's end explain nothing, unless there is nothing else.
    full = case.errors.get(rank, {}) if rank is not None else {}
    said = "\n".join(
        [f"{kind}: {message}", str(error.get("traceback") or ""), str(full.get("traceback") or "")]
    )
    if kind in ("Killed", "Exited", "LostRank") or (rank is None and kind not in symptoms.BAD_CONFIGURATION):
        return _ended_without_words(case, rank, kind, message, said)
    if kind == "NonFiniteLossError":
        return _symptomatic(case, Cause.non_finite_loss, rank, kind, message)
    if kind == "MemoryError":
        return _symptomatic(case, Cause.host_memory, rank, kind, message)
    if kind in symptoms.BAD_CONFIGURATION:
        return _symptomatic(case, Cause.bad_configuration, rank, kind, message)
    symptom = _first_symptom(f"{kind}: {message}") or (_first_symptom(said) if kind in _ECHOES else None)
    if symptom is None:
        return _symptomatic(case, Cause.exception, rank, kind, message)
    if symptom.cause is Cause.collective_timeout:
        return _timeout(case, rank, kind, message)
    if symptom.cause is Cause.lost_rank:
        return _lost_rank(case, rank, kind, message)
    return _symptomatic(case, symptom.cause, rank, kind, message, sure=symptom.sure)


def _first_error(case: _Case) -> dict[str, Any] | None:
    """The error record that explains the others: the earliest that is nobody's echo."""

    def order(record: dict[str, Any]) -> tuple[bool, str, int]:
        echo = _first_symptom(f"{record.get('type')}: {record.get('message')}")
        is_echo = (
            str(record.get("type")) in _ECHOES
            and echo is not None
            and echo.cause in (Cause.lost_rank, Cause.collective_timeout)
        )
        return is_echo, str(record.get("time") or ""), int(record.get("rank") or 0)

    return min(case.errors.values(), key=order, default=None)


def _first_symptom(text: str) -> Symptom | None:
    return next((s for s in symptoms.IN_RANKS if _search(s.pattern, text)), None)


def _search(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    return next((m for line in text.split("\n") if (m := pattern.search(line))), None)


_TITLES = {
    Cause.device_memory: "the accelerator's memory ran out",
    Cause.host_memory: "the host's memory ran out",
    Cause.disk_full: "the disk is full, or a quota is used up",
    Cause.non_finite_loss: "the loss is not finite",
    Cause.bad_configuration: "what was asked for can't be run",
    Cause.exception: "a Python exception",
    Cause.killed: "a rank was killed by a signal",
}


def _symptomatic(
    case: _Case, cause: Cause, rank: int | None, kind: str, message: str, *, sure: bool = True
) -> Explanation:
    """A cause that one rank's error names."""
    first = message.strip().partition("\n")[0]
    what = _in_one_line(f"{kind}: {message}" if kind else message)
    evidence: list[Evidence] = []
    if rank is not None:
        evidence += _error_lines(case, rank, kind, first)
    else:
        trace = str((case.status.error or {}).get("traceback") or "")
        evidence.append(Evidence("status.json", tuple(_short(x) for x in [what, *trace.splitlines()[-4:]])))
    if cause is Cause.non_finite_loss:
        evidence += _last_losses(case)
    return Explanation(
        cause,
        f"{_TITLES[cause]}: {what}" if what else _TITLES[cause],
        sure=sure,
        rank=rank,
        node=case.node(rank),
        evidence=_bounded(evidence),
        advice=_advice(case, cause, rank),
    )


def _in_one_line(text: str) -> str:
    """The first line; with the next one, where the first only announces it."""
    lines = [line.strip() for line in text.strip().split("\n") if line.strip()]
    return _short(" ".join(lines[:2]) if lines and lines[0].endswith(":") else "".join(lines[:1]))


def _error_lines(case: _Case, rank: int, kind: str, first: str) -> list[Evidence]:
    """Where the rank's log says it, with the frames before; without a log, the error record."""
    text = case.text(rank)
    wanted = first[:80].strip() or kind
    index = text.find(re.compile(re.escape(wanted))) if wanted else None
    if index is not None:
        return [text.evidence(index, before=4, after=3)]
    record = case.errors.get(rank)
    if record is not None:
        trace = [line for line in str(record.get("traceback") or "").splitlines() if line.strip()]
        lines = trace[-5:] or [f"{kind}: {first}"]
        return [Evidence(f"logs/rank_{rank}.error.json", tuple(_short(line) for line in lines))]
    return [Evidence("status.json", (_short(f"{kind}: {first}"),))]


def _last_losses(case: _Case) -> list[Evidence]:
    try:
        rows = case.run.metrics()[-3:]
    except Exception:
        return []
    lines = [
        f"step {row.get('step')}: loss {row.get('loss/global_avg')}, grad_norm {row.get('grad_norm')}"
        for row in rows
    ]
    return [Evidence("metrics.jsonl", tuple(lines))] if lines else []


# ------------------------------------------------------------------------------------------------- ends without words


def _ended_without_words(case: _Case, rank: int | None, kind: str, message: str, said: str) -> Explanation:
    """A rank died and could not say why: its signal, what it printed before, and what Slurm and the kernel say."""
    number = _signal_of(case, rank, message)
    evidence: list[Evidence] = []
    if rank is None and kind == "LostRank":
        silent = _silent_ranks(case)
        rank = silent[0] if len(silent) == 1 else None
    name = _signal_name(number) if number else ""
    if rank is not None:
        text = case.text(rank)
        relevant = (
            [s for s in symptoms.IN_RANKS if s.cause is not Cause.lost_rank]
            if number in (None, signal.SIGABRT)
            else [s for s in symptoms.IN_RANKS if s.cause in (Cause.host_memory, Cause.device_memory)]
        )
        for symptom in relevant:
            index = text.find(symptom.pattern)
            if index is None:
                continue
            if symptom.cause is Cause.collective_timeout:
                return _timeout(case, rank, kind, text.lines[index])
            return replace(
                _symptomatic(case, symptom.cause, rank, "", text.lines[index].strip(), sure=symptom.sure),
                evidence=_bounded([text.evidence(index, before=2, after=2)]),
            )
    oom = _in_jobs(case, symptoms.OOM_KILL)
    if case.slurm is not None and (
        case.slurm.state == "OUT_OF_MEMORY" or any(s.state == "OUT_OF_MEMORY" for s in case.slurm.steps)
    ):
        oom += _slurm_lines(case)
    where = f"rank {rank}" if rank is not None else "a rank"
    evidence += [Evidence("status.json", (_short(message),))] if message else []
    if oom and number in (None, signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS):
        return Explanation(
            Cause.host_memory,
            f"the host's memory ran out: {where} was killed" + (f" ({name})" if name else ""),
            rank=rank,
            node=case.node(rank),
            evidence=_bounded([*oom, *evidence]),
            advice=_advice(case, Cause.host_memory, rank),
        )
    if rank is not None:
        text = case.text(rank)
        index = text.find(_CRASH)
        end = text.end() if index is None else text.evidence(index, after=MOST_LINES - 1)
        evidence += [end] if end is not None else []
    evidence += _in_jobs(case, re.compile(r"srun: error: .*task"))
    if number in (signal.SIGSEGV, signal.SIGBUS):
        grace = _is_arm(case)
        memory = _least_memory(case)
        evidence += memory
        if grace:
            return Explanation(
                Cause.host_memory,
                f"{where} crashed with {name}; on a Grace that is how a lack of host memory shows",
                sure=False,
                rank=rank,
                node=case.node(rank),
                evidence=_bounded(evidence),
                advice=_advice(case, Cause.host_memory, rank),
            )
        return Explanation(
            Cause.killed,
            f"{where} crashed in native code ({name})",
            rank=rank,
            node=case.node(rank),
            evidence=_bounded(evidence),
            advice=(
                "The stack in the rank's log shows where; a crash that comes at one step again is a bug, one that moves is "
                "often memory or a node",
            ),
        )
    if number:
        guess = (
            "; somebody killed it, or the kernel did for lack of memory" if number == signal.SIGKILL else ""
        )
        return Explanation(
            Cause.killed,
            f"{where} was killed by signal {number} ({name}){guess}",
            rank=rank,
            node=case.node(rank),
            evidence=_bounded(evidence),
            advice=(
                "`dmesg -T | grep -i 'killed process'` on the node tells whether the kernel did it",
                *_where_to_look(case, rank),
            ),
        )
    if kind == "Exited" or rank is not None:
        code = case.status.exit_codes.get(str(rank)) if rank is not None else None
        how = f" with exit code {code}" if code is not None else ""
        return Explanation(
            Cause.unknown,
            f"{where} ended{how} and left no word of why",
            sure=False,
            rank=rank,
            node=case.node(rank),
            evidence=_bounded(evidence),
            advice=_where_to_look(case, rank),
        )
    return _of_slurm(case) or _unknown(case)


def _signal_of(case: _Case, rank: int | None, message: str) -> int | None:
    """The signal that ended a rank: from its message, or its exit code (negative, or 128 more, as a shell says it)."""
    if found := symptoms.SIGNAL.search(message):
        return int(found[1])
    code = case.status.exit_codes.get(str(rank)) if rank is not None else None
    if code is not None and code < 0:
        return -code
    return code - 128 if code is not None and 128 < code < 128 + 65 else None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _is_arm(case: _Case) -> bool:
    text = json.dumps([case.run.runtime().get("device_name"), case.run.runtime().get("platform")])
    return bool(re.search(r"aarch64|arm64|grace|GH200", text, re.IGNORECASE)) or bool(
        re.search(r"jupiter", str(case.run.provenance().get("cluster")), re.IGNORECASE)
    )


def _least_memory(case: _Case) -> list[Evidence]:
    """What the ranks found free at their start, the least first."""
    rows = []
    start = case.attempts[-1].get("start") if case.attempts else None
    for row in read_lines(case.run.path / "logs" / "host_memory.jsonl"):
        if start is not None and row.get("start") not in (None, start):
            continue
        try:
            rows.append((float(row["free"]) + float(row["reclaimable"]), row))
        except (ValueError, KeyError, TypeError):
            continue
    rows.sort(key=lambda pair: pair[0])
    lines = [
        f"rank {row.get('rank')} on {row.get('node')}: {gib:.1f} GiB free or reclaimable in its socket at the start"
        for gib, row in rows[:3]
    ]
    return [Evidence("logs/host_memory.jsonl", tuple(lines))] if lines else []


# -------------------------------------------------------------------------------------------- collectives and networks


def _timeout(case: _Case, rank: int | None, kind: str, message: str) -> Explanation:
    """A collective timed out: who waited, and who did not come."""
    waited: list[int] = []
    named: set[int] = set()
    enqueued: dict[int, int] = {}
    collective = ""
    joined: tuple[int, int] | None = None
    pattern = next(s.pattern for s in symptoms.IN_RANKS if s.cause is Cause.collective_timeout)
    evidence: list[Evidence] = []
    present = ranks(case.run)
    for r in sorted({*present, *case.errors})[:_MOST_LOGS]:
        text = case.text(r)
        said = "\n".join(text.lines)
        record = case.errors.get(r)
        if record is not None:
            said += f"\n{record.get('message')}"
        if found := _search(pattern, said):
            waited.append(r)
            # The line that names the rank says more than the one below it that repeats how long was waited.
            index = text.find(symptoms.LATE_IN_BARRIER)
            index = text.find(pattern) if index is None else index
            if index is not None and len(evidence) < 3:
                evidence.append(text.evidence(index, after=1))
            elif len(evidence) < 3:
                evidence.append(Evidence(f"logs/rank_{r}.error.json", (_short(found.string),)))
        named |= {int(m) for m in symptoms.LATE_IN_BARRIER.findall(said)}
        for group in symptoms.LAGGING.findall(said):
            named |= {int(number) for number in re.findall(r"\d+", group)}
        if numbers := symptoms.ENQUEUED.findall(said):
            enqueued[r] = int(numbers[-1])
        if found := symptoms.COLLECTIVE.search(said):
            collective = found[2].lower().replace("_", "-").strip("-")
        if found := symptoms.JOINED.search(said):
            joined = (int(found[1]), int(found[2]))
    if not evidence and message:
        evidence.append(Evidence("status.json", (_short(message),)))
    behind, sure = _behind(case, waited, named, enqueued)
    what = f"a collective ({collective})" if collective else "a collective"
    if joined is not None or re.search(r"trying to connect", message):
        what = "the first meeting of the ranks"
    title = f"{what} timed out"
    if joined is not None and not behind:
        title += f": {joined[0]} of {joined[1]} ranks came"
    if behind:
        title += f": rank{'s' if len(behind) > 1 else ''} {spans(behind)} did not arrive"
        if waited:
            title += f", rank{'s' if len(waited) > 1 else ''} {spans(waited)} waited"
    for r in behind[:2]:
        if (end := case.text(r).end(4)) is not None:
            evidence.append(end)
    first = behind[0] if behind else rank
    advice = [
        f"europa logs {case.run.name} --rank {first}: what it did instead"
        if behind
        else "No rank could be named; compare where the logs of the ranks end",
        "Nodes that are in this again and again belong into cluster.exclude",
    ]
    return Explanation(
        Cause.collective_timeout,
        title,
        sure=sure or not behind,
        rank=first,
        node=case.node(first),
        evidence=_bounded(evidence),
        advice=tuple(advice),
        behind=tuple(behind),
    )


def _behind(
    case: _Case, waited: Sequence[int], named: set[int], enqueued: dict[int, int]
) -> tuple[list[int], bool]:
    """The ranks that did not arrive, and whether that is certain: named by PyTorch, behind in their count of collectives, or
    the only ones that did not complain."""
    if named:
        return sorted(named), True
    if enqueued and len(set(enqueued.values())) > 1:
        furthest = max(enqueued.values())
        return sorted(r for r, n in enqueued.items() if n < furthest), True
    if case.world is None or not waited:
        return [], False
    absent = [r for r in range(case.world) if r not in waited]
    # Ranks that met the end of the others (a closed connection) were there in time, perhaps in another collective.
    closed = {
        r
        for r in absent
        if (record := case.errors.get(r))
        and (s := _first_symptom(str(record.get("message"))))
        and s.cause is Cause.lost_rank
    }
    return ([r for r in absent if r not in closed] or absent), len(absent) - len(closed) == 1


def _lost_rank(case: _Case, rank: int | None, kind: str, message: str) -> Explanation:
    """Connections broke, and nobody recorded why: look for the rank that left nothing, and what Slurm says."""
    from_slurm = _of_slurm(case)
    if from_slurm is not None and from_slurm.cause not in (Cause.unknown, Cause.killed):
        return from_slurm
    silent = _silent_ranks(case)
    evidence: list[Evidence] = []
    if rank is not None:
        evidence += _error_lines(case, rank, kind, message.strip().partition("\n")[0])
    evidence += _in_jobs(case, re.compile(r"srun: error: .*task"))
    for r in silent[:2]:
        if (end := case.text(r).end(4)) is not None:
            evidence.append(end)
    who = f"rank{'s' if len(silent) > 1 else ''} {spans(silent)}" if silent else "another rank"
    first = silent[0] if silent else rank
    return Explanation(
        Cause.lost_rank,
        f"the connection to {who} broke, and {'it' if len(silent) < 2 else 'they'} left no word of why",
        sure=len(silent) == 1,
        rank=first,
        node=case.node(first),
        evidence=_bounded(evidence),
        advice=_where_to_look(case, first),
    )


def _silent_ranks(case: _Case) -> list[int]:
    """Ranks that left no error record while others did."""
    if case.world is None or not case.errors:
        return []
    return [r for r in range(case.world) if r not in case.errors and case.status.exit_codes.get(str(r)) != 0]


# --------------------------------------------------------------------------------------------------------------- Slurm


def _of_slurm(case: _Case) -> Explanation | None:
    """From Slurm's record of the job and what its daemons wrote into the job's output."""
    state = case.slurm.state if case.slurm is not None else ""
    by_state = {
        "TIMEOUT": _time_limit,
        "DEADLINE": _time_limit,
        "NODE_FAIL": _node_failure,
        "BOOT_FAIL": _node_failure,
        "PREEMPTED": _preempted,
    }.get(state)
    if by_state is not None:
        return by_state(case)
    if state == "OUT_OF_MEMORY":
        return Explanation(
            Cause.host_memory,
            "the host's memory ran out: Slurm's limit of the job was reached",
            evidence=_bounded([*_slurm_lines(case), *_in_jobs(case, symptoms.OOM_KILL)]),
            advice=_advice(case, Cause.host_memory, None),
        )
    for symptom in symptoms.IN_JOBS:
        found = _in_jobs(case, symptom.pattern)
        if not found:
            continue
        by_words = {
            Cause.time_limit: _time_limit,
            Cause.node_failure: _node_failure,
            Cause.preempted: _preempted,
        }.get(symptom.cause)
        if by_words is not None:
            return by_words(case)
        task = re.search(r"tasks? (\d+)(?=[:,\-])", found[0].lines[-1])
        rank = int(task[1]) if task else None
        return Explanation(
            symptom.cause,
            f"{_TITLES[symptom.cause]}: {found[0].lines[-1].strip()}",
            rank=rank,
            node=case.node(rank),
            evidence=_bounded([*found, *_slurm_lines(case)]),
            advice=_advice(case, symptom.cause, rank) or _where_to_look(case, rank),
        )
    return None


def _time_limit(case: _Case) -> Explanation:
    advice = [
        "Raise cluster.time_limit, or let the run go on by itself: cluster.requeue=true, cluster.max_attempts, and a"
        " cluster.signal_margin_s that is long enough for a checkpoint"
    ]
    if checkpoints.newest(case.run.checkpoints) is None:
        advice.append("It has no checkpoint, so nothing of it can be continued: training.checkpoint_every=N")
    return Explanation(
        Cause.time_limit,
        "Slurm's time limit was reached",
        evidence=_bounded(
            [*_recorded(case), *_slurm_lines(case), *_in_jobs(case, re.compile("DUE TO TIME LIMIT"))]
        ),
        advice=tuple(advice),
    )


def _node_failure(case: _Case) -> Explanation:
    found = _in_jobs(case, re.compile(r"NODE FAILURE|Node failure on|has failed", re.IGNORECASE))
    node = None
    for entry in found:
        if match := re.search(r"Node failure on (\S+)|[Nn]ode (\S+) has failed", entry.lines[-1]):
            node = (match[1] or match[2]).rstrip(",.")
    listed = ", ".join(case.nodes[:4]) + (", ..." if len(case.nodes) > 4 else "")
    return Explanation(
        Cause.node_failure,
        f"a node failed: {node}" if node else f"a node failed{f', one of {listed}' if listed else ''}",
        node=node,
        evidence=_bounded([*_recorded(case), *_slurm_lines(case), *found]),
        advice=(
            "The run is not to blame. `sinfo -R` names nodes that are down, and why; run it again, without that node "
            "(cluster.exclude) if it comes back bad",
        ),
    )


def _preempted(case: _Case) -> Explanation:
    return Explanation(
        Cause.preempted,
        "Slurm took its nodes for a more important job",
        evidence=_bounded(
            [*_recorded(case), *_slurm_lines(case), *_in_jobs(case, re.compile("DUE TO PREEMPTION"))]
        ),
        advice=("cluster.requeue=true and cluster.max_attempts let a run go on after that",),
    )


def _memory_floor(case: _Case) -> Explanation:
    records = {rank: r for rank, r in case.errors.items() if r.get("type") == "MemoryFloorError"}
    nodes = sorted({str(r.get("node")) for r in records.values() if r.get("node")})
    rank = next(iter(records), None)
    lines = [_short(str(r.get("message")).partition("\n")[0]) for r in records.values()][:4]
    evidence = [Evidence("logs/rank_*.error.json", tuple(lines))] if lines else _recorded(case)
    return Explanation(
        Cause.memory_floor,
        "less host memory was free than cluster.memory_floor_gib"
        + (f" on {', '.join(nodes)}" if nodes else ""),
        rank=rank,
        node=case.node(rank),
        evidence=_bounded([*evidence, *_least_memory(case)]),
        advice=("The nodes are left out of this sweep's next jobs; tell the site, they need a reboot",),
    )


def _launcher(case: _Case, kind: str, message: str) -> Explanation:
    evidence = [Evidence("status.json", (_short(message),))]
    if (end := _Text(case.run.launcher_log, case.run.path).end(4)) is not None:
        evidence.append(end)
    what = "the process that ran it was killed" if kind == "AgentKilled" else "its ranks could not be started"
    return Explanation(
        Cause.launcher,
        f"{what}: {message}",
        evidence=_bounded(evidence),
        advice=(
            "If nobody killed it, the machine ran out of memory: `dmesg -T | grep -i 'killed process'`"
            if kind == "AgentKilled"
            else f"europa logs {case.run.name} --launcher",
        ),
    )


def _no_start(case: _Case, error: dict[str, Any]) -> Explanation:
    """A step of an allocation ended before its ranks began."""
    message = str(error.get("message") or "")
    words = str(error.get("traceback") or "").splitlines()[-MOST_LINES + 1 :]
    return Explanation(
        Cause.launcher,
        _short(message),
        evidence=_bounded([Evidence("status.json", tuple(_short(line) for line in [message, *words]))]),
        advice=(
            "If the allocation lacks what the run asks for, take another one; then run it again: "
            f"python launch.py rerun={case.run.name}",
        ),
    )


def _of_exit_codes(case: _Case) -> Explanation | None:
    bad = {int(r): code for r, code in case.status.exit_codes.items() if code != 0 and r.isdigit()}
    if not bad:
        return None
    rank = min(bad)
    return _ended_without_words(case, rank, "Exited", f"rank {rank} ended with exit code {bad[rank]}", "")


def _unknown(case: _Case) -> Explanation:
    if case.state == "lost" and case.slurm is not None and case.slurm.state == "COMPLETED":
        title = f"job {case.slurm.job_id} ended as a success, but the run recorded no end"
    elif case.state == "lost" and case.slurm is None:
        if case.status.pid is not None:
            title = f"process {case.status.pid} on {case.status.host}, which ran it, is gone without a word"
        elif case.status.extra.get("job_id"):
            title = (
                f"job {case.status.extra['job_id']} is gone, and neither the run nor Slurm says how it ended"
            )
        else:
            return Explanation(
                Cause.not_started,
                "it was never started: the call that made it broke off",
                evidence=_bounded(_recorded(case)),
                advice=("Type the same call again; it completes what is missing and doubles nothing",),
            )
    else:
        title = "why it ended is not known"
    return Explanation(
        Cause.unknown,
        title,
        sure=False,
        evidence=_bounded([*_recorded(case), *_slurm_lines(case), *_last_words(case)]),
        advice=_where_to_look(case),
    )


def _too_many(case: _Case, found: Explanation) -> Explanation:
    """The last attempt's cause is not all, where the run had several."""
    reason = str(case.status.extra.get("reason") or "")
    limit = re.search(r"this was attempt (\d+) of (\d+)", reason)
    twice = re.search(r"again, with the same error as attempt \d+", reason)
    if case.state != "failed" or len(case.attempts) < 2 or found.cause is Cause.too_many_attempts:
        return found
    if not (limit and int(limit[2]) > 1) and not twice:
        return replace(
            found, evidence=_bounded([*found.evidence[: MOST_PLACES - 1], _history(case.attempts)])
        )
    how = "it ended twice in the same way" if twice else f"it had its {limit[2] if limit else ''} attempts"
    advice = (
        "The same end at the same step is no bad luck: cure the cause, then run it again"
        if twice
        else "cluster.max_attempts bounds how often it is tried",
        *found.advice,
    )
    return replace(
        found,
        cause=Cause.too_many_attempts,
        title=f"requeued too often: {how}; the last time {found.title}",
        evidence=_bounded([_history(case.attempts), *found.evidence]),
        advice=advice,
    )


# ------------------------------------------------------------------------------------------------------------- evidence


def _history(tries: Sequence[dict[str, Any]]) -> Evidence:
    lines = []
    for attempt in tries[-MOST_LINES:]:
        step = "before its first step" if attempt.get("step") is None else f"at step {attempt['step']}"
        error = attempt.get("error")
        more = ""
        if isinstance(error, dict):
            more = f": {error.get('type')}: {str(error.get('message') or '').partition(chr(10))[0]}"
        how = attempt.get("reason") or "no end recorded"
        lines.append(_short(f"attempt {attempt.get('n')}, job {attempt.get('job_id')}: {how} {step}{more}"))
    return Evidence("status.json", tuple(lines))


def _recorded(case: _Case) -> list[Evidence]:
    lines = [str(case.status.extra["reason"])] if isinstance(case.status.extra.get("reason"), str) else []
    if case.status.error:
        error = case.status.error
        lines.append(f"{error.get('type')}: {str(error.get('message') or '').partition(chr(10))[0]}")
    lines = list(dict.fromkeys(_short(line) for line in lines if line))
    return [Evidence("status.json", tuple(lines))] if lines else []


def _slurm_lines(case: _Case) -> list[Evidence]:
    if case.slurm is None:
        return []
    job = case.slurm
    code = "" if job.exit_code is None else f", exit code {job.exit_code}:{job.signal or 0}"
    nodes = f" on {job.nodes}" if job.nodes else ""
    lines = [f"job {job.job_id}: {job.text()}{code}{nodes}"]
    lines += [
        f"step {step.name}: {step.state}, exit code {step.exit_code}:{step.signal} on {step.nodes}"
        for step in job.steps
        if step.state not in ("COMPLETED", "RUNNING")
    ][:4]
    lines += [
        f"before: {e.state}{f' on {e.nodes}' if e.nodes else ''}, ended {e.ended_at}"
        for e in job.earlier[-3:]
    ]
    return [Evidence("Slurm", tuple(_short(line) for line in lines))]


def _in_jobs(case: _Case, pattern: re.Pattern[str]) -> list[Evidence]:
    """Where the output of the job has such a line about the last attempt; one line a file, the last jobs' files first."""
    found = []
    for path in list(reversed(case.job_logs))[:_MOST_LOGS]:
        text = _Text(path, case.run.path.parent)
        for index in range(len(text.lines) - 1, -1, -1):
            line = text.lines[index]
            # A requeued job goes on in the same file: what is above this line was about an earlier attempt.
            if "DUE TO JOB REQUEUE" in line and not pattern.search("DUE TO JOB REQUEUE"):
                break
            if pattern.search(line) and not _is_before(case, line):
                found.append(text.evidence(index))
                break
        if len(found) == 3:
            break
    return found


def _is_before(case: _Case, line: str) -> bool:
    """Whether Slurm wrote a line with a time (local, without a zone) before the last attempt began."""
    stamp = re.search(r"CANCELLED AT (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)", line)
    began = case.attempts[-1].get("started_at") if case.attempts else None
    if stamp is None or not isinstance(began, str):
        return False
    try:
        return datetime.fromisoformat(stamp[1]).timestamp() < datetime.fromisoformat(began).timestamp() - 1
    except ValueError:
        return False


def _last_words(case: _Case) -> list[Evidence]:
    launcher = _Text(case.run.launcher_log, case.run.path).end(4)
    rank = case.text(0).end(4)
    return [entry for entry in (launcher, rank) if entry is not None]


def _bounded(evidence: Iterable[Evidence]) -> tuple[Evidence, ...]:
    """Each place once, and not more than fit on a screen."""
    found = {
        (entry.place, entry.lines): replace(entry, lines=entry.lines[:MOST_LINES])
        for entry in evidence
        if entry.lines
    }
    return tuple(found.values())[:MOST_PLACES]


# --------------------------------------------------------------------------------------------------------------- advice


def _advice(case: _Case, cause: Cause, rank: int | None) -> tuple[str, ...]:
    name = case.run.name
    if cause is Cause.device_memory:
        return (
            "Less per accelerator: a smaller training.local_batch_size or training.seq_len, more recomputation, more ranks to "
            "shard over, or offload",
            "If much is reserved but not allocated: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in cluster.env",
        )
    if cause is Cause.host_memory:
        found = [
            "Fewer offloaded or pinned bytes on the host, or a cluster.memory_floor_gib that avoids nodes with too little"
        ]
        if (case.run.path / "logs" / "host_memory.jsonl").exists():
            found.append(f"{name}/logs/host_memory.jsonl has what each rank found free at its start")
        return tuple(found)
    if cause is Cause.disk_full:
        return (
            "Free some space, or choose another place: launch.runs_dir. JSC: `jutil project dataquota -p PROJECT` (inodes, too)",
            "Fewer checkpoints: training.checkpoint_keep; or another place for them: cluster.checkpoint_dir",
        )
    if cause is Cause.non_finite_loss:
        return (
            f"europa show {name}: when loss and gradient norm began to move; a lower learning rate, a longer warm-up, or "
            "clipping. It is not tried again by itself",
        )
    if cause is Cause.bad_configuration:
        return (f"Change what the message names and run it again: python launch.py rerun={name} FIELD=VALUE",)
    if cause is Cause.exception:
        which = "" if not rank else f" --rank {rank}"
        return (f"europa logs {name}{which} has the whole traceback. It is not tried again by itself",)
    return ()


def _where_to_look(case: _Case, rank: int | None = None) -> tuple[str, ...]:
    name = case.run.name
    which = f" --rank {rank}" if rank else ""
    found = [f"Look at: europa logs {name}{which}; europa logs {name} --launcher"]
    if job := case.status.extra.get("job_id"):
        node = case.node(rank)
        on = f"; dmesg and slurmd's log on {node}" if node else ""
        found.append(f"sacct -j {job} -o JobID,State,ExitCode,NodeList,Reason{on}")
    return tuple(found)
