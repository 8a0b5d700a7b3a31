"""Rules of the cluster and of the call: what belongs to Slurm, what Slurm takes, what it costs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields

from europa_exp.config import walltime
from europa_exp.config.errors import Problem
from europa_exp.config.rules import reads
from europa_exp.config.schema import (
    IDENTITY_EXCLUDES,
    Cluster,
    Config,
    Executor,
    NumaBinding,
    Preview,
    TrackingMode,
)
from europa_exp.config.schema import Launch as LaunchGroup

_ANY_CLUSTER = ("name", "executor", "preload", "device_memory_gib", "host_memory_gib", "checkpoint_dir")
_ANY_LAUNCH = ("runs_dir", "preview", "repeat", "force", "sweep_name")
SLURM_FIELDS = tuple(
    f.name for f in fields(Cluster) if f.name not in _ANY_CLUSTER and f"cluster.{f.name}" in IDENTITY_EXCLUDES
)
"""Fields of ``cluster`` that mean something for executor=slurm only. Those that are part of the identity are not among them: a
record from a cluster may run again on one machine, as the same experiment."""

SLURM_LAUNCH = tuple(f.name for f in fields(LaunchGroup) if f.name not in _ANY_LAUNCH)
"""Fields of ``launch`` that mean something for executor=slurm only."""


@reads("cluster", "launch")
def belongs_to_slurm(cfg: Config) -> Iterator[Problem]:
    """On one machine nobody reads a setting for Slurm, and under Slurm nobody preloads: say so instead of ignoring it."""
    if cfg.cluster.executor is Executor.slurm:
        if cfg.cluster.preload:
            rule = "belongs to executor=local: on Slurm every rank is a task of its own"
            yield Problem("cluster.preload", True, rule, "Give cluster.preload=false")
        return
    named = f"cluster={cfg.cluster.name} runs on this machine"
    way_out = "Leave it out, or choose a cluster with Slurm (cluster=slurm)"
    for group, value, names in (
        ("cluster", cfg.cluster, SLURM_FIELDS),
        ("launch", cfg.launch, SLURM_LAUNCH),
    ):
        off = {f.name: f.metadata["off"] for f in fields(value)}
        for name in names:
            if getattr(value, name) != off[name]:
                rule = f"belongs to executor=slurm, and {named}"
                yield Problem(f"{group}.{name}", getattr(value, name), rule, way_out)
    if cfg.launch.preview is Preview.script:
        yield Problem(
            "launch.preview", "script", f"there is no job script: {named}", "Take launch.preview=true"
        )


_FOR_SBATCH = (
    "detach",
    "max_node_hours",
    "points_per_job",
    "throttle",
    "max_array_size",
    "dependency",
    "snapshot",
)


@reads("cluster", "launch")
def inside_an_allocation(cfg: Config) -> Iterator[Problem]:
    """What is told to sbatch has no use where the shell holds the nodes already, and runs take turns there."""
    if cfg.cluster.executor is not Executor.slurm or not cfg.cluster.inside_allocation:
        return
    for f in fields(LaunchGroup):
        if f.name in _FOR_SBATCH and getattr(cfg.launch, f.name) != f.metadata["off"]:
            rule = "has no meaning inside an allocation (cluster.inside_allocation=true): runs take turns there, at once"
            way_out = "Leave it out, or submit with sbatch"
            yield Problem(f"launch.{f.name}", getattr(cfg.launch, f.name), rule, way_out)


@reads("cluster.executor", "cluster.time_limit", "cluster.max_time_limit", "cluster.inside_allocation")
def time_limit(cfg: Config) -> Iterator[Problem]:
    """Slurm's own default can be an hour or for ever; here the limit is always said."""
    c = cfg.cluster
    if c.executor is not Executor.slurm:
        return
    if c.time_limit is None:
        if not c.inside_allocation:
            rule = "every Slurm job needs a time limit: it is what the job may cost"
            yield Problem("cluster.time_limit", None, rule, "Give cluster.time_limit=01:00:00 (HH:MM:SS)")
        return
    broken = False
    for dotted, value in (
        ("cluster.time_limit", c.time_limit),
        ("cluster.max_time_limit", c.max_time_limit),
    ):
        try:
            _ = value is None or walltime.seconds(value)
        except ValueError as e:
            broken = True
            way_out = f"Write {dotted}=00:30:00 for half an hour, 1-00:00:00 for a day"
            yield Problem(dotted, value, str(e).removeprefix(f"{value!r} "), way_out)
    if (
        not broken
        and c.max_time_limit
        and walltime.seconds(c.time_limit) > walltime.seconds(c.max_time_limit)
    ):
        rule = f"is more than cluster.max_time_limit={c.max_time_limit}, the longest that the partition takes"
        yield Problem("cluster.time_limit", c.time_limit, rule, f"Take {c.max_time_limit} or less")


