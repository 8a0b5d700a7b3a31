"""The end of every call, whether single run, sweep or rerun: its checked points are shown or submitted."""

from __future__ import annotations

import re
import secrets
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from europa_exp.launch.expand import Plan


def hand_over(plan: Plan, command: Sequence[str]) -> int:
    """Preview or submit the points and return the exit code. ``command`` is what was typed, for the record."""
    for notice in plan.notices:
        print(f"note: {notice}", file=sys.stderr)
    launch = plan.points[0].cfg.launch
    if launch.preview:
        from europa_exp.launch.preview import show

        show(plan)
        return 0
    from europa_exp.launch.submit import submit

    return submit(plan.points, launch, sweep=_named_sweep(plan), command=list(command))


def _named_sweep(plan: Plan) -> str | None:
    """The sweep's name for the record: as asked for, or with a time and a random part that keep two calls apart."""
    if plan.sweep is None or plan.points[0].cfg.launch.sweep_name is not None:
        return plan.sweep
    stem = re.sub(r"[^A-Za-z0-9._-]+", "_", plan.sweep)[:60]
    return f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
