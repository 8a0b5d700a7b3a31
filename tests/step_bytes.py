"""What the collectives of a step carry, counted on real ranks and in a dry step. For `run_ranks`."""

from __future__ import annotations

import logging
from pathlib import Path

from europa_exp.comm.accounting import Kind, Traffic
from europa_exp.config import io

Counts = dict[Kind, Traffic]


def real_counts(frozen: str, folder: str) -> list[Counts]:
    """Each step's counts of this rank, of a run of the configuration ``frozen`` (YAML)."""
    from europa_exp.training.assemble import build_trainer

    trainer, counter = build_trainer(io.from_yaml(frozen), Path(folder))
    steps: list[Counts] = []

    def take() -> dict[str, float]:
        steps.append(counter.take())
        return {}

    trainer.metrics_processor.attach([], take)
    trainer.train()
    trainer.close()
    return steps[1:]  # the first was taken when the clock started


def dry_counts(frozen: str) -> Counts:
    """The counts of a dry step of the configuration ``frozen`` (YAML); one process stands for all ranks."""
    from europa_exp.training.dry_step import dry_step

    # torchtitan warns that there is a process group already.
    logging.getLogger().setLevel(logging.ERROR)
    return dry_step(io.from_yaml(frozen))
