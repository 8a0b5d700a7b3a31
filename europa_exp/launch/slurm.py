"""What Slurm is asked for: the parameters of a job, its script as text, its cost, and a clean environment for asking.

submitit writes the script. The same executor that submits also gives the text, so what is shown is what Slurm gets.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from europa_exp.config import walltime
from europa_exp.config.errors import Problem
from europa_exp.config.schema import Cluster, Config, Launch, NumaBinding
from europa_exp.launch import environment
from europa_exp.launch.job_folder import JOBS_FOLDER
from europa_exp.runs.slurm_record import node_names

if TYPE_CHECKING:
    from europa_exp.launch.points import Point
    from europa_exp.launch.slurm_executor import Executor

ROOT = Path(__file__).resolve().parents[2]
"""The folder that `europa_exp` is imported from."""

NUMA_SCRIPT = Path("europa_exp/launch/numa_bind.sh")
"""Relative to the code that the job imports."""

_BEGIN = '"${begin[@]}"'
"""In the job script: what a rank's command begins with."""

_NO_LIMIT_MIN = 60 * 24 * 365


def minutes(cluster: Cluster) -> int:
    """The time limit in minutes; inside an allocation, whose own limit counts, a year."""
    if cluster.inside_allocation or not cluster.time_limit:
        return _NO_LIMIT_MIN
    return walltime.minutes(cluster.time_limit)


def sbatch_parameters(
    cfg: Config, launch: Launch, *, name: str, code: Path | None = None, bad_nodes: Sequence[str] = ()
) -> dict[str, Any]:
    """What submitit's ``SlurmExecutor.update_parameters`` gets for jobs that run this configuration (or others of its shape).

    ``name`` is the job's name; ``code`` the folder that the job imports `europa_exp` from, without it this one; ``bad_nodes``
    are left out like those of ``cluster.exclude``.
    """
    cluster, layout = cfg.cluster, cfg.parallelism
    more: dict[str, Any] = {"requeue" if cluster.requeue else "no-requeue": True}
    more |= {"switches": cluster.switches} if cluster.switches else {}
    for option, value in cluster.sbatch_args.items():
        # The fields hold text, so an option without a value comes as "", or as YAML's true (and "True", from a command line).
        if value.lower() != "false":
            more[option.replace("_", "-")] = True if value.lower() in ("", "true") else value
    srun = ["--kill-on-bad-exit=1"]
    if cluster.inside_allocation:
        ranks = layout.nodes * layout.gpus_per_node
        srun += [f"--nodes={layout.nodes}", f"--ntasks={ranks}", f"--ntasks-per-node={layout.gpus_per_node}"]
        for option in ("gres", "nodelist", "exclude"):
            value = getattr(cluster, option)
            srun += [f"--{option}={value}"] if value else []
    parameters = {
        "job_name": name,
        "nodes": layout.nodes,
        "ntasks_per_node": layout.gpus_per_node,
        "time": minutes(cluster),
        "cpus_per_task": cluster.cpus_per_task,
        "account": cluster.account,
        "partition": cluster.partition,
        "gres": cluster.gres,
        "comment": cluster.comment,
        "exclude": _exclude(cluster, bad_nodes),
        "nodelist": cluster.nodelist,
        "mail_user": cluster.mail_user,
        "mail_type": cluster.mail_type,
        "dependency": launch.dependency,
        # submitit always writes --signal and --array=...%n, and has defaults of its own for both.
        "signal_delay_s": cluster.signal_margin_s,
        "array_parallelism": launch.throttle or 1_000_000,
        "setup": _setup(cluster, layout.nodes, code or ROOT),
        "srun_args": [*srun, *cluster.srun_args],
        "additional_parameters": more,
    }
    return {key: value for key, value in parameters.items() if value is not None}


def _exclude(cluster: Cluster, bad_nodes: Sequence[str]) -> str | None:
    """What the configuration leaves out, and the bad nodes that it does not ask for by name; None for nothing."""
    known = {*node_names(cluster.exclude or ""), *node_names(cluster.nodelist or "")}
    more = [node for node in bad_nodes if node not in known]
    return ",".join([*filter(None, [cluster.exclude]), *more]) or None


