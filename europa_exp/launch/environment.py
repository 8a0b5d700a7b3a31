"""The environment of a rank: what it gets, what it must not inherit, and when each part has to be in place.

Three moments matter:

- before torch is imported: threads, allocators, ``cluster.env`` (libraries read them when they load);
- before the first process group: ``RANK`` and its kin;
- before the first communicator: ``NCCL_*``, which NCCL reads then.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from europa_exp.comm import nccl
from europa_exp.config.schema import Config

HOME_VARIABLE = "EUROPA_VISIBLE_DEVICES"
"""Carries the caller's CUDA_VISIBLE_DEVICES past submitit, which sets that variable itself."""

# Left by another launcher, or by a shell inside an allocation: they describe other ranks than ours.
_FOREIGN = re.compile(
    r"(RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|GROUP_RANK|GROUP_WORLD_SIZE|ROLE_\w+|NODE_RANK|MASTER_ADDR|MASTER_PORT"
    r"|OMP_NUM_THREADS|(TORCHELASTIC|PET|SLURM|SBATCH|SRUN|PMI|PMIX|OMPI|HYDRA|SUBMITIT)_\w+|EUROPA_VISIBLE_DEVICES)"
)
# Slurm's own settings for its commands; without them a site with its configuration elsewhere is not found.
_OF_THE_SITE = ("SLURM_CONF", "SLURM_CONF_SERVER")
# Devices that a job or a container gave to the shell that submits, and the container's own settings.
_OF_THE_SHELL = re.compile(
    r"(CUDA|NVIDIA|HIP|ROCR)_VISIBLE_DEVICES|GPU_DEVICE_ORDINAL|ZE_AFFINITY_MASK|(SALLOC|SRUN|SQUEUE|SACCT|SCANCEL)_\w+"
    r"|(APPTAINER|APPTAINERENV|SINGULARITY|SINGULARITYENV|PALS|FLUX)_\w+"
)
# They can change a result or a speed, so they belong into the configuration, where the record sees them.
_UNRECORDED = re.compile(r"(NCCL|GLOO|MIMALLOC|TORCH_NCCL)_\w+|PYTORCH_(CUDA_|HIP_|)ALLOC_CONF")


@dataclass(frozen=True)
class Place:
    """Where one rank sits.

    ``local_rank`` counts within its (logical) node of ``local_world_size`` ranks; ``devices`` are the accelerators that
    this node may use, empty on CPU.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: int
    master_addr: str
    master_port: int
    devices: tuple[str, ...] = ()


def place(cfg: Config, rank: int, *, master_addr: str, master_port: int, devices: list[str]) -> Place:
    """The place of a rank on one machine, whose accelerators are dealt out to the logical nodes in order."""
    per_node = cfg.parallelism.gpus_per_node
    node = rank // per_node
    mine = tuple(devices[node * per_node : (node + 1) * per_node])
    world = cfg.parallelism.nodes * per_node
    return Place(rank, world, rank % per_node, per_node, node, master_addr, master_port, mine)


def place_on_node(
    cfg: Config, rank: int, *, master_addr: str, master_port: int, devices: list[str]
) -> tuple[Place, list[str]]:
    """The place of a rank that Slurm started, and remarks. ``devices`` are those that this task sees on its node.

    Raises ValueError when the ranks of a node can't have an accelerator each.
    """
    where = place(cfg, rank, master_addr=master_addr, master_port=master_port, devices=[])
    if not devices:
        return where, []
    if len(devices) == 1 and where.local_world_size > 1:
        # Slurm has dealt them out already, and a rank takes the device that LOCAL_RANK counts among those it sees.
        note = f"Slurm shows each rank one accelerator, so LOCAL_RANK is 0 in rank {rank} (local rank {where.local_rank})"
        return replace(where, local_rank=0, devices=tuple(devices)), [note]
    if len(devices) < where.local_world_size:
        raise ValueError(
            f"{where.local_world_size} ranks a node (parallelism.gpus_per_node), but this node shows {len(devices)} "
            "accelerators; ask for them with cluster.gres"
        )
    return replace(where, devices=tuple(devices)), []


def accelerators(environ: Mapping[str, str] | None = None) -> list[str]:
    """Names of the NVIDIA devices that this process may use, as CUDA_VISIBLE_DEVICES lists them; found without torch."""
    environ = os.environ if environ is None else environ
    present = sorted(
        (m.group(1) for p in Path("/dev").glob("nvidia*") if (m := re.fullmatch(r"nvidia(\d+)", p.name))),
        key=int,
    )
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not present:
        return present
    chosen: list[str] = []
    for name in (entry.strip() for entry in visible.split(",")):
        if not name or name.startswith("-"):
            break  # CUDA stops at the first invalid entry
        chosen.append(name)
    return chosen


def inherited(environ: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """What a rank takes over from the caller's environment, and the names of settings that were left out and matter."""
    kept: dict[str, str] = {}
    left_out: list[str] = []
    for name, value in environ.items():
        if _UNRECORDED.fullmatch(name):
            left_out.append(name)
        elif not _FOREIGN.fullmatch(name):
            kept[name] = value
    return kept, sorted(left_out)


def for_submission(environ: Mapping[str, str]) -> dict[str, str]:
    """What Slurm's commands, and through sbatch the job, take over from the shell that submits."""
    return {
        name: value
        for name, value in environ.items()
        if name in _OF_THE_SITE or not (_FOREIGN.fullmatch(name) or _OF_THE_SHELL.fullmatch(name))
    }


def at_import(cfg: Config) -> dict[str, str]:
    """Variables that must be in place before torch is imported. Processes that share an import share all of these."""
    variables = {"OMP_NUM_THREADS": str(cfg.cluster.threads_per_rank)}
    if cfg.cluster.executor.name == "local":
        # One machine, perhaps without a network or with a host name that does not resolve.
        variables["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    elif cfg.cluster.network_interface is not None:
        variables["GLOO_SOCKET_IFNAME"] = cfg.cluster.network_interface
    if cfg.cluster.offline:
        variables["HF_HUB_OFFLINE"] = "1"
    return variables | {name: str(value) for name, value in cfg.cluster.env.items()}


def of_rank(cfg: Config, where: Place, nccl_log: Path | None = None) -> dict[str, str]:
    """Everything that the worker sets in a rank, import-time variables included. ``nccl_log``: see ``comm.nccl``."""
    variables = at_import(cfg) | nccl.environment(cfg.nccl, nccl_log)
    variables |= {
        "RANK": str(where.rank),
        "LOCAL_RANK": str(where.local_rank),
        "WORLD_SIZE": str(where.world_size),
        "LOCAL_WORLD_SIZE": str(where.local_world_size),
        "GROUP_RANK": str(where.node),
        "MASTER_ADDR": where.master_addr,
        "MASTER_PORT": str(where.master_port),
    }
    if where.devices:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(where.devices)
    return variables
