"""Fixtures of the tests on a real Slurm: ``slurm`` is a small cluster for all, ``start_slurm`` makes special ones."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
from clusters import Cluster, why_not


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not any(item.get_closest_marker("slurm") for item in items):
        return
    reason = why_not()
    if reason is None:
        return
    # Where the packages were to be installed (continuous integration), a skipped test would be a silent hole.
    if os.environ.get("EUROPA_REQUIRE_SLURM"):
        raise pytest.UsageError(f"EUROPA_REQUIRE_SLURM is set, but {reason}")
    for item in items:
        if item.get_closest_marker("slurm"):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def shared_slurm() -> Iterator[Cluster]:
    cluster = Cluster(nodes=4)
    yield cluster
    cluster.stop()


@pytest.fixture
def slurm(shared_slurm: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A cluster of four nodes without jobs; Slurm's commands in this process speak to it."""
    monkeypatch.setenv("SLURM_CONF", shared_slurm.conf)
    yield shared_slurm
    shared_slurm.clear()


@pytest.fixture
def start_slurm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Cluster]]:
    """``start_slurm(nodes=96)``, ``start_slurm(MAX_ARRAY_SIZE=11)``: a cluster for this test alone."""
    started: list[Cluster] = []

    def start(nodes: int = 4, **settings: int) -> Cluster:
        cluster = Cluster(nodes, **settings)
        started.append(cluster)
        monkeypatch.setenv("SLURM_CONF", cluster.conf)
        return cluster

    yield start
    for cluster in started:
        cluster.stop()
