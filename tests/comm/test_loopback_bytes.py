"""The estimate of sent bytes against what the kernel counts on the loopback, four ranks on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

HERE = Path(__file__).resolve().parent
# The most private network that this user may have: as root, as anybody, or none.
ISOLATIONS = (["unshare", "--net"], ["unshare", "--map-root-user", "--net"], [])


def isolation() -> list[str]:
    for command in ISOLATIONS:
        try:
            if subprocess.run([*command, "true"], capture_output=True, timeout=30).returncode == 0:
                return command
        except OSError:
            continue
    return []


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What each rank saw in each case, see `loopback.py`."""
    path = os.pathsep.join(str(folder) for folder in (HERE, HERE.parent, HERE.parent.parent))
    done = subprocess.run(
        [*isolation(), sys.executable, str(HERE / "loopback.py")],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout.splitlines()[-1])
    cases = measured["found"]
    least = min(estimate(ranks) / ranks[0]["seconds"] for ranks in cases.values())
    if measured["noise"] > 0.005 * least:
        pytest.skip(
            f"others send {measured['noise'] / 1e6:.2f} MB/s over this loopback, and no network namespace is to be had"
        )
    return cases


def estimate(ranks: list[dict[str, Any]], *collectives: str) -> int:
    """Bytes that all ranks together sent by the estimate, with these collectives or all."""
    return sum(
        count
        for rank in ranks
        for collective, count in rank["sent"].items()
        if not collectives or collective in collectives
    )


def seen(ranks: list[dict[str, Any]]) -> int:
    return min(rank["seen"] for rank in ranks)


@pytest.mark.parametrize(
    ("case", "collectives"),
    [
        ("forward", {"all_gather"}),
        ("node", {"all_gather", "all_to_all"}),
        ("fp8 and bf16", {"all_gather", "all_to_all"}),
        ("asynchronous", {"all_gather", "all_to_all"}),
        ("replicas", {"all_gather", "all_to_all", "all_reduce"}),
        ("tokens", {"all_to_all"}),
    ],
)
def test_ranks_send_what_is_estimated(found: dict[str, Any], case: str, collectives: set[str]) -> None:
    ranks = found[case]
    assert all(rank["sent"].keys() == collectives for rank in ranks)
    assert estimate(ranks) > 4e6, "headers would show"
    assert seen(ranks) == pytest.approx(estimate(ranks), rel=0.05)


def test_gradients_by_all_to_all_send_what_is_estimated(found: dict[str, Any]) -> None:
    ranks = found["fp8 and bf16"]
    gathered = estimate(ranks, "all_gather")
    assert seen(ranks) - gathered == pytest.approx(estimate(ranks, "all_to_all"), rel=0.05)


def test_reduce_scatter_of_gloo_sends_twice_the_estimate(found: dict[str, Any]) -> None:
    """It is an all-reduce of a copy of the whole input, of which each rank keeps its part (ProcessGroupGloo.cpp,
    `reduce_scatter_tensor_coalesced`). A ring sends 2(n-1)/n of the input for an all-reduce, (n-1)/n for a reduce-scatter.
    The estimate is that of NCCL's ring."""
    ranks = found["fp32 gradients"]
    reduced = seen(ranks) - estimate(ranks, "all_gather")
    assert reduced == pytest.approx(2 * estimate(ranks, "reduce_scatter"), rel=0.05)
