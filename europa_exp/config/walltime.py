"""Time limits as Slurm writes them."""

from __future__ import annotations

import re

_TEXT = re.compile(r"(?:(\d{1,3})-)?(\d{1,3}):([0-5]\d):([0-5]\d)")


def seconds(text: str) -> int:
    """Seconds of "HH:MM:SS" or "D-HH:MM:SS". Raises ValueError for any other text, and for no time at all."""
    match = _TEXT.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not written HH:MM:SS or D-HH:MM:SS")
    days, hours, minutes, rest = (int(part or 0) for part in match.groups())
    total = ((days * 24 + hours) * 60 + minutes) * 60 + rest
    if not total:
        raise ValueError(f"{text!r} is no time at all")
    return total


def minutes(text: str) -> int:
    """Whole minutes, rounded up as Slurm does. Raises ValueError like `seconds`."""
    return -(-seconds(text) // 60)
