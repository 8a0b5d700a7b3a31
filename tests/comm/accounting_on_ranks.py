"""What a rank's counter says of a step; functions that tests run on several ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from sharded_moe import Case, sharded
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from europa_exp.comm.accounting import CollectiveCounter, Kind, Traffic, step_metrics
from europa_exp.comm.bf16_all_to_all import apply_bf16_all_to_all
from europa_exp.comm.fp8_all_gather import apply_fp8_all_gather
from europa_exp.comm.fsdp_groups import Group, add_all_reduce_hook, groups
from europa_exp.comm.node_local_reshard import apply_node_local_reshard
from europa_exp.comm.traffic import group_name

MECHANISMS: dict[str, Callable[[torch.nn.Module], Any]] = {
    "fp8": apply_fp8_all_gather,
    "a2a": apply_bf16_all_to_all,
    "node": lambda model: apply_node_local_reshard(model, 2),
}
MILLISECONDS = {
    "all_gather_single": 1,
    "reduce_scatter_single": 10,
    "all_to_all_single": 100,
    "all_reduce": 1000,
}
"""How long a collective takes on the clock of `Collectives`."""

Rows = dict[Kind, Traffic]


class Collectives:
    """While active, sums up the bytes of torch.distributed's calls, and lets each take its time on a clock of its own."""

    def __init__(self) -> None:
        self.bytes: dict[str, int] = {}
        self.now = 0.0
        self.events = 0

    @contextmanager
    def active(self) -> Iterator[None]:
        originals = {name: getattr(dist, name) for name in MILLISECONDS}
        for name, original in originals.items():
            setattr(dist, name, self._watched(name, original))
        try:
            yield
        finally:
            for name, original in originals.items():
                setattr(dist, name, original)

    def event(self) -> Event:
        self.events += 1
        return Event(self)

    def _watched(self, name: str, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            given = kwargs.get(
                "input", kwargs.get("input_tensor", args[min(len(args), 2) - 1] if args else None)
            )
            self.bytes[name] = self.bytes.get(name, 0) + given.nbytes
            work = original(*args, **kwargs)
            if isinstance(work, dist.Work):
                return _Later(work, lambda: self._pass(name))
            self._pass(name)
            return work

        return call

    def _pass(self, name: str) -> None:
        self.now += MILLISECONDS[name]


class Event:
    """An event of that clock, in place of CUDA's."""

    def __init__(self, clock: Collectives) -> None:
        self._clock = clock

    def record(self, stream: Any = None) -> None:
        self.at = self._clock.now

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Event) -> float:
        return end.at - self.at


class _Later(dist.Work):
    def __init__(self, work: dist.Work, done: Callable[[], None]) -> None:
        super().__init__()
        self._work, self._done = work, done

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._done()
        return self._work.wait()


def step(case: Case, mechanisms: Sequence[str], steps: int = 1, timed: bool = True) -> dict[str, Any]:
    """What is counted in the last of `steps` steps, and the bytes of the calls themselves."""
    model, _ = sharded(case)
    for name in mechanisms:
        MECHANISMS[name](model)
    clock = Collectives()
    counter = CollectiveCounter(timed, clock.event)
    counter.install(model)
    reduced: list[int] = []  # another hook beside the counter's
    for group in groups(model):
        add_all_reduce_hook(group, lambda gradients: reduced.append(gradients.numel()))
    x = torch.randn(16, case.width, dtype=case.param_dtype)
    rows: Rows = {}
    with clock.active():
        for _ in range(steps):
            clock.bytes.clear()
            reduced.clear()
            model(x).float().sum().backward()
            rows = counter.take()
    return {
        "rows": rows,
        "metrics": step_metrics(rows),
        "bytes": clock.bytes,
        "events": clock.events,
        "reduced": len(reduced),
        "groups": len(groups(model)),
    }


def names() -> dict[str, str]:
    """Names of process groups on four ranks, as this rank sees them."""
    dist.init_process_group("gloo")
    named = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    unnamed = init_device_mesh("cpu", (2, 2))
    model = torch.nn.Linear(4, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    (group,) = groups(model)
    odd = dist.new_group([0, 1, 3])
    return {
        "all": group_name(dist.group.WORLD),
        "named": group_name(named.get_group("inner")),
        "neighbours": group_name(unnamed.get_group(1)),
        "every second": group_name(unnamed.get_group(0)),
        "described": group_name(dist.new_group([0, 1, 2, 3], group_desc="replay")),
        "irregular": group_name(odd) if dist.get_rank() != 2 else "",
        "of a group": str(group.dimension(dist.group.WORLD)),
    }


def timers(case: Case) -> dict[str, bool]:
    """Whether a counter measures times, by the device that the model says it is on."""
    found = {}
    for device in ("cpu", "cuda"):
        Group.device = property(lambda _, device=device: torch.device(device))
        model, _ = sharded(case)
        counter = CollectiveCounter(timed=True)
        counter.install(model)
        found[device] = counter.timer is not None
    return found
