"""Asking Slurm about jobs: squeue first, sacct for what squeue does not know. Each may be absent, off, late, or hang.

Nothing here raises: what could not be asked is named in ``Answer.silent``, because "Slurm does not know the job" and
"Slurm did not answer" lead to different conclusions about a run.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import replace

from europa_exp.runs.slurm_record import ENDED, Answer, SlurmState, Step, job_ids

TIMEOUT_S = 10.0
"""Longest wait for one command. A busy controller takes seconds; one that is down lets squeue try for minutes."""

# %r is a free text in principle, so it comes last.
_SQUEUE = ("%i", "%T", "%N", "%S", "%e", "%r")
_SACCT = ("JobID", "State", "ExitCode", "NodeList", "Start", "End", "Reason")
_LONGEST = 300
"""Characters of a message that are passed on."""
_NOTHING = {"", "None", "N/A", "NONE", "Unknown", "(null)", "None assigned"}
# Both commands read defaults from these; a person's own format must not become ours.
_PERSONAL = re.compile(r"(SQUEUE|SACCT)_\w+|SLURM_(TIME_FORMAT|CLUSTERS|BITSTR_LEN)")


def jobs(ids: Iterable[str]) -> dict[str, SlurmState]:
    """What Slurm knows of these jobs (``123``, ``123_4``); those that it does not know, or can't tell of, are left out."""
    return ask(ids).jobs


def ask(ids: Iterable[str], *, steps: bool = False, timeout: float = TIMEOUT_S) -> Answer:
    """One call of squeue for all ``ids``, and one of sacct if some are not there. With ``steps``, sacct is always asked:
    it alone knows steps, exit codes and what the job was before a requeue."""
    wanted = list(dict.fromkeys(i for text in ids for i in job_ids(text)))
    if not wanted:
        return Answer(known=True)
    silent: list[str] = []
    queue = _squeue(wanted, timeout)
    if isinstance(queue, str):
        silent.append(queue)
        queue, known = {}, False
    else:
        known = True
    found = {i: queue[i] for i in wanted if i in queue}
    missing = wanted if steps else [i for i in wanted if i not in found]
    accounts: dict[str, SlurmState] = {}
    if missing:
        answer = _sacct(missing, timeout)
        if isinstance(answer, str):
            silent.append(answer)
        else:
            accounts = answer
        for i in missing:
            if i in accounts:
                found[i] = _both(found[i], accounts[i]) if i in found else accounts[i]
    for i in wanted:
        # Tasks of an array that was cancelled before they began have no records of their own, only one under its plain number.
        whole = i.partition("_")[0]
        state = queue.get(whole) or accounts.get(whole)
        if i not in found and state is not None and state.ended:
            found[i] = replace(state, job_id=i)
    return Answer(found, tuple(silent), known)


def _both(queue: SlurmState, accounts: SlurmState) -> SlurmState:
    """squeue's word, with what only the accounting knows. A job that was requeued and waits has no record of its own yet."""
    same = accounts.started == queue.started or (queue.ended and accounts.ended)
    earlier = accounts.earlier if same else (*accounts.earlier, replace(accounts, earlier=()))
    if not same:
        return replace(queue, earlier=earlier)
    return replace(
        queue,
        steps=accounts.steps,
        earlier=earlier,
        exit_code=accounts.exit_code if queue.ended else None,
        signal=accounts.signal if queue.ended else None,
        by=accounts.by,
    )


def _squeue(ids: Sequence[str], timeout: float) -> dict[str, SlurmState] | str:
    command = ["squeue", "--noheader", "--array", "--states=all", f"--jobs={_whole(ids)}"]
    output = run([*command, f"--format={'|'.join(_SQUEUE)}"], timeout)
    if isinstance(output, Refused):
        # Asked for one job that it has forgotten, squeue calls that an error; for several it leaves them out.
        return {} if "nvalid job id" in output.text else f"squeue: {output.text}"
    found: dict[str, SlurmState] = {}
    for line in output.splitlines():
        parts = line.split("|", len(_SQUEUE) - 1)
        if len(parts) < len(_SQUEUE):
            continue
        text, state, nodes, started, ended, reason = (part.strip() for part in parts)
        for i in job_ids(text):
            over = state in ENDED
            found[i] = SlurmState(
                job_id=i,
                state=state,
                source="squeue",
                reason=_some(reason),
                nodes=_some(nodes),
                started=_some(started),
                ended_at=_some(ended) if over else "",  # of a running job it is when its time runs out
            )
    return found


