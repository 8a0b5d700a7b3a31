"""A lower bound of the memory of a rank, against what there is. What the bound refuses can't run; the rest may not fit either."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from europa_exp.config import counts
from europa_exp.config.counts import GIB
from europa_exp.config.errors import Problem
from europa_exp.config.rules import reads
from europa_exp.config.schema import Config, Executor, ExpertAllGather


@dataclass(frozen=True)
class Need:
    """Least bytes of one rank."""

    state: float
    """fp32 master weights, fp32 gradients and AdamW's two fp32 moments, sharded."""

    activations: float
    """Inputs of all layers; every kind of recomputation keeps them."""

    gathered: float
    """One layer's expert weights, gathered in the precision of the computation."""

    kept: float = 0
    """Dense weights of all layers that comm.node_local_reshard keeps for backward."""

    @property
    def total(self) -> float:
        return self.state + self.activations + self.gathered + self.kept

    def __str__(self) -> str:
        parts = [
            f"state {gib(self.state)}" if self.state else "",
            f"layer inputs {gib(self.activations)}" if self.activations else "",
            f"one layer's experts {gib(self.gathered)}" if self.gathered else "",
            f"dense weights kept in the node {gib(self.kept)}" if self.kept else "",
        ]
        return " + ".join(p for p in parts if p)


def need(cfg: Config) -> Need:
    """The lower bound of one rank, wherever it is kept."""
    width = counts.element_bytes(cfg.training.param_precision)
    kept = cfg.comm.node_local_reshard
    return Need(
        state=counts.state_bytes_per_rank(cfg.model, cfg.parallelism),
        activations=counts.boundary_activation_bytes(cfg.model, cfg.training),
        gathered=counts.expert_gather_bytes(cfg.model, cfg.parallelism, ExpertAllGather.bf16, width=width),
        kept=counts.node_local_bytes(cfg.model, cfg.parallelism, width=width) if kept else 0,
    )


def split(cfg: Config) -> tuple[Need, Need]:
    """The lower bound of one rank: on its device, on its host."""
    n = need(cfg)
    if cfg.offload.fsdp_cpu:
        return replace(n, state=0), Need(n.state, 0, 0)
    return n, Need(0, 0, 0)


def machine_bytes() -> int | None:
    """Memory of this machine, or what a container leaves of it; None where the system doesn't tell."""
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        limit = "max"
    return min(total, int(limit)) if limit.isdigit() else total


@reads(
    "model",
    "parallelism",
    "comm.node_local_reshard",
    "offload",
    "training.seq_len",
    "training.local_batch_size",
    "training.param_precision",
    "cluster.executor",
    "cluster.device_memory_gib",
    "cluster.host_memory_gib",
)
def memory(cfg: Config) -> Iterator[Problem]:
    """State, layer inputs, one layer's experts and kept dense weights fit where they are."""
    cluster, local = cfg.cluster, cfg.cluster.executor is Executor.local
    on_device, on_host = split(cfg)
    if cluster.device_memory_gib is not None:
        if on_device.total > cluster.device_memory_gib * GIB:
            yield Problem(
                "cluster.device_memory_gib",
                cluster.device_memory_gib,
                f"a rank needs at least {gib(on_device.total)} on its device ({on_device})",
                _way_out(cfg, on_device, "correct cluster.device_memory_gib"),
            )
    elif local:
        on_host = need(
            cfg
        )  # nothing is known of an accelerator, so all of it lies in the memory of this machine
    if cluster.host_memory_gib is not None:
        if on_host.total > cluster.host_memory_gib * GIB:
            yield Problem(
                "cluster.host_memory_gib",
                cluster.host_memory_gib,
                f"a rank needs at least {gib(on_host.total)} on its host ({on_host})",
                _way_out(cfg, on_host, "correct cluster.host_memory_gib"),
            )
        return
    ranks, have = cfg.parallelism.nodes * cfg.parallelism.gpus_per_node, machine_bytes()
    if local and have is not None and ranks * on_host.total > have:
        yield Problem(
            "model.flavor",
            cfg.model.flavor,
            f"its {ranks} ranks need at least {gib(ranks * on_host.total)} of memory, {gib(on_host.total)} each "
            f"({on_host}), and this machine has {gib(have)}",
            _way_out(
                cfg, on_host, "give cluster.device_memory_gib if the ranks have accelerators", local=True
            ),
        )


def _way_out(cfg: Config, n: Need, last: str, *, local: bool = False) -> str:
    """What makes the largest part smaller."""
    if n.state >= max(n.activations, n.gathered):
        # On one machine the sum over the ranks stays the same however many there are.
        ways = [] if local else ["shard over more ranks (parallelism.data_parallel_shard_degree)"]
        if not local and cfg.cluster.device_memory_gib is not None and not cfg.offload.fsdp_cpu:
            ways.append("keep the state on the host (offload.fsdp_cpu=true)")
    elif n.activations >= n.gathered:
        ways = [
            f"shorten training.seq_len={cfg.training.seq_len} "
            f"or training.local_batch_size={cfg.training.local_batch_size}"
        ]
    else:
        ways = [f"raise parallelism.expert_parallel_degree={cfg.parallelism.expert_parallel_degree}"]
    if n.kept:
        ways.append("free the dense weights after forward (comm.node_local_reshard=false)")
    small = ["take a smaller model (model=debug)"] if local else []
    text = ", or ".join([*small, *ways, last])
    return text[0].upper() + text[1:]


def gib(n: float) -> str:
    """Bytes as GiB with three digits that count."""
    value = n / GIB
    return f"{value:,.0f} GiB" if value >= 100 else f"{value:.3g} GiB"


RULES = [memory]
