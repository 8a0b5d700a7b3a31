"""A collective in flight with something to do once it has been waited for."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist


class FinishingWork(dist.Work):
    """A collective whose first wait also calls `finish`, on the stream that waits; complete after that, not before.

    It must be a real `dist.Work`: FSDP silently does not wait for anything else, and would compute with garbage.
    """

    def __init__(self, work: dist.Work, finish: Callable[[], None]) -> None:
        super().__init__()
        self._work: dist.Work | None = work
        self._finish: Callable[[], None] | None = finish

    def is_completed(self) -> bool:
        return self._work is None

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._work is not None and self._finish is not None:
            if timeout is None:
                self._work.wait()
            else:
                self._work.wait(timeout)
            with torch.no_grad():
                self._finish()
            self._work = self._finish = None  # frees what they hold, such as the buffers of the message
        return True
