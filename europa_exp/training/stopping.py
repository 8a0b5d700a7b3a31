"""Stopping in good order: one rank is asked, all ranks stop after the same step, and what was computed is saved."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from europa_exp.cpu import device
from europa_exp.runs.attempts import STOPPED


class Stopped(SystemExit):
    """Training ended before its last step because the ranks were asked to stop. ``step`` is the last one that is done, and
    ``saved`` says whether a checkpoint holds it.

    The exit code is ``STOPPED``, so that nobody takes it for a success or a failure.
    """

    def __init__(self, step: int, saved: bool) -> None:
        super().__init__(STOPPED)
        self.step, self.saved = step, saved

    def __str__(self) -> str:
        kept = "it is saved" if self.saved else "nothing is saved"
        return f"Stopped after step {self.step}, as asked; {kept}"


class NonFiniteLossError(RuntimeError):
    """The loss is NaN or infinite."""


class Agreement:
    """Do all ranks stop now? One number is summed over the ranks between two steps.

    The sum that a call starts is read by the next call, so no rank waits for it: by then it is there. All ranks read the same
    number, so they stop after the same step, also when the signal reached one of them only; it is at most one step later.

    Args:
        asked: whether this rank was asked to stop.
    """

    def __init__(self, asked: Callable[[], bool]) -> None:
        self._asked = asked
        self._work: dist.Work | None = None
        self._sum: torch.Tensor | None = None
        self._copied: torch.Event | None = None

    def reached(self) -> bool:
        """Called by every rank between two steps: whether all stop now."""
        if self._result():
            return True
        flag = torch.tensor([float(self._asked())], device=device.device_type())
        work = dist.all_reduce(flag, async_op=True)
        if flag.device.type == "cpu":
            self._work, self._sum = work, flag
            return False
        work.wait()  # makes the stream wait, not this thread
        self._sum = torch.empty_like(flag, device="cpu", pin_memory=True)
        self._sum.copy_(flag, non_blocking=True)
        self._copied = torch.Event(flag.device)
        self._copied.record()
        return False

    def finish(self) -> None:
        """Take in the last sum; called by every rank after the last step."""
        self._result()

    def _result(self) -> bool:
        if self._work is not None:
            self._work.wait()
        if self._copied is not None:
            self._copied.synchronize()
        found = self._sum is not None and float(self._sum) > 0
        self._work = self._sum = self._copied = None
        return found
