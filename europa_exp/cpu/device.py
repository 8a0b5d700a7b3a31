"""Run torchtitan on CPUs: a device module, process groups of gloo, sums instead of averages.

torchtitan binds ``device_type`` and ``device_module`` by value when its modules are imported, and without an
accelerator it assumes CUDA. So :func:`enable` has to run before any other module of torchtitan is imported; it does
nothing when there is an accelerator. A public "device" setting upstream would replace the whole module.
"""

from __future__ import annotations

import os
import sys
import warnings
from functools import lru_cache, partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

from europa_exp.cpu.collectives import all_to_all


class _DeviceProperties(NamedTuple):
    total_memory: int


class CpuDeviceModule(ModuleType):
    """``torch.cpu`` with the functions that torchtitan calls on every device module."""

    def __init__(self) -> None:
        super().__init__("europa_exp.cpu.device_module")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    @staticmethod
    def get_device_name(device: object = None) -> str:
        """Name of the device, as torchtitan logs it."""
        return "CPU"

    @staticmethod
    def get_device_properties(device: object = None) -> _DeviceProperties:
        """Total memory in bytes."""
        return _DeviceProperties(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))

    @staticmethod
    def memory_stats(device: object = None) -> dict[str, int]:
        """A CPU has no caching allocator with statistics: none, so that nothing is reported as 0."""
        return {}

    @staticmethod
    def reset_peak_memory_stats(device: object = None) -> None:
        """Nothing to reset."""

    @staticmethod
    def empty_cache() -> None:
        """Nothing to empty."""


@lru_cache(maxsize=1)
def has_accelerator() -> bool:
    """Whether torch finds an accelerator, without initialising it (a later fork stays possible)."""
    return torch.accelerator.is_available()


def device_type() -> str:
    """Type of the device that ranks train on: ``cuda``, ..., or ``cpu``."""
    accelerator = torch.accelerator.current_accelerator() if has_accelerator() else None
    return accelerator.type if accelerator is not None else "cpu"


def enable() -> bool:
    """Make torchtitan run on CPU when there is no accelerator. Returns whether it did.

    Raises:
        RuntimeError: a torchtitan module that binds the device was imported before.
    """
    if has_accelerator():
        return False
    if "torchtitan.tools.utils" in sys.modules:
        from torchtitan.tools import utils

        if isinstance(utils.device_module, CpuDeviceModule):
            return True
        if "torchtitan.distributed.utils" in sys.modules:
            raise RuntimeError(
                "torchtitan was imported before europa_exp.cpu.device.enable(); import europa_exp.training first"
            )
    from torchtitan.tools import utils

    utils.device_type, utils.device_module = "cpu", CpuDeviceModule()
    utils.get_local_device = lambda: torch.device("cpu")
    # Upstream asks lspci and then takes an A100's peak. A CPU has no agreed peak, and its MFU is not reported.
    utils.get_peak_flops = lambda device_name: float("inf")
    # The router asks for an fp32 gate through autocast, which PyTorch does not offer on CPU; the model brings a gate that
    # computes in fp32 by itself there (europa_exp.cpu.linear).
    warnings.filterwarnings("ignore", message="In CPU autocast, but the target dtype is not supported")
    # DTensor's generator does not know CPU meshes; parameters are drawn by their place in the tensor instead.
    warnings.filterwarnings("ignore", message="DTensor .* may not have complete support")

    import torchtitan.distributed.fsdp as titan_fsdp
    import torchtitan.distributed.utils as titan_distributed

    titan_distributed.set_pg_timeouts = _set_pg_timeouts
    titan_distributed.init_distributed = partial(_init_distributed, titan_distributed.init_distributed)
    # There is no accelerator to copy to, so there is nothing to pin for.
    titan_fsdp.CPUOffloadPolicy = partial(CPUOffloadPolicy, pin_memory=False)
    # gloo knows the list form of all-to-all with equal sizes only.
    dist.all_to_all = all_to_all
    return True


def prepare_model(model: torch.nn.Module) -> None:
    """Settings of FSDP that gloo needs; called after ``fully_shard``. Does nothing with an accelerator."""
    if has_accelerator():
        return
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # gloo has no PREMUL_SUM; torchtitan divides by the number of tokens itself, so a sum is what is wanted.
            module.set_force_sum_reduction_for_comms(True)


def _init_distributed(
    original: Any, comm_config: Any, enable_cpu_backend: bool = False, **kwargs: Any
) -> int:
    # With CPU offload torchtitan asks for "cpu:gloo,cpu:gloo", which is refused; one gloo serves both.
    return original(comm_config, enable_cpu_backend=False, **kwargs)


def _set_pg_timeouts(timeout: Any, parallel_dims: Any) -> None:
    # As upstream, but a barrier of gloo takes no device ids.
    dist.barrier()
    groups = [mesh.get_group() for mesh in parallel_dims.get_all_one_dimensional_meshes().values()]
    for group in [*groups, None]:
        dist.set_timeout(timeout, group)
