"""Where a run comes from: code, packages, machine, command line; and what differs when it is run again."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from europa_exp.config.secrets import is_secret_name, redact, redact_args
from europa_exp.runs.code import CodeState, code_state
from europa_exp.runs.status import now

__all__ = ["CodeState", "code_state", "differences", "environment", "packages", "record"]

_VARIABLES = frozenset(
    {
        "CONDA_DEFAULT_ENV",
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "CUDA_LAUNCH_BLOCKING",
        "CUDA_MODULE_LOADING",
        "CUDA_VISIBLE_DEVICES",
        "HF_DATASETS_OFFLINE",
        "HF_HUB_OFFLINE",
        "LD_PRELOAD",
        "LOADEDMODULES",
        "LOCAL_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "PYTHONHASHSEED",
        "PYTHONPATH",
        "RANK",
        "ROCR_VISIBLE_DEVICES",
        "SLURM_CLUSTER_NAME",
        "SLURM_CPUS_PER_TASK",
        "SLURM_NNODES",
        "SLURM_NTASKS",
        "SLURM_STEP_ID",
        "TRANSFORMERS_OFFLINE",
        "VIRTUAL_ENV",
        "WANDB_BASE_URL",
        "WANDB_MODE",
        "WORLD_SIZE",
    }
)
_PREFIXES = (
    "CUBLAS_",
    "FI_",
    "GLOO_",
    "GOMP_",
    "KMP_",
    "MALLOC_",
    "MIMALLOC_",
    "MKL_",
    "NCCL_",
    "OMP_",
    "OPENBLAS_",
    "PYTORCH_",
    "SLURM_JOB_",
    "TORCH_",
    "TORCHINDUCTOR_",
    "TRITON_",
    "UCX_",
)
_FIRST = ("torch", "torchtitan", "triton", "numpy", "hydra-core", "omegaconf", "submitit", "wandb")
_SHOWN = 12


def environment(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment variables that say how a process runs, by an allow-list; the values without secrets."""
    variables = os.environ if variables is None else variables
    return {
        name: redact(value, strict=True)[0]
        for name, value in sorted(variables.items())
        if (name in _VARIABLES or name.startswith(_PREFIXES)) and not is_secret_name(name)
    }


@functools.cache
def packages() -> dict[str, str]:
    """Installed packages and their versions, by name."""
    found: dict[str, str] = {}
    for entry in importlib.metadata.distributions():
        # The folder's name has both; reading 150 files of metadata for them would take longer than all else here.
        stem = re.fullmatch(
            r"(.+?)-(\d[^-]*)\.(?:dist|egg)-info", getattr(getattr(entry, "_path", None), "name", "")
        )
        name, version = (stem[1], stem[2]) if stem else (entry.metadata["Name"], entry.version)
        if name:
            # The first one on the path is the one that is imported.
            found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), version)
    return dict(sorted(found.items()))


def record(
    code: CodeState, *, command: Sequence[str], overrides: Sequence[str], extra: Mapping[str, Any]
) -> dict[str, Any]:
    """The content of ``provenance.json``: JSON-able, without secrets; ``redacted`` says what was taken out where.

    ``extra`` is written at the top level (identity, sweep, parent, ...).
    """
    clean_command, in_command = redact_args(command)
    clean_overrides, in_overrides = redact_args(overrides)
    redacted = [f"command: {f.kind} in argument {f.line}" for f in in_command]
    redacted += [f"overrides: {f.kind} in entry {f.line}" for f in in_overrides]
    redacted += [f"code.diff: {entry}" for entry in code.redacted]
    return {
        **extra,
        "created_at": now(),
        "command": clean_command,
        "overrides": clean_overrides,
        "folder": os.getcwd(),
        "code": {
            "commit": code.commit,
            "branch": code.branch,
            "dirty": code.dirty,
            "diff": "code.diff" if code.diff else None,
            "fingerprint": code.fingerprint,
            "notes": list(code.notes),
        },
        "python": platform.python_version(),
        "executable": sys.executable,
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "environment": environment(),
        "packages": packages(),
        "redacted": redacted,
    }


def differences(recorded: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """What changed since a run was recorded, one line each, what can change a result first; empty when nothing did.

    Both are contents of ``provenance.json`` (``record`` gives the current one). What the old record lacks is said too: a
    rerun can't vouch for it.
    """
    return [
        *_code_differences(_mapping(recorded.get("code")), _mapping(current.get("code"))),
        *_plain(recorded, current, "data_fingerprint", "data"),
        *_plain(recorded, current, "python", "python"),
        *_package_differences(_mapping(recorded.get("packages")), _mapping(current.get("packages"))),
        *_plain(recorded, current, "cluster", "cluster"),
        *_plain(recorded, current, "host", "host"),
        *_plain(recorded, current, "platform", "platform"),
    ]


def _code_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    if not old.get("commit") and not old.get("fingerprint"):
        return [f"code: not recorded -> {_code(new)}"]
    if old.get("fingerprint") and old.get("fingerprint") == new.get("fingerprint"):
        return []
    if old.get("commit") != new.get("commit"):
        return [f"code: {_code(old)} -> {_code(new)}"]
    if old.get("fingerprint") and new.get("fingerprint"):
        return [f"code: {_code(old)} -> {_code(new)}, the uncommitted changes differ (code.diff)"]
    return ["code: the same commit; whether the uncommitted changes are the same is not recorded"]


def _code(code: Mapping[str, Any]) -> str:
    commit = str(code["commit"])[:12] if code.get("commit") else "no commit"
    return commit + (" with uncommitted changes" if code.get("dirty") else "")


def _plain(old: Mapping[str, Any], new: Mapping[str, Any], key: str, label: str) -> list[str]:
    before, after = old.get(key), new.get(key)
    if before == after or after is None:
        return []
    return [f"{label}: {'not recorded' if before is None else before} -> {after}"]


def _package_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    if not old:
        return ["packages: not recorded"] if new else []
    changed = [name for name in {*old, *new} if old.get(name) != new.get(name)]
    changed.sort(key=lambda name: (_FIRST.index(name) if name in _FIRST else len(_FIRST), name))
    lines = [f"{name}: {old.get(name, 'absent')} -> {new.get(name, 'absent')}" for name in changed[:_SHOWN]]
    return lines + ([f"packages: {len(changed) - _SHOWN} more differ"] if len(changed) > _SHOWN else [])


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
