"""Stopping runs on request: through scancel, or through the agent that runs them on this machine."""

from __future__ import annotations

import contextlib
import getpass
import time
from collections.abc import Sequence
from dataclasses import dataclass

from europa_exp.launch import squeue
from europa_exp.launch.agents import AgentRecord, agents, cancel_file
from europa_exp.launch.attend_slurm import close
from europa_exp.launch.slurm_runs import JOB_IDS, OPEN, jobs_of, unknown_jobs
from europa_exp.launch.standing import LOST, Standing, on_slurm, survey
from europa_exp.runs.folder import RunFolder
from europa_exp.runs.lookup import entries
from europa_exp.runs.slurm_record import Answer
from europa_exp.runs.status import State, now

STOP_S = 15.0
"""Longest wait for ranks on this machine to end: they get 5 s to go by themselves, and 5 s more to be killed."""

_VERIFY_S = 5.0
_OVER_SOON = frozenset({"COMPLETING", "SIGNALING", "STAGE_OUT"})


@dataclass(frozen=True)
class Done:
    """What was done about one run. ``ok`` is False if it may go on all the same; ``what`` is a phrase for people."""

    run: RunFolder
    ok: bool
    what: str


def cancel(runs: Sequence[RunFolder]) -> list[Done]:
    """Cancel the runs that are not over, and mark them ``cancelled``; the others are left as they are. In their order.

    A job that does several runs is cancelled when all of its open runs are to be; else runs that wait in it are marked, and
    its workers pass them over.
    """
    found = {s.run: s for s in survey(runs).standings}
    done: dict[RunFolder, Done] = {}
    slurm: list[Standing] = []
    local: list[Standing] = []
    for run, standing in found.items():
        status = standing.status
        if status.ended or (status.state is State.unknown and not jobs_of(run, status)):
            word = standing.note if status.state is State.unknown else f"it is {status.state} already"
            done[run] = Done(run, True, f"nothing to cancel: {word}")
        elif on_slurm(status) or status.state is State.unknown:
            slurm.append(standing)
        else:
            local.append(standing)
    for entry in (*_cancel_jobs(slurm), *_cancel_local(local)):
        done[entry.run] = entry
    return [done[run] for run in found]


# -------------------------------------------------------------------------------------------------------------- Slurm


def _cancel_jobs(standings: Sequence[Standing]) -> list[Done]:
    jobs = {s.run: list(jobs_of(s.run, s.status)) for s in standings}
    others = _other_runs(standings, {i for ids in jobs.values() for i in ids})
    done: list[Done] = []
    to_end: list[Standing] = []
    for s in standings:
        shared = {name for i in jobs[s.run] for name in others.get(i, ())}
        odd = unknown_jobs(s.status)
        if odd and not jobs[s.run]:
            done.append(
                Done(s.run, False, f"not cancelled: its record names the unknown job {', '.join(odd)}")
            )
        elif not jobs[s.run]:
            done.append(_mark(s.run, "it was never handed to Slurm; marked cancelled"))
        elif not shared or (s.over and s.status.state is not State.unknown):
            to_end.append(s)
        elif s.status.state in (State.running, State.unknown):
            names = ", ".join(sorted(shared)[:3])
            what = f"not cancelled: it runs in job {s.job_id}, which has more to do ({names}); cancel those as well"
            done.append(Done(s.run, False, what))
        else:
            done.append(_mark(s.run, f"marked cancelled; job {s.job_id} will pass it over"))
    if not to_end:
        return done
    # Newest first: a job that waits for another to end must not begin in between.
    ids = sorted({i for s in to_end for i in jobs[s.run]}, key=_number, reverse=True)
    for s in to_end:
        _ask_note(s.run)
    refused = squeue.run(["scancel", *ids])
    answer = _after(ids)
    for s in to_end:
        left = [
            i
            for i in jobs[s.run]
            if (state := answer.jobs.get(i)) and not (state.ended or state.state in _OVER_SOON)
        ]
        names = ", ".join(jobs[s.run])
        if left and isinstance(refused, squeue.Refused):
            done.append(Done(s.run, False, f"job {names} can't be cancelled: {refused.about(jobs[s.run])}"))
        elif left:
            done.append(Done(s.run, False, f"scancel was asked, but Slurm still lists job {', '.join(left)}"))
        elif not answer.known and isinstance(refused, squeue.Refused):
            done.append(Done(s.run, False, f"job {names} can't be cancelled: {refused.about(jobs[s.run])}"))
        elif s.state == LOST:
            done.append(_mark(s.run, f"job {names} was gone already; marked cancelled"))
        elif s.state == "failed":
            close(s)
            done.append(
                Done(s.run, True, f"nothing to cancel: job {names} has ended ({s.note}); recorded as failed")
            )
        else:
            odd = "".join(
                f"; its record also names the unknown job {text}" for text in unknown_jobs(s.status)
            )
            done.append(_mark(s.run, f"job {names} cancelled{odd}", also_failed=True))
    return done


