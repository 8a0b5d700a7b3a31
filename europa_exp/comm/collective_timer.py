"""How long collectives take on an accelerator, without the host ever waiting for it within a step.

An event is recorded on the stream that has to wait for the collective, before the call and once that stream is past it. So a
time runs from the moment when this rank is ready for the exchange until its result is there, and holds the wait for slower
ranks as well as the transfer. Times of collectives that overlap each other overlap too: their sum can exceed the step.

A finished pair of events is read and used again at the next call, so there are only about as many events as collectives in
flight, however many a step has and however seldom steps are logged.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

import torch

Key = TypeVar("Key", bound=Hashable)


def cuda_event() -> torch.cuda.Event:
    """An event that knows its time."""
    return torch.cuda.Event(enable_timing=True)


class CollectiveTimer(Generic[Key]):
    """Sums the seconds between `start` and `stop` by key.

    Args:
        new_event: makes an event with `record(stream)`, `query()`, `synchronize()` and `elapsed_time(end)` in milliseconds.
    """

    def __init__(self, new_event: Callable[[], Any] = cuda_event) -> None:
        self._new_event = new_event
        self._free: list[Any] = []
        self._running: deque[tuple[Key, Any, Any]] = deque()
        self._seconds: dict[Key, float] = {}

    def start(self, stream: Any = None) -> Any:
        """Record the beginning of a collective on `stream` (default: the current one); the result is for `stop`."""
        while self._running and self._running[0][2].query():
            self._read(*self._running.popleft())
        return self._recorded(stream)

    def stop(self, key: Key, start: Any, stream: Any = None) -> None:
        """Record that `stream` is past the collective that began with `start`."""
        self._running.append((key, start, self._recorded(stream)))

    def take(self) -> dict[Key, float]:
        """Seconds by key of what was stopped since the last call; waits until the device is past all of it."""
        while self._running:
            self._running[0][2].synchronize()
            self._read(*self._running.popleft())
        seconds, self._seconds = self._seconds, {}
        return seconds

    def _recorded(self, stream: Any) -> Any:
        event = self._free.pop() if self._free else self._new_event()
        event.record(stream)
        return event

    def _read(self, key: Key, start: Any, end: Any) -> None:
        self._seconds[key] = self._seconds.get(key, 0.0) + start.elapsed_time(end) / 1000
        self._free += (start, end)
