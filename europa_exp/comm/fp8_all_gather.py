"""All-gather of expert weights in FP8: half the bytes on the wire, everything else of FSDP as it is.

Each rank quantises its shard (in the dtype that FSDP gathers in: bf16 under mixed precision, fp32 without), the codes and
scales travel as bytes, every rank dequantises all shards, its own too, so that all ranks compute with the same weights.
Master weights, gradients and optimizer state are untouched.

Only expert weights are quantised. Where FSDP packs dense parameters into the same group (no expert parallelism), those ride
in the same message as they are. Blocks of 128 never span two parameters or two ranks.

Nothing is gathered, and so nothing quantised, when a group has one rank: FSDP then uses its shard directly.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather

from .fp8_format import BLOCK, DTYPES, SCALE_BYTES, block_count
from .fp8_quant import dequantise_into, quantise_into
from .fsdp_groups import EXPERT_PARAMETERS, Group, Segment, chain, groups, set_all_gather
from .work import FinishingWork

logger = logging.getLogger(__name__)

# Parts of a message start on multiples of this, so that kernels can use their widest loads.
_ALIGNMENT = 16


def apply_fp8_all_gather(model: nn.Module) -> int:
    """Gather the expert weights of `model` in FP8 from now on, forward and backward.

    Call it once the model is sharded with FSDP, before or after weights are initialised. Calling it again changes nothing.

    Returns:
        The number of FSDP parameter groups with expert weights (one a MoE layer).

    Raises:
        ValueError: no FSDP parameter group holds expert weights.
    """
    experts = [group for group in groups(model) if any(segment.expert for segment in group.segments())]
    if not experts:
        raise ValueError(
            "comm.expert_all_gather: fp8 needs a model whose experts are sharded with FSDP, and no FSDP parameter group holds "
            f"parameters named {', '.join(sorted(EXPERT_PARAMETERS))}; shard an MoE model first, or use comm=bf16"
        )
    for group in experts:
        if not any(isinstance(comm, FP8AllGather) for comm in chain(group.all_gather)):
            set_all_gather(group, FP8AllGather.of(group))
    if all(group.shards == 1 for group in experts):
        logger.warning(
            "comm.expert_all_gather=fp8 has no effect: each rank holds its experts whole (expert_parallel_degree = "
            "data_parallel_shard_degree), so expert weights are never gathered"
        )
    return len(experts)


class FP8AllGather(AllGather):
    """FSDP's all-gather of one flat buffer with its expert segments in FP8.

    Args:
        segments: what the flat buffer holds now, in order (asked at every gather: FSDP may keep larger shards after forward).
        inner: the all-gather that moves the bytes, in place in a buffer that it allocates itself.

    On CUDA all work is queued on the stream that FSDP calls on and waits on:
    - synchronous: FSDP calls within its all-gather stream. Quantise, gather and dequantise run there in order, and the event
      that FSDP records after the call covers all three. The message buffer is allocated, used and freed in that stream.
    - asynchronous: FSDP calls on the current (compute) stream and waits on it just before it needs the parameters. The message
      is quantised at the call and dequantised at the wait; until then the returned work keeps its buffers alive.
    So no buffer here is used on a stream other than the one that allocated it, but for NCCL's own, which keeps its tensors
    itself until a wait; `record_stream` is not needed.
    """

    def __init__(self, segments: Callable[[], Sequence[Segment]], inner: AllGather) -> None:
        self.segments = segments
        self.inner = inner

    @classmethod
    def of(cls, group: Group) -> FP8AllGather:
        """For `group`, over the all-gather that it uses now."""
        return cls(group.segments, group.all_gather)

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        # FSDP's flat buffer of all shards. It never travels, so it needs none of `inner`'s special memory.
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        if input_tensor.dtype not in DTYPES:
            raise TypeError(
                f"comm.expert_all_gather: fp8 gathers float32 or bfloat16 shards, and FSDP hands over {input_tensor.dtype} "
                "(parameters of several dtypes in one group arrive as bytes); use comm=bf16"
            )
        layout = WireLayout.of(tuple(self.segments()), input_tensor.element_size())
        if layout.numel != input_tensor.numel():
            raise RuntimeError(
                f"FP8 all-gather: FSDP hands over {input_tensor.numel()} values for parameters of {layout.numel} values; "
                "tensor subclasses with their own all-gather can't be combined with comm=fp8"
            )
        ranks = group.size()
        buffer = self.inner.allocate((ranks * layout.nbytes,), dtype=torch.uint8, device=input_tensor.device)
        messages = buffer.view(ranks, layout.nbytes)
        message = messages[group.rank()]
        layout.pack(input_tensor.view(1, -1), message.view(1, -1))
        work = self.inner(output_tensor=buffer, input_tensor=message, group=group, async_op=async_op)

        def dequantise() -> None:
            layout.unpack(messages, output_tensor.view(ranks, -1))

        if isinstance(work, dist.Work):
            return FinishingWork(work, dequantise)
        dequantise()
        return None


@dataclass(frozen=True)
class _Run:
    """Neighbouring segments that are treated alike, with their place in the shard (values) and in the message (bytes)."""

    start: int
    numel: int
    quantised: bool
    data: int
    scales: int = 0


class WireLayout:
    """How one rank's shard of a group lies in its message: scales, then plain values, then codes; all aligned to 16 bytes.

    All ranks of a group have shards of the same size (FSDP pads), so one layout serves all messages.
    """

    def __init__(self, segments: tuple[Segment, ...], element_size: int) -> None:
        self.numel = sum(segment.numel for segment in segments)
        pieces = _merge(segments)
        end = 0

        def place(nbytes: int) -> int:
            nonlocal end
            start = end
            end += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
            return start

        scales = {piece: place(SCALE_BYTES * block_count(piece[1])) for piece in pieces if piece[2]}
        plain = {piece: place(element_size * piece[1]) for piece in pieces if not piece[2]}
        codes = {piece: place(piece[1]) for piece in pieces if piece[2]}
        self.nbytes = end
        self._element_size = element_size
        self._runs = [
            _Run(*piece, data=(codes | plain)[piece], scales=scales.get(piece, 0)) for piece in pieces
        ]

    @staticmethod
    @lru_cache(maxsize=256)
    def of(segments: tuple[Segment, ...], element_size: int) -> WireLayout:
        return WireLayout(segments, element_size)

    def pack(self, shards: Tensor, messages: Tensor) -> None:
        """[rows, numel] values -> [rows, nbytes] bytes."""
        for run in self._runs:
            values = shards[:, run.start : run.start + run.numel]
            if run.quantised:
                quantise_into(values, *self._fp8(run, messages))
            else:
                self._plain(run, messages, shards.dtype).copy_(values)

    def unpack(self, messages: Tensor, shards: Tensor) -> None:
        """The reverse of `pack`."""
        for run in self._runs:
            values = shards[:, run.start : run.start + run.numel]
            if run.quantised:
                dequantise_into(*self._fp8(run, messages), values)
            else:
                values.copy_(self._plain(run, messages, shards.dtype))

    def _fp8(self, run: _Run, messages: Tensor) -> tuple[Tensor, Tensor]:
        scales = messages[:, run.scales : run.scales + SCALE_BYTES * block_count(run.numel)]
        return messages[:, run.data : run.data + run.numel], scales.view(torch.float32)

    def _plain(self, run: _Run, messages: Tensor, dtype: torch.dtype) -> Tensor:
        return messages[:, run.data : run.data + run.numel * self._element_size].view(dtype)


def _merge(segments: Sequence[Segment]) -> list[tuple[int, int, bool]]:
    """Segments as (start, numel, quantised), neighbours joined where no block would then span two parameters."""
    pieces: list[tuple[int, int, bool]] = []
    start = 0
    for quantised, alike in groupby(segments, key=lambda segment: segment.expert):
        for segment in alike:
            joins = pieces and pieces[-1][2] == quantised and (not quantised or pieces[-1][1] % BLOCK == 0)
            if joins:
                before = pieces.pop()
                pieces.append((before[0], before[1] + segment.numel, quantised))
            else:
                pieces.append((start, segment.numel, quantised))
            start += segment.numel
    return [piece for piece in pieces if piece[1]]