def _sacct(ids: Sequence[str], timeout: float) -> dict[str, SlurmState] | str:
    command = ["sacct", "--noheader", "--parsable2", "--duplicates", f"--jobs={_whole(ids)}"]
    output = run([*command, f"--format={','.join(_SACCT)}"], timeout)
    if isinstance(output, Refused):
        return f"sacct: {output.text}"
    records: dict[str, list[SlurmState]] = {}
    for line in output.splitlines():
        parts = line.split("|", len(_SACCT) - 1)
        if len(parts) < len(_SACCT):
            continue
        text, words, code, nodes, started, ended, reason = (part.strip() for part in parts)
        state, _, rest = words.partition(" ")
        exit_code, number = _codes(code)
        job, dot, name = text.partition(".")
        if dot:
            if records.get(job):
                last = records[job][-1]
                step = Step(name, state, exit_code, number, _some(nodes))
                records[job][-1] = replace(last, steps=(*last.steps, step))
            continue
        named = job_ids(job)
        for i in named:
            if named != [job] and i in records:
                continue  # the list of tasks that wait can lag behind the record of one that has begun
            over = state in ENDED
            record = SlurmState(
                job_id=i,
                state=state,
                source="sacct",
                reason="" if over else _some(reason),  # why it waited, once
                nodes=_some(nodes),
                exit_code=exit_code if over else None,
                signal=number if over else None,
                started=_some(started),
                ended_at=_some(ended),
                by=rest.removeprefix("by ").strip() if rest.startswith("by ") else "",
            )
            records.setdefault(i, []).append(record)
    return {i: replace(found[-1], earlier=tuple(found[:-1])) for i, found in records.items()}


class Refused:
    """A command that gave no answer; ``text`` says why, in one line. ``lines`` is all that it said."""

    def __init__(self, text: str, lines: Sequence[str] = ()) -> None:
        self.text = text
        self._lines = lines

    def about(self, ids: Iterable[str]) -> str:
        """What it said of these jobs, else the last word on all of them."""
        named = re.compile("|".join(rf"(?<![\w.]){re.escape(i)}(?![\w.])" for i in ids))
        return next((line for line in reversed(self._lines) if named.search(line)), self.text)[:_LONGEST]


def run(command: list[str], timeout: float = TIMEOUT_S) -> str | Refused:
    """What one of Slurm's commands prints; Refused when there is none, it fails, or time is up. Never raises."""
    if shutil.which(command[0]) is None:
        return Refused("there is no such command here")
    environ = {k: v for k, v in os.environ.items() if not _PERSONAL.fullmatch(k)}
    try:
        process = subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            # A wrapper script may leave children that keep the pipe open: all of them must go when time is up.
            start_new_session=True,
        )
    except OSError as error:
        return Refused(f"it can't be started ({error.strerror or error})")
    with process:
        try:
            output, complaint = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return Refused(f"no answer in {timeout:g} s")
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        lines = [line.strip() for line in complaint.splitlines() if line.strip()]
        last = lines[-1] if lines else f"it ended with exit code {process.returncode}"
        return Refused(last[:_LONGEST], lines)
    return output


def _whole(ids: Sequence[str]) -> str:
    """The ids for a command line: one for a whole array, however many of its tasks are wanted."""
    return ",".join(dict.fromkeys(i.partition("_")[0] for i in ids))


def _codes(text: str) -> tuple[int, int]:
    code, _, number = text.partition(":")
    return (int(code) if code.isdigit() else 0), (int(number) if number.isdigit() else 0)


def _some(text: str) -> str:
    return "" if text in _NOTHING else text