def _setup(cluster: Cluster, nodes: int, code: Path) -> list[str]:
    """Shell lines before srun."""
    lines = []
    if cluster.modules:
        lines.append("# A job's shell knows the command only if the submitting shell exports it.")
        lines.append("type module >/dev/null 2>&1 || . /etc/profile")
    for name in cluster.modules:
        failed = f'{{ echo "cluster.modules: failed to load {name} on $(uname -n)" >&2; exit 1; }}'
        lines.append(f"module load {name} || {failed}")  # the checks keep the names free of shell syntax
    if cluster.unpack and cluster.unpack_to:
        archive, place = shlex.quote(cluster.unpack), shlex.quote(cluster.unpack_to)
        each_node = f"srun --nodes={nodes} --ntasks={nodes} --ntasks-per-node=1 --kill-on-bad-exit=1"
        unpack = """bash -c 'trap "" USR2; mkdir -p -- "$1" && tar -xf "$0" -C "$1"'"""
        failed = '{ echo "cluster.unpack: failed" >&2; exit 1; }'
        lines.append(f"{each_node} {unpack} {archive} {place} || {failed}")
    for line in cluster.setup:
        # In this shell, because it may set variables; a line of its own, because that one may end in a comment.
        failed = f'echo "cluster.setup: failed on $(uname -n):" {shlex.quote(line)}'
        lines += [line, f"[ $? = 0 ] || {{ {failed} >&2; exit 1; }}"]
    if cluster.cpus_per_task:
        lines.append(f"export SRUN_CPUS_PER_TASK={cluster.cpus_per_task}  # srun doesn't inherit it")
    lines += [
        "# A signal waits until the ranks can take it. Where env is too old for that (coreutils < 8.31), it is not heeded.",
        "begin=(env --block-signal=USR2,TERM)",
        f"""{_BEGIN} true 2>/dev/null || begin=(bash -c 'trap "" USR2; exec "$@"' bash)""",
    ]
    path = shlex.quote(str(code))
    # Otherwise `python -m` looks first where the command was typed: in the checkout that somebody goes on editing.
    lines.append("export PYTHONSAFEPATH=1")
    lines.append(f'export PYTHONPATH={path}"${{PYTHONPATH:+:$PYTHONPATH}}"')
    return lines


def python_command(cluster: Cluster, code: Path | None = None) -> str:
    """What starts a rank's interpreter, as shell words: the NUMA binding (see ``numa_bind.sh``), then Python."""
    python = shlex.split(cluster.python) if cluster.python else [sys.executable]
    if cluster.numa_binding is NumaBinding.none:
        return shlex.join(python)
    otherwise = "stop" if cluster.numa_required else "go_on"
    script = str((code or ROOT) / NUMA_SCRIPT)
    return shlex.join(["bash", script, cluster.numa_binding.name, otherwise, *python])


# ----------------------------------------------------------------------------------------------------------- submitit


def make_executor(
    cfg: Config,
    launch: Launch,
    *,
    folder: str | Path,
    name: str,
    code: Path | None = None,
    bad_nodes: Sequence[str] = (),
) -> Executor:
    """submitit's executor with all that `sbatch_parameters` says; jobs leave their files in ``folder``.

    It can be made, and asked for its script, on a machine without Slurm; submitting needs ``sbatch`` on PATH.
    """
    from europa_exp.launch.slurm_executor import Executor

    executor = Executor(folder=str(folder), python=f"{_BEGIN} {python_command(cfg.cluster, code)}")
    executor.update_parameters(**sbatch_parameters(cfg, launch, name=name, code=code, bad_nodes=bad_nodes))
    return executor


