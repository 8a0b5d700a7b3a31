"""Calls, bytes and seconds of collectives: what one row is about, and how rows add up."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from .collective_timer import CollectiveTimer

GIB = 2**30
TOKENS = "tokens"
"""The role of routed tokens; all other traffic is of parameters and their gradients."""


class Collective(Enum):
    all_gather = "all_gather"
    reduce_scatter = "reduce_scatter"
    all_reduce = "all_reduce"
    all_to_all = "all_to_all"


class Kind(NamedTuple):
    """What one row of the count is about.

    `role` is expert, dense, mixed or tokens. `group` names the process group: the mesh dimension that it spans (`dp_shard`,
    `efsdp`, `node`, `dp_replicate`, `ep`, ...), `world`, or else its ranks; `ranks` is its size.
    """

    collective: Collective
    role: str
    dtype: str
    ranks: int
    group: str


@dataclass
class Traffic:
    """Calls, and bytes of their inputs, of one kind; seconds where they were measured."""

    calls: int = 0
    handed_bytes: int = 0
    seconds: float | None = None

    def sent_bytes(self, kind: Kind) -> int:
        """Estimate of the bytes that left this rank, with the ring algorithms (for all-to-all: evenly spread tokens).

        Factors of the input: all-gather n-1, reduce-scatter and all-to-all (n-1)/n, all-reduce 2(n-1)/n, for n ranks.
        gloo sends twice as much for a reduce-scatter: it all-reduces a copy of the whole input and keeps its part.
        """
        others = kind.ranks - 1
        if kind.collective is Collective.all_gather:
            return self.handed_bytes * others
        factor = 2 if kind.collective is Collective.all_reduce else 1
        return self.handed_bytes * others * factor // kind.ranks


class Tally:
    """Sums of `add` by kind; `take` hands them over and starts again from zero."""

    def __init__(self) -> None:
        self._counts: dict[Kind, Traffic] = {}
        self.timer: CollectiveTimer[Kind] | None = None
        """Measures what is counted; None where no times are measured."""

    def add(self, collective: Collective, role: str, tensor: Tensor, ranks: int, group: str) -> Kind:
        """Count one call that this rank hands `tensor` to; returns the row that it is in."""
        kind = Kind(collective, role, str(tensor.dtype).removeprefix("torch."), ranks, group)
        traffic = self._counts.setdefault(kind, Traffic())
        traffic.calls += 1
        traffic.handed_bytes += tensor.numel() * tensor.element_size()
        return kind

    def take(self) -> dict[Kind, Traffic]:
        """What was counted since the last call, by kind. With times, it waits until the device has done what was counted."""
        counts, self._counts = self._counts, {}
        for kind, seconds in {} if self.timer is None else self.timer.take().items():
            counts.setdefault(kind, Traffic()).seconds = seconds
        return counts


def step_metrics(counts: dict[Kind, Traffic]) -> dict[str, float]:
    """`take()` as metrics of a step, in GiB that left this rank (`Traffic.sent_bytes`).

    `comm/all_gather_sent_gib` (parameters), `comm/reduce_sent_gib` (gradients, whatever carries them, and the all-reduce across
    replicas), `comm/all_to_all_sent_gib` (routed tokens). What was not called is absent. Sent, not handed over: a gather inside
    a node is handed more than one over all ranks, and sends less.
    """
    metrics: dict[str, float] = {}
    for kind, traffic in counts.items():
        if kind.role == TOKENS:
            name = "comm/all_to_all_sent_gib"
        elif kind.collective is Collective.all_gather:
            name = "comm/all_gather_sent_gib"
        else:
            name = "comm/reduce_sent_gib"
        metrics[name] = metrics.get(name, 0.0) + traffic.sent_bytes(kind) / GIB
    return metrics


def group_name(process_group: dist.ProcessGroup) -> str:
    """A readable name of a process group that belongs to no named mesh dimension; the same on all ranks where torch has one.

    Otherwise its ranks: `0-3`, `0-12:4` (every fourth), `0,1,5`.
    """
    name = process_group.group_desc.removeprefix("mesh_")
    if name in ("default_pg", "default"):
        return "world"
    if name and name != "undefined" and not name.startswith("dim_"):
        return name
    ranks = dist.get_process_group_ranks(process_group)
    steps = {after - before for before, after in pairwise(ranks)}
    if len(steps) != 1:
        return ",".join(map(str, ranks))
    (step,) = steps
    return f"{ranks[0]}-{ranks[-1]}" + (f":{step}" if step > 1 else "")