@reads("cluster.time_limit", "cluster.signal_margin_s", "cluster.executor", "cluster.inside_allocation")
def signal_margin(cfg: Config) -> Iterator[Problem]:
    """A warning that comes before the start ends the job at once."""
    c = cfg.cluster
    if c.executor is not Executor.slurm or c.time_limit is None or c.inside_allocation:
        return
    try:
        limit = walltime.seconds(c.time_limit)
    except ValueError:
        return
    if c.signal_margin_s >= limit:
        rule = f"must be less than cluster.time_limit={c.time_limit} ({limit} s), or the job saves and stops as it starts"
        way_out = f"Take cluster.signal_margin_s={min(60, limit // 3)}, or more time"
        yield Problem("cluster.signal_margin_s", c.signal_margin_s, rule, way_out)


def lacks_account(cfg: Config) -> bool:
    """Whether the site will refuse the job because it doesn't say who is charged."""
    c = cfg.cluster
    return c.executor is Executor.slurm and c.needs_account and c.account is None and not c.inside_allocation


@reads("cluster", "launch.preview")
def account(cfg: Config) -> Iterator[Problem]:
    """Sites that charge somebody want to know whom; the name is personal and so in a file of the user's own."""
    c = cfg.cluster
    if lacks_account(cfg) and not cfg.launch.preview:  # whoever only looks needs none
        from europa_exp.config.personal import VARIABLE, path

        file = path() or f"a file of your own that {VARIABLE} names"
        yield Problem(
            "cluster.account",
            None,
            f"{c.name} takes no job without an account (the budget that is charged)",
            f"Write it into {file} (two lines: '{c.name}:' and '  account: <budget>'), or give cluster.account=<budget>",
        )


# ---------------------------------------------------------------------------------------------------- texts for Slurm

_MODULE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+/-]*")
_WORD = re.compile(r"\S+")
_DEPENDENCY = re.compile(
    r"(singleton|(after|afterany|afterok|afternotok|aftercorr|afterburstbuffer)(:\d+(_\d+)?(\+\d+)?)+)"
    r"([,?](singleton|(after|afterany|afterok|afternotok|aftercorr|afterburstbuffer)(:\d+(_\d+)?(\+\d+)?)+))*"
)
_ONE_WORD = ("account", "partition", "gres", "exclude", "nodelist", "switches", "mail_user", "mail_type")

_FIELDS = {
    "account": "cluster.account",
    "partition": "cluster.partition",
    "time": "cluster.time_limit",
    "gres": "cluster.gres",
    "gpus-per-node": "cluster.gres",
    "cpus-per-task": "cluster.cpus_per_task",
    "comment": "cluster.comment",
    "exclude": "cluster.exclude",
    "nodelist": "cluster.nodelist",
    "switches": "cluster.switches",
    "mail-user": "cluster.mail_user",
    "mail-type": "cluster.mail_type",
    "requeue": "cluster.requeue",
    "no-requeue": "cluster.requeue",
    "signal": "cluster.signal_margin_s",
    "dependency": "launch.dependency",
    "array": "launch.throttle",
    "nodes": "parallelism.nodes",
    "ntasks": "parallelism.gpus_per_node",
    "ntasks-per-node": "parallelism.gpus_per_node",
}
_THE_LAUNCHERS = re.compile(
    "job-name|output|error|open-mode|export|export-file|get-user-env|wrap|wait|test-only|parsable|input|chdir|quiet|verbose|help"
    "|version|usage|kill-on-bad-exit|unbuffered|jobid|multi-prog|no-kill"
)


@reads("cluster", "launch.dependency")
def texts(cfg: Config) -> Iterator[Problem]:
    """What goes into a line of the script is one word where Slurm wants one, and is not empty."""
    c = cfg.cluster
    if c.executor is not Executor.slurm:
        return
    for name in (*_ONE_WORD, "comment", "network_interface", "python"):
        value = getattr(c, name)
        dotted = f"cluster.{name}"
        if value is None:
            continue
        if not value.strip():
            yield Problem(
                dotted, value, "must not be empty", f"Give {dotted}=<text>, or null to leave it out"
            )
        elif name in _ONE_WORD and not _WORD.fullmatch(value):
            yield Problem(dotted, value, "must hold no spaces", "Separate several with commas")
    for name, other in (("unpack", "unpack_to"), ("unpack_to", "unpack")):
        value, partner = getattr(c, name), getattr(c, other)
        if value is None:
            continue
        if partner is None:
            rule = f"needs cluster.{other} beside it"
            yield Problem(f"cluster.{name}", value, rule, f"Give cluster.{other}=<path>, or leave both out")
        elif not value.startswith("/"):
            rule = "must be an absolute path: every node reads it"
            yield Problem(f"cluster.{name}", value, rule, f"Give cluster.{name}=/<path>")
    for i, name in enumerate(c.modules):
        if not _MODULE.fullmatch(name):
            rule = "must be the name of one module, for example GCC/13.3.0"
            yield Problem(f"cluster.modules[{i}]", name, rule, "Correct the name; one list entry a module")
    depends = cfg.launch.dependency
    if depends is not None and not _DEPENDENCY.fullmatch(depends):
        rule = "is no dependency of Slurm's"
        yield Problem("launch.dependency", depends, rule, "Write afterok:123456, afterany:1:2 or singleton")