def script_text(
    cfg: Config,
    launch: Launch,
    *,
    folder: str | Path | None = None,
    name: str = "europa",
    n_jobs: int = 1,
    code: Path | None = None,
    bad_nodes: Sequence[str] = (),
) -> str:
    """The job script of a configuration as submitit hands it to sbatch; ``folder`` is where submitit's files go; every
    submission makes a new one, which without it is called JOB here."""
    place = Path(launch.runs_dir).absolute() / JOBS_FOLDER / "JOB" if folder is None else folder
    executor = make_executor(cfg, launch, folder=place, name=name, code=code, bad_nodes=bad_nodes)
    return executor.text(n_jobs)


# --------------------------------------------------------------------------------------------------- shapes and cost


def shape(cfg: Config, launch: Launch) -> str:
    """Equal for configurations that can share one script, and so one array."""
    return repr((sbatch_parameters(cfg, launch, name=""), python_command(cfg.cluster)))


def by_shape(points: Sequence[Point]) -> list[list[Point]]:
    """Points in groups of one shape, in the order of the call."""
    groups: dict[str, list[Point]] = {}
    for point in points:
        groups.setdefault(shape(point.cfg, point.cfg.launch), []).append(point)
    return list(groups.values())


def n_jobs(points: Sequence[Point]) -> int:
    """Jobs that points of one shape make: ``launch.points_per_job`` of them run in turn in each."""
    return -(-len(points) // points[0].cfg.launch.points_per_job)


def hours_per_job(cfg: Config) -> float:
    """Node-hours that one job of this configuration is charged at most for one start: nodes x time limit.

    0 inside an allocation: that one is paid for, whatever runs in it.
    """
    cluster = cfg.cluster
    if cluster.inside_allocation or not cluster.time_limit:
        return 0.0
    return cfg.parallelism.nodes * minutes(cluster) / 60


def node_hours(points: Sequence[Point]) -> float:
    """Node-hours of all jobs of these points, one start each, if all use their whole time limit."""
    return sum(n_jobs(group) * hours_per_job(group[0].cfg) for group in by_shape(points))


def most_node_hours(points: Sequence[Point]) -> float:
    """Node-hours of these points if every attempt that ``cluster.max_attempts`` allows comes and uses its whole time limit."""
    return sum(_starts(group) * hours_per_job(group[0].cfg) for group in by_shape(points))


def _starts(group: Sequence[Point]) -> int:
    """How often the jobs of points of one shape may start, together.

    A job that Slurm starts again does so for one of its runs and goes through the others at most once, so each run adds its
    further attempts. Of a chain each job starts once, and it is as long as the run with the most attempts asks for. Not
    counted is what Slurm does by itself, beyond what a run may ask for, after a node failed: one more start at most.
    """
    per_job = group[0].cfg.launch.points_per_job
    tasks = [group[i : i + per_job] for i in range(0, len(group), per_job)]
    if not group[0].cfg.cluster.requeue:
        return len(tasks) * max(point.cfg.cluster.max_attempts for point in group)
    return sum(1 + sum(point.cfg.cluster.max_attempts - 1 for point in task) for task in tasks)


def too_expensive(points: Sequence[Point]) -> Problem | None:
    """What ``launch.max_node_hours`` has against these points, all their attempts counted; None if they may run."""
    allowed = points[0].cfg.launch.max_node_hours if points else None
    most, once = most_node_hours(points), node_hours(points)
    if allowed is None or most <= allowed:
        return None
    runs = "this run" if len(points) == 1 else f"these {len(points)} runs"
    rule = f"{runs} could use {most:,.4g} node-hours (nodes x cluster.time_limit"
    way_out = "Shorten cluster.time_limit, take fewer points"
    if most > once:
        rule += f" = {once:,.4g}, x cluster.max_attempts"
        way_out += ", lower cluster.max_attempts"
    return Problem("launch.max_node_hours", allowed, rule + ")", f"{way_out}, or allow more")


# -------------------------------------------------------------------------------------------------------- environment


@contextlib.contextmanager
def clean_environment() -> Iterator[None]:
    """Call Slurm's commands in here: what another allocation, launcher or container left in this shell stays out.

    sbatch passes the environment on to the job, and its SBATCH_* variables win over the script's own lines.
    """
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(environment.for_submission(before))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