def _number(job: str) -> tuple[int, int]:
    """``123_4`` as 123 and 4, which sort as they were submitted."""
    number, _, task = job.partition("_")
    return int(number), int(task or 0)


def _other_runs(standings: Sequence[Standing], ids: set[str]) -> dict[str, list[str]]:
    """Job -> names of open runs in it that are not among ``standings``."""
    mine = {s.run for s in standings}
    found: dict[str, list[str]] = {}
    for place in {run.path.parent for run in mine}:
        for entry in entries(place):
            if entry.run in mine or entry.status.state not in OPEN or not on_slurm(entry.status):
                continue
            for i in jobs_of(entry.run, entry.status):
                if i in ids:
                    found.setdefault(i, []).append(entry.name)
    return found


def _after(ids: Sequence[str]) -> Answer:
    """What Slurm says once scancel had its effect, or after some seconds."""
    end = time.monotonic() + _VERIFY_S
    while True:
        answer = squeue.ask(ids)
        going_on = [s for s in answer.jobs.values() if not (s.ended or s.state in _OVER_SOON)]
        if not going_on or time.monotonic() > end:
            return answer
        time.sleep(0.3)


# --------------------------------------------------------------------------------------------------------- this machine


def _cancel_local(standings: Sequence[Standing]) -> list[Done]:
    known: dict[str, AgentRecord] = {}
    for place in {s.run.path.parent for s in standings}:
        known.update(agents(place))
    done: list[Done] = []
    asked: list[Standing] = []
    for s in standings:
        agent = known.get(str(s.run.path))
        if s.state == LOST or (agent is not None and not agent.alive):
            done.append(_mark(s.run, "its process is gone already; marked cancelled"))
            continue
        _ask_note(s.run)
        if agent is None and s.status.state is not State.running:
            # No agent has it yet; one that comes later leaves runs alone that don't wait.
            done.append(_mark(s.run, "marked cancelled before it began"))
            continue
        try:
            cancel_file(s.run).touch()
        except OSError as error:
            done.append(Done(s.run, False, f"not cancelled: {error}"))
            continue
        if s.status.state is not State.running and not s.run.launcher_log.exists():
            done.append(
                _mark(s.run, "marked cancelled before it began", only_from=(State.created, State.queued))
            )
        else:
            asked.append(s)
    end = time.monotonic() + STOP_S
    while any(not s.run.status().ended for s in asked) and time.monotonic() < end:
        time.sleep(0.1)
    for s in asked:
        status = s.run.status()
        agent = known.get(str(s.run.path))
        if status.state is State.cancelled:
            done.append(
                Done(s.run, True, f"stopped: the ranks on {status.host or 'this machine'} have ended")
            )
        elif status.ended:
            done.append(Done(s.run, True, f"nothing to cancel any more: it has just {_became(status.state)}"))
        else:
            pid = agent.pid if agent else status.pid
            host = agent.host if agent else status.host
            what = f"process {pid} on {host} was asked to stop it and has not; `kill {pid}` there stops all of its runs"
            done.append(Done(s.run, False, what))
    return done


def _became(state: State) -> str:
    return {"completed": "completed", "failed": "failed"}.get(str(state), f"become {state}")


# -------------------------------------------------------------------------------------------------------------- records


def _ask_note(run: RunFolder) -> None:
    """Who asked, before anything happens: whoever records the end of the ranks can tell a cancellation from a failure."""
    with contextlib.suppress(OSError, KeyError):
        run.note(cancel_asked={"by": getpass.getuser(), "at": now()})


def _mark(
    run: RunFolder,
    what: str,
    *,
    also_failed: bool = False,
    only_from: tuple[State, ...] = OPEN,
) -> Done:
    """Record the end. ``also_failed``: ranks that die of the cancellation may have called it a failure a moment ago."""
    allowed = (*only_from, State.failed) if also_failed else only_from
    status = run.status()
    try:
        if status.state is State.unknown:  # a broken record: what is known of the job is kept in the new one
            run.set_state(State.cancelled, error=None, **{JOB_IDS: jobs_of(run, status)})
            return Done(run, True, what)
        if run.set_state(State.cancelled, only_from=allowed, error=None):
            return Done(run, True, what)
    except OSError as error:
        return Done(run, False, f"{what}, but that can't be recorded: {error}")
    state = run.status().state
    return Done(run, True, what if state is State.cancelled else f"{what}, but it has just {_became(state)}")
