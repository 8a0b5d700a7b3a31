"""Why runs failed. The failures are real ones, in ranks that the launcher started, wherever a CPU can fail that way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from making import config, make_run
from why_cases import proof

from europa_exp.runs.folder import RunFolder
from europa_exp.runs.why import explain

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def train(runs: Path, entry: str, **environ: str) -> RunFolder:
    """Two ranks of ``entry``, run by the launcher's agent in a process of its own, to their end."""
    cfg = config(
        "parallelism.nodes=1", "parallelism.gpus_per_node=2", "parallelism.data_parallel_shard_degree=2"
    )
    cfg.cluster.preload = False
    run = make_run(runs, cfg, "run")
    run.set_state("queued")
    folder = runs / ".submitit" / "job"
    folder.mkdir(parents=True)
    script = (
        "import sys\nfrom europa_exp.launch.job import Job\n"
        f"Job(({str(run.path)!r},), {str(folder)!r}, 'why_targets:{entry}', '')()"
    )
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{HERE}", "OMP_NUM_THREADS": "1", **environ}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.status().ended, done.stdout + done.stderr
    return run


# ---------------------------------------------------------------------------------------------------- failures of a rank


@pytest.mark.parametrize(
    ("entry", "cause", "title", "line"),
    [
        ("raise_on_1", "exception", "ValueError: the third step is bad", "ValueError: the third step is bad"),
        ("bad_configuration_on_1", "bad_configuration", "model.layers", "must be at least 1"),
        ("memory_error_on_1", "host_memory", "the host's memory ran out", "MemoryError"),
        ("killed_on_1", "killed", r"rank 1 was killed by signal 9 \(SIGKILL\)", "SIGKILL"),
        ("exit_on_1", "exception", "it can't go on like this", "it can't go on like this"),
        (
            "vanish_on_1",
            "unknown",
            "rank 1 ended with exit code 3 and left no word",
            "the last that was heard of it",
        ),
    ],
)
def test_a_rank_that_fails(tmp_path: Path, entry: str, cause: str, title: str, line: str) -> None:
    found = explain(run := train(tmp_path, entry))
    import re

    assert found.cause == cause, found
    assert re.search(title, found.title), found.title
    assert found.rank == 1
    assert found.node == run.status().host, "the node is this machine"
    assert line in proof(found)
    assert found.advice
    assert found.sure == (cause != "unknown")


@pytest.mark.parametrize(
    ("entry", "name"), [("segmentation_fault_on_1", "SIGSEGV"), ("bus_error_on_1", "SIGBUS")]
)
def test_a_crash_in_native_code_is_a_lack_of_memory_on_a_grace(tmp_path: Path, entry: str, name: str) -> None:
    run = train(tmp_path, entry)
    run.write_runtime({"device_name": "x86_64"})
    found = explain(run)
    assert (found.cause, found.rank, found.sure) == ("killed", 1, True)
    assert name in found.title
    assert "Current thread" in proof(found) or "Fatal Python error" in proof(found), "the stack proves it"
    run.write_runtime({"device_name": "aarch64"})
    found = explain(run)
    assert (found.cause, found.rank, found.sure) == ("host_memory", 1, False)
    assert name in found.title
    memory = {"rank": 1, "node": "n1", "free": 3.0, "reclaimable": 0.5}
    (run.path / "logs" / "host_memory.jsonl").write_text(json.dumps(memory) + "\n")
    assert "rank 1 on n1: 3.5 GiB free or reclaimable" in proof(explain(run))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", place], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a small file system needs root")
    yield place
    subprocess.run(["umount", place], check=True)


def test_a_full_disk(tmp_path: Path, small_disk: Path) -> None:
    found = explain(train(tmp_path / "runs", "disk_full_on_1", SMALL_DISK=str(small_disk)))
    assert (found.cause, found.rank, found.sure) == ("disk_full", 1, True)
    assert "[Errno 28] No space left on device" in proof(found)


# --------------------------------------------------------------------------------------------------- failures with torch


@pytest.mark.slow
def test_a_checkpoint_on_a_full_disk(tmp_path: Path, small_disk: Path) -> None:
    found = explain(train(tmp_path / "runs", "checkpoint_on_full_disk_on_1", SMALL_DISK=str(small_disk)))
    assert (found.cause, found.rank) == ("disk_full", 1)
    assert "unexpected pos" in proof(found) or "No space left" in proof(found)


@pytest.mark.slow
def test_an_allocation_that_is_too_large(tmp_path: Path) -> None:
    found = explain(train(tmp_path, "allocator_on_1"))
    assert (found.cause, found.rank) == ("host_memory", 1)
    assert "can't allocate memory: you tried to allocate 1125899906842624 bytes" in proof(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("entry", "title", "line"),
    [
        (
            "rank_1_misses_a_collective",
            "a collective timed out: rank 1 did not arrive, rank 0 waited",
            "Timed out waiting 3000ms for",
        ),
        (
            "rank_1_misses_a_barrier",
            "rank 1 did not arrive",
            "Rank 1 failed to pass monitoredBarrier in 3000 ms",
        ),
        (
            "rank_1_never_comes",
            "the first meeting of the ranks timed out: rank 1 did not arrive",
            "1/2 clients joined",
        ),
    ],
)
def test_a_collective_that_a_rank_misses(tmp_path: Path, entry: str, title: str, line: str) -> None:
    found = explain(train(tmp_path, entry))
    assert found.cause == "collective_timeout"
    assert title in found.title
    assert found.behind == (1,)
    assert found.rank == 1
    assert line in proof(found)
    if entry == "rank_1_misses_a_collective":
        assert "busy with something else" in proof(found), "what the missing rank did last"


@pytest.mark.slow
def test_a_rank_that_leaves_a_collective_behind(tmp_path: Path) -> None:
    found = explain(train(tmp_path, "rank_1_vanishes_from_a_collective"))
    assert found.cause == "lost_rank"
    assert "Connection" in proof(found)
