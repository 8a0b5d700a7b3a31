"""Weights & Biases on rank 0: a view of the run folder. Nothing that happens to it reaches the training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from europa_exp.runs.folder import RunFolder

if TYPE_CHECKING:
    from europa_exp.config.schema import Config


class Tracker:
    """Takes metrics for W&B. No method raises; when W&B breaks, the tracker falls silent and ``record`` says so."""

    record: dict[str, Any]

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Send the metrics of one step."""

    def finish(self, exit_code: int = 0) -> None:
        """Close the W&B run, in bounded time."""


def open_tracker(run: RunFolder, cfg: Config) -> Tracker:
    """Start W&B for this run as ``cfg.tracking`` says. Never raises."""
    return Tracker()
