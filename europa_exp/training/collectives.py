"""From what each rank counted to the table of a logged step."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from europa_exp.comm.traffic import Kind, Tally, Traffic, step_metrics
from europa_exp.runs.collectives import CollectivesWriter, Row


class CollectiveTables:
    """Hands the counts of a logged step to both of its readers: sums to the metrics, a table over the ranks to its record.

    Args:
        counter: of this rank.
        writer: of the record, on rank 0.
    """

    def __init__(self, counter: Tally, writer: CollectivesWriter | None) -> None:
        self._counter = counter
        self._writer = writer
        self._counts: dict[Kind, Traffic] = {}

    def take(self) -> dict[str, float]:
        """The metrics of what was counted since the last call."""
        self._counts = self._counter.take()
        return step_metrics(self._counts)

    def record(self, step: int, steps: int) -> None:
        """Record what was taken last as the table of ``step``, averaged over ``steps``; called by every rank."""
        first = dist.get_rank() == 0
        ranks: list[dict[Kind, Traffic]] = [{} for _ in range(dist.get_world_size())] if first else []
        dist.gather_object(self._counts, ranks if first else None)
        if self._writer is not None:
            self._writer.write(step, steps, len(ranks), rows(ranks, steps))


def rows(ranks: Sequence[dict[Kind, Traffic]], steps: int) -> list[Row]:
    """The rows of a table, per step, from the counts of all ranks over ``steps`` steps.

    The values are those of the first rank, and the largest ones. A kind that only other ranks have counts zero calls.
    """
    kinds = {kind for rank in ranks for kind in rank}
    found = []
    for kind in sorted(kinds, key=lambda kind: (kind.collective.value, *kind[1:])):
        mine = ranks[0].get(kind, Traffic())
        everyone = [rank[kind] for rank in ranks if kind in rank]
        times = [traffic.seconds for traffic in everyone if traffic.seconds is not None]
        found.append(
            Row(
                collective=kind.collective.value,
                role=kind.role,
                group=kind.group,
                ranks=kind.ranks,
                dtype=kind.dtype,
                calls=_per_step(mine.calls, steps),
                bytes=_per_step(mine.handed_bytes, steps),
                sent_bytes=_per_step(mine.sent_bytes(kind), steps),
                max_bytes=_per_step(max(traffic.handed_bytes for traffic in everyone), steps),
                seconds=None if mine.seconds is None else mine.seconds / steps,
                max_seconds=max(times) / steps if times else None,
            )
        )
    return found


def _per_step(count: int, steps: int) -> float:
    return count // steps if count % steps == 0 else count / steps
