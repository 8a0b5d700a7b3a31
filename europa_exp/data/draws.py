"""Random numbers that are addressed, not consumed: the same label gives the same numbers, in any order, anywhere.

Philox's raw 64-bit words are the part of numpy's random numbers that is promised never to change; ``Generator`` methods
such as ``shuffle`` or ``integers`` may change between versions, and a run must repeat under another numpy.
"""

from __future__ import annotations

import hashlib

import numpy as np


def words(label: str, count: int) -> np.ndarray:
    """``count`` uniform 64-bit words (uint64) of the stream that ``label`` names."""
    key = np.frombuffer(hashlib.blake2b(label.encode(), digest_size=16).digest(), dtype="<u8")
    return np.random.Philox(key=key.astype(np.uint64)).random_raw(count)


def permutation(label: str, n: int) -> np.ndarray:
    """A uniform permutation of 0 to n - 1 (int64)."""
    return np.argsort(words(label, n), kind="stable")


def integers(label: str, count: int, bound: int) -> np.ndarray:
    """``count`` integers from 0 to ``bound`` - 1 (int64); ``bound`` at most 2^31. Uneven by less than bound / 2^32."""
    return ((words(label, count) >> np.uint64(32)) * np.uint64(bound) >> np.uint64(32)).astype(np.int64)
