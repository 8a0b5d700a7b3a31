"""From checked points to running jobs: skip what is done, make the folders, hand over to submitit, show, report."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from europa_exp.config import schema
from europa_exp.config.errors import ConfigError, Problem
from europa_exp.launch import environment, processes
from europa_exp.launch.forkserver import PRELOAD
from europa_exp.launch.job import Job
from europa_exp.launch.worker import TRAIN
from europa_exp.runs.folder import NewRun, RunFolder, RunFolderError, create_runs
from europa_exp.runs.status import State

if TYPE_CHECKING:
    from europa_exp.launch.follow import Row
    from europa_exp.launch.points import Point
    from europa_exp.runs.provenance import CodeState

INTERRUPTED = 130
"""Exit code after Ctrl-C, as a shell gives it."""

JOBS_FOLDER = ".submitit"
"""Under the runs folder: submitit's pickles and logs, a folder a job."""

_NO_LIMIT_MIN = 60 * 24 * 365
_LAST_SECONDS = 3.0


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

    Raises ConfigError for a secret in a configuration or too few accelerators, RunFolderError when the folders can't be
    made; nothing is left behind then.
    """
    processes.keep_standard_streams()
    _refuse(points)
    from europa_exp.runs.provenance import code_state

    code = code_state()
    fingerprints = _fingerprints(points)
    todo = _without_done(points, launch, code, fingerprints)
    if not todo:
        print(
            "Nothing to run. launch.force=true runs completed points again, launch.repeat=N asks for N runs of each."
        )
        return 0
    with _Stops() as stops:
        new = [
            NewRun(p.cfg, p.name, p.identity, p.overrides, p.repeat, p.parent, fingerprint)
            for p, fingerprint in todo
        ]
        runs = create_runs(launch.runs_dir, new, sweep=sweep, command=command, code=code)
        try:
            for run in runs:
                run.set_state(State.queued)
            job = None if stops.count else _LocalJob(runs, Path(launch.runs_dir), entry, preload)
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
        return _attend(job, runs, [p for p, _ in todo], stops, sweep)


# --------------------------------------------------------------------------------------------- before anything exists


def _refuse(points: Sequence[Point]) -> None:
    from europa_exp.config import io
    from europa_exp.runs.secrets import problems_in

    problems: list[tuple[str, Problem]] = []
    devices = environment.accelerators()
    for point in points:
        for dotted, kind in problems_in(io.to_dict(point.cfg)):
            rule = f"this looks like a secret ({kind}), and the configuration is recorded and shared"
            way_out = "Put it into the environment of the shell, where W&B and Hugging Face look for theirs"
            problems.append((point.name, Problem(dotted, "<hidden>", rule, way_out)))
        if point.cfg.cluster.executor is schema.Executor.slurm:
            rule = "this version composes and previews for Slurm, and can't submit there yet"
            way_out = "Use launch.preview=script, or cluster=local"
            problems.append((point.name, Problem("cluster.executor", "slurm", rule, way_out)))
        layout = point.cfg.parallelism
        world = layout.nodes * layout.gpus_per_node
        if devices and point.cfg.cluster.executor is schema.Executor.local and world > len(devices):
            rule = f"{layout.nodes} x {layout.gpus_per_node} ranks need {world} accelerators, this machine shows {len(devices)}"
            way_out = "Use fewer ranks, or train on the CPU with CUDA_VISIBLE_DEVICES= before the command"
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
) -> list[tuple[Point, str | None]]:
    """The points that are still to run; says which are skipped, and for which run."""
    from europa_exp.runs.skip import completed_twins

    left: dict[str, list[RunFolder]] = {}
    todo: list[tuple[Point, str | None]] = []
    for point, fingerprint in zip(points, fingerprints, strict=True):
        if launch.force or point.force:
            todo.append((point, fingerprint))
            continue
        if point.identity not in left:
            left[point.identity] = completed_twins(
                launch.runs_dir, point.identity, code.fingerprint, fingerprint, point.cfg.cluster.name
            )
        if left[point.identity]:
            done = left[point.identity].pop(0)
            print(
                f"skipped {point.name}: {done.name} is completed with the same configuration, code and data"
            )
        else:
            todo.append((point, fingerprint))
    return todo


def _remove(runs: Sequence[RunFolder]) -> None:
    for run in runs:
        shutil.rmtree(run.path, ignore_errors=True)


# ------------------------------------------------------------------------------------------------------------ the job


class _LocalJob:
    """The job on this machine: submitit's controller, below it the agent (see ``agent``), below that the ranks."""

    def __init__(self, runs: Sequence[RunFolder], runs_dir: Path, entry: str, preload: str) -> None:
        import submitit

        place = runs_dir.absolute() / JOBS_FOLDER
        place.mkdir(exist_ok=True)
        # submitit names its files after process ids, which come again: a folder of its own for each job.
        self.folder = Path(tempfile.mkdtemp(prefix=time.strftime("%Y%m%d-%H%M%S-"), dir=place))
        job = Job(tuple(str(run.path) for run in runs), str(self.folder), entry, preload)
        executor = submitit.AutoExecutor(folder=str(self.folder), cluster="local")
        executor.update_parameters(timeout_min=_NO_LIMIT_MIN)
        with _prepared():
            self._job = executor.submit(job)
        self._agent: dict[str, Any] | None = None

    def agent_pid(self) -> int | None:
        """Process id of the agent, once it has said so."""
        from europa_exp.launch.agent import AGENT_FILE

        if self._agent is None:
            with contextlib.suppress(OSError, ValueError):
                self._agent = json.loads((self.folder / AGENT_FILE).read_text())
        return self._agent["pid"] if self._agent else None

    def active(self) -> bool:
        """Whether somebody still works on the runs. The agent counts, not submitit's controller: either can be killed."""
        pid = self.agent_pid()
        if pid is None or self._agent is None:
            return not self._job.done()
        return processes.is_alive(pid, self._agent["started"])

    def stop(self) -> None:
        """Ask the agent to stop; asked again it does not wait for the ranks."""
        from europa_exp.launch.agent import STOP_FILE

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
            controller.wait(timeout=_LAST_SECONDS)
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
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.environ.clear()
        os.environ.update(before)