@reads("cluster.sbatch_args", "cluster.srun_args", "cluster.executor")
def options(cfg: Config) -> Iterator[Problem]:
    """Free options: long names; none that has a field, none that the launcher needs as it sets it."""
    if cfg.cluster.executor is not Executor.slurm:
        return
    for key, value in cfg.cluster.sbatch_args.items():
        name, dotted = key.replace("_", "-"), f"cluster.sbatch_args.{key}"
        if not re.fullmatch(r"[a-z][a-z0-9-]+", name):
            yield Problem(
                dotted, value, "is no long option of sbatch", "Write its name without --: qos, reservation"
            )
        else:
            yield from _not_ours(dotted, value, name)
    for i, text in enumerate(cfg.cluster.srun_args):
        dotted, name = f"cluster.srun_args[{i}]", text.split("=")[0].lstrip("-")
        if not re.fullmatch(r"--[a-z][a-z0-9-]+(=.*)?", text):
            rule = "must be a long option of srun with its value after ="
            yield Problem(dotted, text, rule, "Write it like --cpu-bind=verbose")
        else:
            yield from _not_ours(dotted, text, name)


def _not_ours(dotted: str, value: str, name: str) -> Iterator[Problem]:
    if name in _FIELDS:
        yield Problem(dotted, value, f"--{name} has a field of its own", f"Use {_FIELDS[name]}")
    elif _THE_LAUNCHERS.fullmatch(name):
        yield Problem(dotted, value, f"the launcher sets or needs --{name}", "Leave it out")


# ----------------------------------------------------------------------------------------------------- things together


@reads("cluster", "parallelism.gpus_per_node")
def enough_for_the_ranks(cfg: Config) -> Iterator[Problem]:
    """Every rank gets a GPU of the gres that is asked for, and cores for its threads."""
    c, ranks = cfg.cluster, cfg.parallelism.gpus_per_node
    if c.executor is not Executor.slurm:
        return
    for match in re.finditer(r"(?:^|,)(?:gres/)?gpu(?::[A-Za-z][\w.-]*)?(?::(\d+))?(?=,|\(|$)", c.gres or ""):
        gpus = int(match[1] or 1)
        if gpus < ranks:
            rule = (
                f"gives {gpus} GPU{'s' if gpus > 1 else ''} a node to parallelism.gpus_per_node={ranks} ranks"
            )
            yield Problem("cluster.gres", c.gres, rule, f"Take gpu:{ranks}, or {gpus} ranks a node")
    if c.cpus_per_task is not None and c.threads_per_rank > c.cpus_per_task:
        rule = f"is more than cluster.cpus_per_task={c.cpus_per_task}"
        yield Problem("cluster.threads_per_rank", c.threads_per_rank, rule, f"Take 1 to {c.cpus_per_task}")


@reads("cluster.offline", "tracking.mode", "cluster.executor")
def offline(cfg: Config) -> Iterator[Problem]:
    """Nodes without internet can't reach W&B."""
    if (
        cfg.cluster.executor is Executor.slurm
        and cfg.cluster.offline
        and cfg.tracking.mode is TrackingMode.online
    ):
        rule = f"the nodes of {cfg.cluster.name} have no internet (cluster.offline=true)"
        yield Problem("tracking.mode", "online", rule, "Take tracking=offline and upload afterwards")


@reads("cluster.numa_binding", "cluster.numa_required", "cluster.executor")
def numa(cfg: Config) -> Iterator[Problem]:
    """What must succeed has to be tried."""
    c = cfg.cluster
    if c.executor is Executor.slurm and c.numa_required and c.numa_binding is NumaBinding.none:
        rule = "requires a binding, and cluster.numa_binding=none asks for none"
        yield Problem("cluster.numa_required", True, rule, "Give cluster.numa_binding=cpu_and_memory")


RULES = [
    belongs_to_slurm,
    inside_an_allocation,
    time_limit,
    signal_margin,
    account,
    texts,
    options,
    enough_for_the_ranks,
    offline,
    numa,
]
