"""A training step without data, without memory and without other ranks: what would its collectives carry?

The model is built, sharded and fitted with every mechanism as for a run, by the same code, and steps of the trainer run
(forward, recomputation, backward, gradient norm, optimizer). The second one counts: FSDP may gather otherwise in the first.
Tensors have shapes and no values (torch's `FakeTensorMode`), and collectives are done at once (torch's "fake" backend). So a
machine without an accelerator counts the bytes of a model that needs hundreds of them.

What differs from a real step, besides the values:

- Experts get equal numbers of tokens from every rank, as group-limited routing has it. Without it the all-to-all of the tokens
  carries the same bytes summed over the ranks, but each rank's share depends on the routing.
- Each row is one document. No collective depends on documents.
- A number that the host reads from a tensor (loss, gradient norm, a check for NaN) is zero.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # shapes of what collectives give
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torchtitan.distributed.utils import init_fake_mode

from europa_exp.comm.accounting import Kind, Traffic
from europa_exp.config import schema
from europa_exp.cpu import device
from europa_exp.training.assemble import build_trainer


def dry_step(cfg: schema.Config) -> dict[Kind, Traffic]:
    """What rank 0 hands to the collectives in one step of `cfg`, on all ranks that `cfg` asks for.

    Starts and ends a process group, so it wants a process of its own. 952B parameters on 384 ranks take seconds and 1 GiB.

    Args:
        cfg: a checked configuration.

    Raises:
        RuntimeError: there is an accelerator, whose kernels can't run on tensors without values; hide it
            (`CUDA_VISIBLE_DEVICES=`). Or this process has a process group already.
    """
    if device.has_accelerator():
        raise RuntimeError(
            "a dry step runs on the CPU: hide the accelerator, with CUDA_VISIBLE_DEVICES= for example"
        )
    if dist.is_initialized():
        raise RuntimeError("a dry step starts its own process group, and this process is in one already")
    # Nothing is reported; the trainer always reports step 1, so steps have later numbers here.
    cfg = replace(cfg, training=replace(cfg.training, log_every=2**31, checkpoint_every=0))
    # Backward on this thread: the modes below and torchtitan's meshes belong to a thread.
    torch.autograd.set_multithreading_enabled(False)
    init_fake_mode(cfg.parallelism.nodes * cfg.parallelism.gpus_per_node)
    try:
        with ExitStack() as without_values, tempfile.TemporaryDirectory() as folder:

            def prepare(model: nn.Module) -> None:
                _drop_what_needs_values(model, cfg)
                # From here on and not before: meshes are made of tensors with values.
                without_values.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
                without_values.enter_context(_UnknownNumbersAreZero())

            trainer, counter = build_trainer(cfg, Path(folder), prepare=prepare)
            rows = _rows(cfg.training)
            for trainer.step in (2, 3):
                counter.take()
                trainer.train_step(rows)
            return counter.take()
    finally:
        dist.destroy_process_group()


class _UnknownNumbersAreZero(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return 0.0 if args[0].dtype.is_floating_point else 0
        return func(*args, **(kwargs or {}))


def _rows(training: schema.Training) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
    """Batches of one document a row, in the form of the dataloader."""
    shape = training.local_batch_size, training.seq_len
    while True:
        tokens = torch.zeros(shape, dtype=torch.int64)
        positions = torch.arange(training.seq_len).repeat(training.local_batch_size, 1)
        yield {"input": tokens, "positions": positions}, torch.zeros_like(tokens)


def _drop_what_needs_values(model: Any, cfg: schema.Config) -> None:
    """Take out of `model` what can't be computed without values: the initialisation, the documents of a batch, and the
    numbers of tokens that ranks tell each other."""
    training = cfg.training
    model.init_weights = lambda **kwargs: None
    documents = model.get_attention_masks(torch.arange(training.seq_len).repeat(training.local_batch_size, 1))
    model.get_attention_masks = lambda positions: documents
    pairs = training.local_batch_size * training.seq_len * cfg.model.top_k

    def exchange_counts(sent: Tensor, received: Tensor, ranks: int) -> tuple[Tensor, list[int], list[int]]:
        splits = [pairs // ranks] * ranks
        splits[0] += pairs % ranks
        return received.reshape(-1), splits, splits

    for module in model.modules():
        dispatcher = getattr(module, "token_dispatcher", None)
        if dispatcher is not None:
            dispatcher._sync_token_count_exchange = exchange_counts
