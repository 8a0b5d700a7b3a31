"""What of a call is with Slurm already: living runs are left alone, dead ones are submitted again or buried."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from europa_exp.config import schema
from europa_exp.launch import slurm_runs
from europa_exp.launch.slurm_runs import Life, OpenRun
from europa_exp.runs.folder import RunFolder, RunFolderError
from europa_exp.runs.slurm_record import CANCELLED
from europa_exp.runs.status import State

if TYPE_CHECKING:
    from europa_exp.launch.points import Point
    from europa_exp.launch.sweep_record import Record
    from europa_exp.runs.provenance import CodeState

Todo = Sequence[tuple["Point", "str | None"]]
"""Points that are to run, each with the fingerprint of its data."""


@dataclass
class Sorted:
    """The points of a call: ``already`` with Slurm, to be submitted ``again`` in their folder, ``fresh`` ones."""

    already: list[tuple[Point, RunFolder]] = field(default_factory=list)
    again: list[tuple[Point, OpenRun]] = field(default_factory=list)
    fresh: list[tuple[Point, str | None]] = field(default_factory=list)


def sort_out(
    todo: Todo,
    launch: schema.Launch,
    sweep: str | None,
    key: str,
    record: Record | None,
    runs_dir: Path,
    code: CodeState,
) -> Sorted:
    """Hold the points against the run folders, and those against Slurm; says what it finds.

    Raises RunFolderError when Slurm does not answer.
    """
    out = Sorted()
    open_runs = slurm_runs.open_runs(runs_dir, {slurm_runs.key_of(p, f) for p, f in todo})
    unclear = [o for o in open_runs if o.life is Life.unclear]
    if unclear:
        raise RunFolderError(
            f"Slurm does not answer ({unclear[0].word}), so it can't be told whether {unclear[0].run.name}"
            f"{f' and {len(unclear) - 1} more' if len(unclear) > 1 else ''} still run; nothing was submitted. Try again later"
        )
    broke_off = record is not None and key in record.unfinished
    for point, fingerprint in todo:
        mine = [o for o in open_runs if o.key == slurm_runs.key_of(point, fingerprint)]
        if launch.force or point.force:
            # Asked for once more; but a call that broke off asked for it once, not twice.
            mine = [o for o in mine if o.life is Life.dead or (broke_off and o.sweep == sweep)]
        live = next((o for o in mine if o.life is Life.live), None)
        dead = next((o for o in mine if _can_go_on(o, point, sweep, code)), None)
        if live is not None:
            open_runs.remove(live)
            out.already.append((point, live.run))
            other = ", with other code (launch.force=true submits it again)"
            print(
                f"already submitted: {live.run.name}, job {live.job}, {live.word}"
                + (other if live.code != code.fingerprint else "")
            )
        elif dead is not None:
            open_runs.remove(dead)
            out.again.append((point, dead))
            print(f"submitted again: {dead.run.name}, {dead.status.state}, but {epitaph(dead)}")
        else:
            out.fresh.append((point, fingerprint))
    for gone in (o for o in open_runs if o.life is Life.dead):
        _bury(gone)
    return out


def _can_go_on(gone: OpenRun, point: Point, sweep: str | None, code: CodeState) -> bool:
    """Whether a dead run is submitted again in its own folder: the same sweep, the same code, attempts left."""
    attempts = gone.status.extra.get("attempts")
    left = not isinstance(attempts, list) or len(attempts) < point.cfg.cluster.max_attempts
    return gone.life is Life.dead and gone.sweep == sweep and gone.code == code.fingerprint and left


def _bury(gone: OpenRun) -> None:
    """Another folder takes its place; this one must not go on claiming that it waits or runs."""
    state = State.cancelled if gone.word.startswith(CANCELLED) else State.failed
    error = None
    if state is State.failed:
        error = {"rank": None, "type": "JobEnded", "message": epitaph(gone), "traceback": ""}
    with contextlib.suppress(OSError):
        gone.run.set_state(state, only_from=slurm_runs.OPEN, error=error, reason=epitaph(gone))


def epitaph(dead: OpenRun) -> str:
    return f"its job {dead.job} is gone: {dead.word}" if dead.jobs else dead.word