class _Stops:
    """Counts Ctrl-C and SIGTERM instead of dying of them."""

    def __init__(self) -> None:
        self.count = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Stops:
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is signal.SIG_IGN:
                continue  # a shell's background job, or nohup: somebody wants it ignored
            # Signal handlers can be set in the main thread only; elsewhere the caller's stay.
            with contextlib.suppress(ValueError):
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, *_: object) -> None:
        self.count += 1


# ------------------------------------------------------------------------------------------------- watching and the end


def _attend(
    job: _LocalJob, runs: Sequence[RunFolder], points: Sequence[Point], stops: _Stops, sweep: str | None
) -> int:
    from europa_exp.launch import follow

    begin = time.monotonic()
    rows = [follow.Row(run, p.cfg.training.steps) for run, p in zip(runs, points, strict=True)]
    view = follow.make_view()
    seen = 0
    kill_at: float | None = None

    def tick() -> None:
        nonlocal seen, kill_at
        if stops.count > seen:
            seen = stops.count
            if seen == 1:
                view.say("Stopping the ranks; once more to kill them at once.")
            else:
                kill_at = kill_at or time.monotonic() + _LAST_SECONDS
            job.stop()
        if kill_at is not None and time.monotonic() > kill_at:
            job.kill()

    names = f"sweep {sweep}, " if sweep else ""
    print(f"{names}{len(runs)} run{'s' if len(runs) > 1 else ''} in {os.path.relpath(runs[0].path.parent)}")
    try:
        follow.follow(rows, view, active=job.active, tick=tick)
    finally:
        if sys.exc_info()[0] is not None:  # the view broke; the runs need not
            job.stop()
        job.reap()
    _close_accounts(job, rows, cancelled=bool(stops.count))
    return _report(rows, sweep, time.monotonic() - begin, interrupted=bool(stops.count))


def _close_accounts(job: _LocalJob, rows: Sequence[Row], *, cancelled: bool) -> None:
    """Nobody works on the runs any more: those that claim otherwise are marked."""
    from europa_exp.launch import follow

    open_states = (State.created, State.queued, State.running)
    for row in rows:
        row.refresh()
        state = row.status.state
        if state not in open_states:
            continue
        fields: dict[str, Any] = {}
        final = State.cancelled if cancelled else State.failed
        if not cancelled:
            started = "" if state is State.running else "not started: "
            pid = job.agent_pid()
            message = f"{started}the agent was killed" if pid else "the job did not start"
            message += f" (process {pid}, which ran the ranks)" if pid else f"; see {job.folder}"
            fields["error"] = {
                "rank": None,
                "type": "AgentKilled",
                "message": message,
                "traceback": job.last_words(),
            }
        try:
            row.run.set_state(final, only_from=open_states, **fields)
        except OSError as error:
            print(f"{row.run.name}: how it ended can't be recorded: {error}", file=sys.stderr)
        row.refresh()
        if row.status.state is State.failed:
            print(follow.failure_text(row))


def _report(rows: Sequence[Row], sweep: str | None, seconds: float, *, interrupted: bool) -> int:
    from europa_exp.launch import follow

    completed = [row for row in rows if row.status.state is State.completed]
    print(f"{follow.count_states(rows)} in {seconds:.0f} s")
    for row in rows:
        if row.status.state is State.unknown:
            print(f"{row.run.name}: {row.status.reason}; was the folder removed while the run was going on?")
    if len(completed) > 1 and sweep and not interrupted:
        _print_comparison(rows[0].run.path.parent, sweep)
    ended_badly = next((row for row in rows if row.status.state is State.failed), None)
    if ended_badly is not None:
        print(f"Next: europa show {ended_badly.run.name}")
    if len(rows) > 1 and sweep and completed:
        print(f"Next: europa compare --sweep {sweep}")
    elif completed:
        print(f"Next: europa show {completed[0].run.name}")
    if interrupted:
        return INTERRUPTED
    return 0 if len(completed) == len(rows) else 1


def _print_comparison(runs_dir: Path, sweep: str) -> None:
    print(flush=True)
    try:
        from europa_exp.runs.compare import print_sweep

        print_sweep(runs_dir, sweep)
    except Exception as error:
        # The runs are done and recorded; how they look side by side must not turn that into a failure.
        print(f"the comparison can't be shown: {error}", file=sys.stderr)
