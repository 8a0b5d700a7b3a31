"""Host memory as /sys tells it, from a copy of a Grace Hopper's folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from europa_exp.config.schema import Cluster, MemoryScope
from europa_exp.launch import host_memory

GIB = 1024**2  # KiB


def make_node(root: Path, name: int, cpus: str, total: float, **gib: float) -> None:
    folder = root / f"node{name}"
    folder.mkdir(parents=True)
    (folder / "cpulist").write_text(cpus + "\n")
    counters = {"MemTotal": total, **gib}
    lines = [f"Node {name} {key}:{' ' * 8}{int(value * GIB)} kB" for key, value in counters.items()]
    (folder / "meminfo").write_text("\n".join([*lines, f"Node {name} HugePages_Total:     0"]) + "\n")


@pytest.fixture
def grace(tmp_path: Path) -> Path:
    """Four sockets, the third of them starved, and a GPU's memory as a node without CPUs."""
    for socket in range(4):
        free = 70.0 if socket == 2 else 100.0
        make_node(
            tmp_path,
            socket,
            f"{72 * socket}-{72 * socket + 71}",
            119.5,
            MemFree=free,
            FilePages=4.0,
            Shmem=1.0,
            SReclaimable=0.5,
            AnonPages=2.0,
            Slab=1.5,
        )
    make_node(tmp_path, 4, "", 95.0, MemFree=94.0)
    return tmp_path


def test_report(grace):
    found = host_memory.report(grace)
    assert list(found["nodes"]) == ["0", "1", "2", "3", "4"]
    socket = found["nodes"]["0"]
    assert (socket["total"], socket["free"]) == (119.5, 100.0)
    assert socket["reclaimable"] == 3.5, (
        "the page cache without shared memory, and the slab that can be freed"
    )
    assert socket["unattributed"] == 12.0
    assert found["nodes"]["2"]["unattributed"] == 42.0
    assert not socket["device_memory"]
    assert found["nodes"]["4"]["device_memory"]
    assert found["available"] == 3 * 103.5 + 73.5, "device memory is not host memory"


def test_huge_pages_are_attributed(tmp_path):
    make_node(tmp_path, 0, "0-3", 100.0, MemFree=60.0)
    with open(tmp_path / "node0" / "meminfo", "a") as file:
        file.write(f"Node 0 HugePages_Total:  {10 * 512}\n")
    (tmp_path / "node0" / "hugepages" / "hugepages-2048kB").mkdir(parents=True)
    assert host_memory.report(tmp_path)["nodes"]["0"]["unattributed"] == 30.0


def test_this_machine_has_a_report_that_adds_up():
    found = host_memory.report()
    for node in found["nodes"].values():
        assert 0 <= node["free"] <= node["total"]
        assert 0 <= node["unattributed"] <= node["total"]


def test_a_system_that_says_nothing_has_nothing_to_compare(tmp_path):
    found = host_memory.report(tmp_path)
    assert found == {"nodes": {}, "available": None}
    assert host_memory.socket_of(found, 0, 4) is None
    line = {"node": "n1", "socket": None, "available_gib": None}
    for scope in MemoryScope:
        assert host_memory.below(line, floor(100, scope)) is None


def test_ranks_are_dealt_out_over_the_sockets(grace):
    found = host_memory.report(grace)
    assert [host_memory.socket_of(found, rank, 4) for rank in range(4)] == ["0", "1", "2", "3"]
    assert [host_memory.socket_of(found, rank, 8) for rank in range(8)] == list("00112233")
    assert [host_memory.socket_of(found, rank, 2) for rank in range(2)] == ["0", "2"]


def floor(gib: float | None, scope: MemoryScope) -> Cluster:
    return Cluster(
        name="x",
        executor="slurm",
        threads_per_rank=1,
        memory_floor_gib=gib,
        memory_floor_scope=scope,
    )


def line_of(grace: Path, rank: int) -> dict:
    found = host_memory.report(grace)
    socket = host_memory.socket_of(found, rank, 4)
    return {"node": "n1", "socket": socket, "available_gib": found["available"], **found["nodes"][socket]}


def test_the_floor_finds_the_starved_socket(grace):
    cluster = floor(90, MemoryScope.socket)
    assert [host_memory.below(line_of(grace, rank), cluster) is None for rank in range(4)] == [
        True,
        True,
        False,
        True,
    ]
    why = host_memory.below(line_of(grace, 2), cluster)
    assert why == "node n1, socket 2: 73.5 GiB are free or reclaimable, below cluster.memory_floor_gib=90"
    assert host_memory.below(line_of(grace, 2), floor(None, MemoryScope.socket)) is None


def test_the_floor_of_a_host(grace):
    assert host_memory.below(line_of(grace, 2), floor(384, MemoryScope.host)) is None
    assert "384.0 GiB" in host_memory.below(line_of(grace, 2), floor(385, MemoryScope.host))
