"""torchtitan's ``Trainer`` with our metrics; the training loop itself is upstream's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
import torchtitan.trainer
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.trainer import Trainer

from europa_exp.comm.fsdp_groups import groups
from europa_exp.comm.gradient_norm import GradientNorm
from europa_exp.config import counts, schema
from europa_exp.data.packing import segment_lengths
from europa_exp.training.metrics import RunMetrics
from europa_exp.training.stopping import Agreement, NonFiniteLossError, Stopped


class EuropaTrainer(Trainer):
    """A ``Trainer`` that counts the work of packed rows and starts its clock when training starts.

    Args:
        config: torchtitan's configuration, see ``trainer_config``; its metrics are :class:`RunMetrics`.
        model: our description of the model, for the count of floating-point operations.
        norm: computes the gradient norm during the backward pass, from the first step on; without it torchtitan computes it
            afterwards.
    """

    metrics_processor: RunMetrics

    def __init__(self, config: Trainer.Config, model: schema.Model, norm: GradientNorm | None = None) -> None:
        super().__init__(config)
        self._model = model
        self._norm = norm
        (part,) = self.model_parts
        self._fsdp_groups = list(dict.fromkeys(pg for group in groups(part) for pg in group.process_groups))
        self._set_init_timeout()
        if norm is not None:
            norm.install(part, accumulates=self.gradient_accumulation_steps > 1)
        self._agreement: Agreement | None = None
        self._stopping = False

    def _set_init_timeout(self) -> None:
        """Give all process groups the time-out that holds until the first step is done. torchtitan gives it to the default
        group alone; the others are made with a default of torch's."""
        timeout = timedelta(seconds=self.config.comm.init_timeout_seconds)
        meshes = self.parallel_dims.get_all_one_dimensional_meshes().values()
        for group in [*(mesh.get_group() for mesh in meshes), *self._fsdp_groups]:
            dist.set_timeout(timeout, group)

    def stop_when(self, asked: Callable[[], bool]) -> None:
        """From now on, all ranks save and stop between two steps once ``asked()`` is true on one of them.

        Every rank has to call this, or none. ``train`` then raises ``Stopped``.
        """
        self._agreement = Agreement(asked)

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
        """Train to the last step; see ``Trainer.train``.

        Raises:
            Stopped: the ranks were asked to stop (see ``stop_when``) and did, after the same step.
            NonFiniteLossError: the loss is NaN or infinite.
        """
        with _barrier_instead_of_sleep(), _train_timeout_for(self._fsdp_groups):
            super().train()
        if dist.get_rank() != 0:
            dist.barrier()
        if self._stopping:
            raise Stopped(self.step, saved=self._saves and self.step > 0)

    def train_step(self, data_iterator: Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]) -> None:
        """One step, with random numbers that depend on the seed and the step alone: a resumed run draws those of an unbroken
        one, on any number of ranks."""
        torch.manual_seed((self.config.debug.seed or 0) * 1_000_003 + self.step)
        try:
            with nullcontext() if self._norm is None else _clipping_with(self._norm):
                super().train_step(data_iterator)
        except RuntimeError as error:
            if str(error).startswith("Loss is not finite"):
                raise NonFiniteLossError(str(error)) from error
            raise

    def should_continue_training(self) -> bool:
        """Whether there is a step left and nobody wants to stop; the first call (after a checkpoint was loaded) starts the
        clock."""
        if not self._clock_started:
            self._clock_started = True
            self._first_step = self.step
            if self.step:
                self._count_tokens()
            self.metrics_processor.start(self.step)
        if not super().should_continue_training():
            if self._agreement is not None:
                self._agreement.finish()
            return False
        if self._agreement is not None and self._agreement.reached():
            self._save_now()
            self._stopping = True
            return False
        return True

    _clock_started = False
    _first_step = 0

    @property
    def _saves(self) -> bool:
        return bool(self.checkpointer.enable) and not self.checkpointer.load_only

    def _save_now(self) -> None:
        """Save the step that is done, unless a checkpoint of it is there or being written already."""
        done = self.step == self._first_step or self.step % self.config.checkpoint.interval == 0
        if self._saves and not done:
            self.checkpointer.save(self.step, last_step=True)
        self.checkpointer.maybe_wait_for_saving()

    def _count_tokens(self) -> None:
        """Take the tokens seen from the place in the data. A checkpoint holds one rank's count, which means something else
        on another number of ranks."""
        state = self.dataloader.state_dict()
        if "position" in state:
            ranks = self.parallel_dims.dp_replicate * self.parallel_dims.dp_shard
            self.ntokens_seen = state["position"] // ranks


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


@contextmanager
def _train_timeout_for(process_groups: Sequence[dist.ProcessGroup]) -> Iterator[None]:
    """After the first step torchtitan lowers the time-out of the groups of its own meshes, by one call of
    ``dist_utils.set_pg_timeouts``; these groups follow it. To be dropped when upstream goes by the groups that there are.

    The group of asynchronous checkpoints stays as it is: there a rank waits until the slowest has written its part.
    """
    original = dist_utils.set_pg_timeouts

    def set_pg_timeouts(timeout: timedelta, parallel_dims: ParallelDims) -> None:
        original(timeout, parallel_dims)  # with a barrier first: no rank is still under the longer time-out
        for group in process_groups:
            dist.set_timeout(timeout, group)

    dist_utils.set_pg_timeouts = set_pg_timeouts
    try:
        yield
    finally:
        dist_utils.set_pg_timeouts = original


@contextmanager
def _clipping_with(norm: GradientNorm) -> Iterator[None]:
    """A step whose gradients are clipped by ``norm``. ``Trainer.train_step`` computes the norm and clips by one call of
    torchtitan's ``dist_utils.clip_grad_norm_``, which is ours for the step. To be dropped when upstream's trainer has a method
    for it that can be overridden."""

    def clip_grad_norm_(
        parameters: Sequence[torch.Tensor], max_norm: float, *, foreach: bool, pp_mesh: None, ep_enabled: bool
    ) -> torch.Tensor:
        return norm.clip_(parameters, max_norm, foreach=foreach)

    original = dist_utils.clip_grad_norm_
    dist_utils.clip_grad_norm_ = clip_grad_norm_
    try:
        with norm.step():
            yield
    finally:
        dist_utils.clip_grad_norm_ = original
