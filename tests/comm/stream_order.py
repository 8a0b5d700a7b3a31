"""What CUDA's caching allocator could hand out too early, found on a CPU.

On a CPU, streams are names: FSDP makes them, switches between them, lets them wait for each other and records events on them,
and none of it does anything. It is recorded here, and what is computed on which stream, too. Each stream has a vector clock:
the last operation of every stream that is known to be over when its next one starts.

CUDA's allocator keeps a pool of memory for each stream. Memory that nobody refers to any more goes back to the pool of the
stream that allocated it, and that stream's next allocation may be the same memory at once. So each operation of another stream
that read or wrote it must be over for the allocating stream, by some wait. Where it isn't, that is a `Hazard`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.cpu import Event, Stream
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Clock = Counter  # of streams: the number of operations of each that are over


class Hazard(NamedTuple):
    """Memory of stream `pool` that stream `user` may still use when `pool` hands it out again; what it was and will be."""

    pool: Any
    user: Any
    was: str
    becomes: str


class Wait(NamedTuple):
    """Stream `waiter` was made to wait for what `source` had been given."""

    waiter: Any
    source: Any


@dataclass(eq=False)
class _Block:
    storage: StorageWeakRef
    pool: Stream
    nbytes: int
    was: str
    uses: Clock = field(default_factory=Counter)


class StreamRecorder(TorchDispatchMode):
    """Records the streams of what is run inside of it, by one thread and with collectives that keep no reference.

    `.to(device)` returns the tensor itself on a CPU; here it makes a copy, as between a GPU and the host: the copy of something
    that was computed on a stream is the host's, that of anything else is the device's.
    """

    def __init__(self) -> None:
        super().__init__()
        self.hazards: list[Hazard] = []
        self.waits: list[Wait] = []
        self.highest: Counter[Stream] = Counter()
        """Bytes of each stream's pool that were referred to at once, at most."""
        self._clocks: dict[Stream, Clock] = defaultdict(Counter)
        self._blocks: dict[int, _Block] = {}
        self._patches = ExitStack()
        self._copying_to_host = False

    def __enter__(self) -> StreamRecorder:
        to = Tensor.to

        def copied(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            result = to(tensor, *args, **kwargs)
            if result is not tensor or not args or not isinstance(args[0], torch.device):
                return result
            self._copying_to_host = tensor.untyped_storage()._cdata in self._blocks
            try:
                return tensor.clone()
            finally:
                self._copying_to_host = False

        def record(event: Any, stream: Stream | None = None) -> None:
            event.stream = stream or torch.cpu.current_stream()
            event.clock = self._clocks[event.stream].copy()

        def record_event(stream: Stream) -> Event:
            event = Event()
            event.record(stream)
            return event

        replaced: list[tuple[Any, str, Any]] = [
            (Tensor, "to", copied),
            (Event, "record", record),
            (Stream, "record_event", record_event),
            (Stream, "wait_event", lambda stream, event: self._wait(stream, event.stream, event.clock)),
            (Stream, "wait_stream", lambda stream, other: self._wait(stream, other, self._clocks[other])),
        ]
        for owner, name, new in replaced:
            self._patches.enter_context(mock.patch.object(owner, name, new))
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._patches.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its local tensors come here instead
        out = func(*args, **(kwargs or {}))
        stream = torch.cpu.current_stream()
        self._clocks[stream][stream] += 1
        given = {t.untyped_storage()._cdata for t in _tensors((args, kwargs))}
        for tensor in _tensors(out):
            storage = tensor.untyped_storage()
            # What is given and unknown was there before.
            if storage._cdata not in given | self._blocks.keys() and not self._copying_to_host:
                self._allocate(stream, storage, f"{func} {tensor.dtype} {tuple(tensor.shape)}")
            given.add(storage._cdata)
        for used in given & self._blocks.keys():
            self._blocks[used].uses[stream] = self._clocks[stream][stream]
        return out

    def _allocate(self, stream: Stream, storage: torch.UntypedStorage, becomes: str) -> None:
        known = self._clocks[stream]
        for key, block in list(self._blocks.items()):
            if block.pool is stream and block.storage.expired():
                del self._blocks[key]
                for user, last in block.uses.items():
                    if user is not stream and known[user] < last:
                        self.hazards.append(Hazard(stream, user, block.was, becomes))
        self._blocks[storage._cdata] = _Block(StorageWeakRef(storage), stream, storage.nbytes(), becomes)
        alive = sum(block.nbytes for block in self._blocks.values() if block.pool is stream)
        self.highest[stream] = max(self.highest[stream], alive)

    def _wait(self, waiter: Stream, source: Stream, clock: Clock) -> None:
        self.waits.append(Wait(waiter, source))
        self._clocks[waiter] |= clock


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]
