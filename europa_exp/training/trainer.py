"""torchtitan's ``Trainer`` with our metrics; the training loop itself is upstream's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torchtitan.trainer
from torchtitan.trainer import Trainer

from europa_exp.config import counts, schema
from europa_exp.data.packing import segment_lengths
from europa_exp.training.metrics import RunMetrics


class EuropaTrainer(Trainer):
    """A ``Trainer`` that counts the work of packed rows and starts its clock when training starts.

    Args:
        config: torchtitan's configuration, see ``trainer_config``; its metrics are :class:`RunMetrics`.
        model: our description of the model, for the count of floating-point operations.
    """

    metrics_processor: RunMetrics

    def __init__(self, config: Trainer.Config, model: schema.Model) -> None:
        super().__init__(config)
        self._model = model

    def batch_generator(
        self, data_iterable: Iterable[tuple[dict[str, torch.Tensor], torch.Tensor]]
    ) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """Yield batches and count their floating-point operations, while positions are still on the host."""
        for input_dict, labels in super().batch_generator(data_iterable):
            self.metrics_processor.count_flops(
                counts.flops(self._model, segment_lengths(input_dict["positions"]))
            )
            yield input_dict, labels

    def train(self) -> None:
        """Train to the last step; see ``Trainer.train``."""
        with _barrier_instead_of_sleep():
            super().train()
        if dist.get_rank() != 0:
            dist.barrier()

    def should_continue_training(self) -> bool:
        """Whether there is a step left; the first call (after a checkpoint was loaded) starts the clock."""
        if not self._clock_started:
            self._clock_started = True
            self.metrics_processor.start(self.step)
        return super().should_continue_training()

    _clock_started = False


@contextmanager
def _barrier_instead_of_sleep() -> Iterator[None]:
    """At the end of training, rank 0 of torchtitan sleeps two seconds so that the other ranks can finish; a barrier waits
    just as long as they need. To be dropped when upstream waits by a collective."""

    class Time:
        perf_counter = staticmethod(torchtitan.trainer.time.perf_counter)

        @staticmethod
        def sleep(seconds: float) -> None:
            dist.barrier()

    original = torchtitan.trainer.time
    torchtitan.trainer.time = Time
    try:
        yield
    finally:
        torchtitan.trainer.time = original
