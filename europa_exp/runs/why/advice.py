"""What to do next."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from europa_exp.runs import checkpoints, commands
from europa_exp.runs.why.case import Case
from europa_exp.runs.why.evidence import MEMORY
from europa_exp.runs.why.explanation import Cause

_FOR_EVERY_RUN = {
    Cause.device_memory: (
        "Less per accelerator: a smaller training.local_batch_size or training.seq_len, more recomputation, more ranks to "
        "shard over, or offload",
        "If much is reserved but not allocated: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in cluster.env",
    ),
    Cause.disk_full: (
        "Free some space, or choose another place: launch.runs_dir. JSC: `jutil project dataquota -p PROJECT` (inodes, too)",
        "Fewer checkpoints: training.checkpoint_keep; or another place for them: cluster.checkpoint_dir",
    ),
    Cause.node_failure: (
        "The run is not to blame. `sinfo -R` names nodes that are down, and why; run it again, without that node "
        "(cluster.exclude) if it comes back bad",
    ),
    Cause.preempted: ("cluster.requeue=true and cluster.max_attempts let a run go on after that",),
    Cause.memory_floor: (
        "The nodes are left out of this sweep's next jobs; tell the site, they need a reboot",
    ),
}


def next_steps(case: Case, cause: Cause, rank: int | None = None) -> tuple[str, ...]:
    """What helps against a cause; empty where that hangs on more than the cause."""
    run = case.run
    if cause is Cause.host_memory:
        return _more_host_memory(case)
    if cause is Cause.time_limit:
        return _more_time(case)
    if cause is Cause.non_finite_loss:
        return (
            f"{commands.about(run, 'show')}: when loss and gradient norm began to move; a lower learning rate, a longer warm-up, or "
            "clipping. It is not tried again by itself",
        )
    if cause is Cause.bad_configuration:
        return (f"Change what the message names and run it again: {commands.rerun(run, 'FIELD=VALUE')}",)
    if cause is Cause.exception:
        return (
            f"{commands.about(run, 'logs', *_of_rank(rank))} has the whole traceback. It is not tried again by itself",
        )
    return _FOR_EVERY_RUN.get(cause, ())


def _more_host_memory(case: Case) -> tuple[str, ...]:
    less = "Fewer offloaded or pinned bytes on the host, or a cluster.memory_floor_gib that avoids nodes with too little"
    if not (case.run.path / MEMORY).exists():
        return (less,)
    return less, f"{case.run.name}/{MEMORY} has what each rank found free at its start"


def _more_time(case: Case) -> tuple[str, ...]:
    longer = (
        "Raise cluster.time_limit, or let the run go on by itself: cluster.requeue=true, cluster.max_attempts, and a"
        " cluster.signal_margin_s that is long enough for a checkpoint"
    )
    if checkpoints.newest(case.run.checkpoints) is not None:
        return (longer,)
    return longer, "It has no checkpoint, so nothing of it can be continued: training.checkpoint_every=N"


def after_a_timeout(case: Case, behind: Sequence[int]) -> tuple[str, ...]:
    """Where to look when a collective timed out, with the ranks that did not arrive if they are known."""
    return (
        f"{commands.about(case.run, 'logs', '--rank', str(behind[0]))}: what it did instead"
        if behind
        else "No rank could be named; compare where the logs of the ranks end",
        "Nodes that are in this again and again belong into cluster.exclude",
    )


def where_to_look(case: Case, rank: int | None = None) -> tuple[str, ...]:
    """The places that may know more, when the cause is not known."""
    logs = commands.about(case.run, "logs", *_of_rank(rank))
    found = [f"Look at: {logs}; {commands.about(case.run, 'logs', '--launcher')}"]
    if job := case.status.extra.get("job_id"):
        node = case.node(rank)
        on = f"; dmesg and slurmd's log on {node}" if node else ""
        found.append(f"sacct -j {shlex.quote(str(job))} -o JobID,State,ExitCode,NodeList,Reason{on}")
    return tuple(found)


def _of_rank(rank: int | None) -> tuple[str, ...]:
    return ("--rank", str(rank)) if rank else ()  # europa logs shows rank 0 by itself
