"""What the error of a rank is by its type and words, for all who ask: who failed first, what is tried again, why a run failed."""

from __future__ import annotations

import re
from enum import Enum

BAD_CONFIGURATION = frozenset(
    {
        "ConfigError",
        "ConfigCompositionException",
        "ConfigAttributeError",
        "ValidationError",
        "DataError",
        "RunFolderError",
        "LayoutError",
        "RendezvousError",
        "MissingMandatoryValue",
    }
)
"""Exceptions of ours and of OmegaConf that say that what was asked for can't be done."""

ECHOES = frozenset({"RuntimeError", "DistBackendError", "DistNetworkError", "DistStoreError", "DistError"})
"""Exceptions with which ranks meet the end of another rank; only their words tell whether they do."""


class Echo(Enum):
    """How a rank meets the end of another one."""

    timed_out = "timed_out"
    """It waited, and the other one did not come."""
    broken = "broken"
    """The connection to the other one is gone."""


# Wider than the symptoms of ``why``, which prove a cause in a log of anything: here the type has spoken already.
_TIMED_OUT = re.compile(r"timed out|timeout", re.IGNORECASE)
_BROKEN = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|closed by peer|failed to (recv|send)|socket.*closed"
    r"|remote process|peer.*(exited|aborted)|communicator was aborted|pair closure",
    re.IGNORECASE | re.DOTALL,
)


def echo_of(kind: str, message: str) -> Echo | None:
    """Which echo of another rank's end an error of this type with this message looks like; None for an error of its own."""
    if kind not in ECHOES:
        return None
    if _TIMED_OUT.search(message):
        return Echo.timed_out
    return Echo.broken if _BROKEN.search(message) else None
