"""NCCL settings as environment variables.

NCCL reads its variables when a communicator is created, not when torch is imported; they are set in each rank, before
anything of torch runs there. Limits of thread blocks could be given to each communicator too (``max_ctas`` of the
configuration that torch's ``ProcessGroupNCCL.Options`` holds), but torchtitan's device mesh creates the groups and takes
no options for them. The environment reaches all communicators, and NCCL lets it win over such a configuration.
"""

from __future__ import annotations

import re
from pathlib import Path

from europa_exp.config import schema

_VARIABLES = {
    "max_ctas": "NCCL_MAX_CTAS",
    "min_ctas": "NCCL_MIN_CTAS",
    "socket_ifname": "NCCL_SOCKET_IFNAME",
    "ib_hca": "NCCL_IB_HCA",
    "ib_timeout": "NCCL_IB_TIMEOUT",
    "ib_retry_cnt": "NCCL_IB_RETRY_CNT",
    "socket_family": "NCCL_SOCKET_FAMILY",
    "debug": "NCCL_DEBUG",
}

_NAME = re.compile(r"NCCL_[A-Z0-9_]+")
# Variables that make NCCL load a library or touch a file: a configuration from somebody else must not be able to.
_REACHES_OUT = re.compile(r"PLUGIN|FILE|PATH|_LIB|_DIR|COMM_ID|NCCL_ENV")


def environment(nccl: schema.Nccl, log: Path | None = None) -> dict[str, str]:
    """The variables that these settings stand for; unset fields leave NCCL's own choice and give none.

    ``log`` is the file for what NCCL says in this rank (``nccl.record``); without it NCCL writes to the output of the rank.

    Raises ValueError when ``nccl.extra`` holds a name that is not NCCL's, that loads a library or names a file, or that
    contradicts a field of its own; checked here again because a recorded configuration may come from anywhere.
    """
    variables = {
        name: str(value) for field, name in _VARIABLES.items() if (value := getattr(nccl, field)) is not None
    }
    for name, value in nccl.extra.items():
        if not _NAME.fullmatch(name):
            raise ValueError(f"nccl.extra.{name}: only NCCL_* names; put other variables into cluster.env")
        if _REACHES_OUT.search(name) or "/" in value or "\0" in value:
            raise ValueError(
                f"nccl.extra.{name}={value}: no plugins and no file paths; set that variable on the machine instead"
            )
        if name in variables:
            field = next(f for f, n in _VARIABLES.items() if n == name)
            raise ValueError(
                f"nccl.extra.{name}={value}: nccl.{field}={variables[name]} sets it already; drop one"
            )
        variables[name] = str(value)
    if nccl.record:
        variables.setdefault("NCCL_DEBUG", "INFO")
        # Environment and communicators are in INIT and ENV, the interface of the bootstrap in BOOTSTRAP.
        variables.setdefault("NCCL_DEBUG_SUBSYS", "INIT,ENV,BOOTSTRAP")
        if log is not None:
            # NCCL writes the name of the host for %h and the process for %p.
            variables["NCCL_DEBUG_FILE"] = str(log).replace("%", "%%")
    return variables
