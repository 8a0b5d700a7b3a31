"""Rules of what stays gathered between forward and backward, and where."""

from __future__ import annotations

from collections.abc import Iterator

from europa_exp.config.errors import Problem
from europa_exp.config.rules import reads
from europa_exp.config.schema import Config, ReshardAfterForward


@reads("comm.node_local_reshard", "parallelism.gpus_per_node", "parallelism.data_parallel_shard_degree")
def node_local_mesh(cfg: Config) -> Iterator[Problem]:
    """The shard ranks are several whole nodes of several GPUs."""
    if not cfg.comm.node_local_reshard:
        return
    shard, per_node = cfg.parallelism.data_parallel_shard_degree, cfg.parallelism.gpus_per_node
    if per_node == 1:
        yield _node_local(
            "needs nodes of 2 GPUs or more: with parallelism.gpus_per_node=1 a rank would keep all dense weights whole"
        )
    elif shard % per_node:
        yield _node_local(
            f"needs whole nodes: parallelism.data_parallel_shard_degree={shard} must be a multiple of "
            f"parallelism.gpus_per_node={per_node} ({shard} % {per_node} = {shard % per_node})",
            f"choose a shard degree of several whole nodes ({2 * per_node}, {3 * per_node}, ...)",
        )
    elif shard == per_node:
        yield _node_local(
            f"has nothing to gain: all parallelism.data_parallel_shard_degree={shard} ranks are in one node already"
        )


@reads("comm.node_local_reshard", "parallelism.expert_parallel_degree")
def node_local_experts(cfg: Config) -> Iterator[Problem]:
    """Experts are in an FSDP group of their own, because they must not stay."""
    if cfg.comm.node_local_reshard and cfg.parallelism.expert_parallel_degree == 1:
        yield _node_local(
            "needs experts apart from the dense weights, and with parallelism.expert_parallel_degree=1 FSDP gathers and frees "
            "both together",
            "choose an expert parallel degree of 2 or more",
        )


@reads("comm", "parallelism.reshard_after_forward")
def nothing_gathered_again(cfg: Config) -> Iterator[Problem]:
    """What changes the second gather needs one."""
    if cfg.parallelism.reshard_after_forward is not ReshardAfterForward.never:
        return
    why = "changes what is gathered for backward, and with parallelism.reshard_after_forward=never nothing is"
    other = "choose parallelism.reshard_after_forward=default"
    if cfg.comm.node_local_reshard:
        yield _node_local(why, other)
    if not cfg.comm.embedding_gather_in_backward:
        yield Problem(
            "comm.embedding_gather_in_backward",
            False,
            why,
            f"Set comm.embedding_gather_in_backward=true, or {other}",
        )


def _node_local(why: str, other: str = "") -> Problem:
    way_out = "Set comm.node_local_reshard=false"
    return Problem("comm.node_local_reshard", True, why, f"{way_out}, or {other}" if other else way_out)


RULES = [node_local_mesh, node_local_experts, nothing_gathered_again]
