"""Host memory as a job finds it: free, reclaimable and unattributed, for each NUMA node, without any library.

Unattributed is what no counter of the kernel explains: memory that a driver took and never gave back. Nodes that hold it
starve a job that needs most of a socket, and only asking at the start of the job shows it. On a Grace Hopper the GPU's own
memory appears as NUMA nodes without CPUs; those are marked and count for nothing.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from europa_exp.config.schema import Cluster, MemoryScope

REPORT_FILE = "host_memory.jsonl"
"""Under ``logs/`` of a run folder: one line a rank and attempt."""

_NODES = Path("/sys/devices/system/node")
_GIB = 1024**2  # the kernel counts in KiB

# What the kernel can take back when a program asks for memory.
_RECLAIMABLE = ("FilePages", "SReclaimable")
_NOT_RECLAIMABLE = ("Shmem",)  # counted in FilePages, but held by programs
_ATTRIBUTED = (
    "MemFree",
    "FilePages",
    "AnonPages",
    "Slab",
    "KernelStack",
    "PageTables",
    "SecPageTables",
)


class MemoryFloorError(Exception):
    """A node has less memory left than ``cluster.memory_floor_gib``."""


def report(root: Path | str = _NODES) -> dict[str, Any]:
    """Memory of each NUMA node in GiB.

    ``{"nodes": {"0": {"total", "free", "reclaimable", "unattributed", "cpus": "0-71", "device_memory": false}, ...},
    "available": ...}``; ``device_memory`` marks nodes without CPUs, and ``available`` is free plus reclaimable over the
    others. ``nodes`` is empty where the system has no such record. ``root`` can be a copy, for tests.
    """
    nodes: dict[str, dict[str, Any]] = {}
    for folder in sorted(Path(root).glob("node[0-9]*"), key=lambda p: int(p.name[4:])):
        with contextlib.suppress(OSError, KeyError, ValueError):
            nodes[folder.name[4:]] = _node(folder)
    with_cpus = [node for node in nodes.values() if not node["device_memory"]]
    available = round(sum(node["free"] + node["reclaimable"] for node in with_cpus), 2)
    return {"nodes": nodes, "available": available if with_cpus else None}


def socket_of(found: Mapping[str, Any], local_rank: int, local_world_size: int) -> str | None:
    """The NUMA node (with CPUs) that a local rank belongs to; ranks are dealt out evenly, in order. None without any."""
    names = [name for name, node in found["nodes"].items() if not node["device_memory"]]
    return names[local_rank * len(names) // local_world_size] if names else None


def below(line: Mapping[str, Any], cluster: Cluster) -> str | None:
    """Why the memory that one rank reported is too little, or None.

    ``line`` is one of ``REPORT_FILE``: ``{"node", "socket", "available_gib" (of the host), "free", "reclaimable" (of the
    socket)}``. Where the system tells nothing there is nothing to compare, and the job goes on.
    """
    floor = cluster.memory_floor_gib
    if floor is None:
        return None
    if cluster.memory_floor_scope is MemoryScope.host:
        available, where = line.get("available_gib"), f"node {line.get('node')}"
    else:
        known = "free" in line and "reclaimable" in line
        available = line["free"] + line["reclaimable"] if known else None
        where = f"node {line.get('node')}, socket {line.get('socket')}"
    if available is None or available >= floor:
        return None
    return f"{where}: {available:.1f} GiB are free or reclaimable, below cluster.memory_floor_gib={floor:g}"


def _node(folder: Path) -> dict[str, Any]:
    counters = {
        name: int(value)
        for name, value in re.findall(r"^Node \d+ (\S+?):\s+(\d+)", (folder / "meminfo").read_text(), re.M)
    }
    cpus = (folder / "cpulist").read_text().strip()
    reclaimable = sum(counters.get(name, 0) for name in _RECLAIMABLE)
    reclaimable -= sum(counters.get(name, 0) for name in _NOT_RECLAIMABLE)
    known = sum(counters.get(name, 0) for name in _ATTRIBUTED)
    known += counters.get("HugePages_Total", 0) * _huge_page(folder)
    return {
        "total": round(counters["MemTotal"] / _GIB, 2),
        "free": round(counters["MemFree"] / _GIB, 2),
        "reclaimable": round(max(0, reclaimable) / _GIB, 2),
        "unattributed": round(max(0, counters["MemTotal"] - known) / _GIB, 2),
        "cpus": cpus,
        "device_memory": cpus == "",
    }


def _huge_page(folder: Path) -> int:
    """Size of the huge pages that ``HugePages_Total`` counts, in KiB."""
    sizes = [int(p.name.split("-")[1][:-2]) for p in (folder / "hugepages").glob("hugepages-*kB")]
    return 2048 if 2048 in sizes or not sizes else min(sizes)
