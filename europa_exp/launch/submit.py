"""From checked points to running jobs: skip what is done, make the folders, hand over to submitit, show, report."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from europa_exp.config import schema
from europa_exp.config.effects import notes
from europa_exp.config.errors import ConfigError, Problem
from europa_exp.launch import allocation, dispatch, environment, processes, slurm
from europa_exp.launch.attend import INTERRUPTED, Stops, attend, print_comparison
from europa_exp.launch.forkserver import PRELOAD
from europa_exp.launch.worker import TRAIN
from europa_exp.runs.folder import NewRun, RunFolder, RunFolderError, create_runs
from europa_exp.runs.status import State

if TYPE_CHECKING:
    from europa_exp.launch.points import Point
    from europa_exp.runs.provenance import CodeState


def submit(
    points: Sequence[Point],
    launch: schema.Launch,
    *,
    sweep: str | None,
    command: Sequence[str],
    entry: str = TRAIN,
    preload: str = PRELOAD,
) -> int:
    """Run the points and return the exit code: 0 all completed (or skipped), 1 some did not, 130 interrupted.

    All run folders are made before the first run starts, or none. One job runs all points of the call in turn. The
    caller's Ctrl-C (or SIGTERM) stops the ranks and marks what is not done ``cancelled``; a second one is impatient.
    ``entry`` and ``preload`` name the training function and what a fork server loads for it.

    Raises ConfigError for a secret in a configuration, too few accelerators or too many node-hours, RunFolderError when the folders can't be
    made; nothing is left behind then.
    """
    processes.keep_standard_streams()
    _refuse(points)
    from europa_exp.runs.provenance import code_state

    code = code_state()
    fingerprints = _fingerprints(points)
    todo, done = _without_done(points, launch, code, fingerprints)
    if not todo:
        print(
            "Nothing to run. launch.force=true runs completed points again, launch.repeat=N asks for N runs of each."
        )
        if len(done) > 1:
            print_comparison(done)
        return 0
    if problem := slurm.too_expensive([point for point, _ in todo]):
        raise ConfigError([("", problem)])
    for note in notes([point.cfg for point, _ in todo]):
        print(note, file=sys.stderr)
    cluster = points[0].cfg.cluster
    if cluster.executor is schema.Executor.slurm and not cluster.inside_allocation:
        given = list(zip(points, fingerprints, strict=True))
        return _to_slurm(given, todo, launch, sweep=sweep, command=command, entry=entry, code=code)
    with Stops() as stops:
        new = [
            NewRun(p.cfg, p.name, p.identity, p.overrides, p.repeat, p.parent, fingerprint)
            for p, fingerprint in todo
        ]
        runs = create_runs(launch.runs_dir, new, sweep=sweep, command=command, code=code)
        try:
            for run in runs:
                run.set_state(State.queued)
            place = Path(launch.runs_dir)
            job: dispatch.LocalJob | None = None
            if not stops.count and cluster.inside_allocation:
                job = allocation.AllocationJob(runs, place, entry, launch)
            elif not stops.count:
                job = dispatch.LocalJob(runs, place, entry, preload)
        except OSError as error:
            _remove(runs)
            raise RunFolderError(
                f"launch.runs_dir={launch.runs_dir}: the job can't be started there ({error}); "
                "nothing was submitted, nothing was left"
            ) from error
        except BaseException:
            _remove(runs)
            raise
        if job is None:
            _remove(runs)
            return INTERRUPTED
        return attend(job, runs, [p for p, _ in todo], stops, sweep, done)


def _to_slurm(
    given: Sequence[tuple[Point, str | None]],
    todo: Sequence[tuple[Point, str | None]],
    launch: schema.Launch,
    *,
    sweep: str | None,
    command: Sequence[str],
    entry: str,
    code: CodeState,
) -> int:
    from europa_exp.launch import attend_slurm, slurm_submit

    with Stops() as stops:
        handed = slurm_submit.submit(
            given, todo, launch, sweep=sweep, command=command, entry=entry, code=code, stops=stops
        )
        if handed.code or launch.detach:
            attend_slurm.say_next(handed, launch)
            return handed.code
        return attend_slurm.attend(handed, launch, stops)


# --------------------------------------------------------------------------------------------- before anything exists


RANKS_PER_CORE = 16
"""More CPU ranks than this a core are a mistake (the layout of a cluster on a laptop), not an experiment."""


def _refuse(points: Sequence[Point]) -> None:
    from europa_exp.config import io
    from europa_exp.config.secrets import problems_in

    problems: list[tuple[str, Problem]] = []
    devices = environment.accelerators()
    for point in points:
        for dotted, kind in problems_in(io.to_dict(point.cfg)):
            rule = f"this looks like a secret ({kind}), and the configuration is recorded and shared"
            way_out = "Put it into the environment of the shell, where W&B and Hugging Face look for theirs"
            problems.append((point.name, Problem(dotted, "<hidden>", rule, way_out)))
        if point.cfg.cluster.executor is not points[0].cfg.cluster.executor:
            rule = f"{points[0].name} of the same call has another executor, and one call goes to one place"
            way_out = "Make a call for each cluster"
            problems.append(
                (point.name, Problem("cluster.executor", point.cfg.cluster.executor, rule, way_out))
            )
        inside = point.cfg.cluster.inside_allocation
        if inside is not points[0].cfg.cluster.inside_allocation:
            rule = f"{points[0].name} of the same call says otherwise, and one call goes to one place"
            problems.append(
                (point.name, Problem("cluster.inside_allocation", inside, rule, "Make two calls"))
            )
        elif inside and (problem := allocation.problem(point.cfg, os.environ)):
            problems.append((point.name, problem))
        layout = point.cfg.parallelism
        world = layout.nodes * layout.gpus_per_node
        if point.cfg.cluster.executor is not schema.Executor.local:
            continue
        ranks = f"{layout.nodes} x {layout.gpus_per_node} ranks"
        if devices and world > len(devices):
            rule = f"{ranks} need {world} accelerators, this machine shows {len(devices)}"
            way_out = "Use fewer ranks, or train on the CPU with CUDA_VISIBLE_DEVICES= before the command"
            problems.append((point.name, Problem("parallelism.nodes", layout.nodes, rule, way_out)))
        memory = point.cfg.cluster.device_memory_gib
        if not devices and memory is not None:
            rule = "the ranks have accelerators, it says, and this machine shows none"
            way_out = "Leave it out to train on the CPU, or only look with launch.preview=true"
            problems.append((point.name, Problem("cluster.device_memory_gib", memory, rule, way_out)))
        most = RANKS_PER_CORE * (os.cpu_count() or 1)
        if not devices and world > most:
            rule = f"{ranks} on this machine's {os.cpu_count()} cores would hardly move; at most {most} start here"
            way_out = "Use parallelism=local, choose a cluster, or only look with launch.preview=true"
            problems.append((point.name, Problem("parallelism.nodes", layout.nodes, rule, way_out)))
    if problems:
        raise ConfigError(problems)


def _fingerprints(points: Sequence[Point]) -> list[str | None]:
    from europa_exp.data.fingerprint import fingerprint

    known: dict[str, str] = {}
    problems: list[tuple[str, Problem]] = []
    found: list[str | None] = []
    for point in points:
        key = repr(point.cfg.data)
        try:
            if key not in known:
                known[key] = fingerprint(point.cfg.data)
            found.append(known[key])
        except Exception as error:
            way_out = "Give a folder of text files that can be read, or leave data.path out"
            problems.append((point.name, Problem("data.path", point.cfg.data.path, str(error), way_out)))
    if problems:
        raise ConfigError(problems)
    return found


def _without_done(
    points: Sequence[Point], launch: schema.Launch, code: CodeState, fingerprints: Sequence[str | None]
) -> tuple[list[tuple[Point, str | None]], list[RunFolder]]:
    """The points that are still to run, and the runs that stand for the others; says which are skipped, and for which run."""
    from europa_exp.runs.skip import completed_twins

    asked = zip(points, fingerprints, strict=True)
    wanted = {
        p.identity: (code.fingerprint, data, p.cfg.cluster.name)
        for p, data in asked
        if not (launch.force or p.force)
    }
    left = completed_twins(launch.runs_dir, wanted) if wanted else {}
    todo: list[tuple[Point, str | None]] = []
    done: list[RunFolder] = []
    for point, fingerprint in zip(points, fingerprints, strict=True):
        if launch.force or point.force or not left[point.identity]:
            todo.append((point, fingerprint))
            continue
        done.append(left[point.identity].pop(0))
        print(
            f"skipped {point.name}: {done[-1].name} is completed with the same configuration, code and data"
        )
    return todo, done


def _remove(runs: Sequence[RunFolder]) -> None:
    for run in runs:
        shutil.rmtree(run.path, ignore_errors=True)
