"""The wrapper that starts a rank on its NUMA node: it binds, or says why not and goes on or stops."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from europa_exp.launch.slurm import NUMA_SCRIPT, ROOT

COMMAND = ["bash", "-c", 'echo "$EUROPA_NUMA|$0|$*"; exit 5', "a b", "c"]


@pytest.fixture
def bind(tmp_path):
    """bind(local_rank, ...) -> the finished wrapper, with nodes 0, 1 (CPUs) and 4 (memory only) and a numactl of its own."""
    nodes, commands = tmp_path / "nodes", tmp_path / "bin"
    for name, cpus in (("node0", "0-71\n"), ("node1", "72-143\n"), ("node4", "\n")):
        (nodes / name).mkdir(parents=True)
        (nodes / name / "cpulist").write_text(cpus)
    commands.mkdir()
    for name in ("bash", "grep", "uname", "env", "true"):
        (commands / name).symlink_to(shutil.which(name))

    def run(local_rank, binding="cpu_and_memory", otherwise="go_on", numactl='exec "${@:3}"'):
        if numactl is not None:
            text = f'#!/bin/bash\necho "$1 $2" >>{tmp_path}/numactl\n{numactl}\n'
            (commands / "numactl").write_text(text)
            (commands / "numactl").chmod(0o755)
        environ = {"PATH": str(commands), "EUROPA_NUMA_ROOT": str(nodes), "SLURM_PROCID": "17"}
        if local_rank is not None:
            environ["SLURM_LOCALID"] = str(local_rank)
        return subprocess.run(
            [shutil.which("bash"), str(ROOT / NUMA_SCRIPT), binding, otherwise, *COMMAND],
            capture_output=True,
            text=True,
            env=environ,
            timeout=30,
        )

    return run


def test_rank_is_bound_to_its_own_node(bind, tmp_path):
    done = bind(1)
    assert (done.returncode, done.stderr) == (5, "")
    assert done.stdout == "node 1, cpu_and_memory|a b|c\n"
    assert (tmp_path / "numactl").read_text() == "--cpunodebind=1 --membind=1\n" * 2  # tried, then done


def test_cpu_alone(bind, tmp_path):
    done = bind(0, binding="cpu", numactl='exec "${@:2}"')
    assert (done.returncode, done.stdout) == (5, "node 0, cpu|a b|c\n")
    assert "membind" not in (tmp_path / "numactl").read_text()


REASONS = {
    "no numactl": (0, {"numactl": None}, "numactl is not installed"),
    "no such node": (2, {}, "there is no such node here (node0 node1 node4)"),
    "memory only": (4, {}, "that node has no CPUs"),
    "refused": (0, {"numactl": "echo sched_setaffinity: Invalid argument >&2; exit 1"}, "Invalid argument"),
    "no task": (None, {}, "SLURM_LOCALID is not set"),
}


@pytest.mark.parametrize(("local_rank", "more", "reason"), list(REASONS.values()), ids=list(REASONS))
def test_says_why_not_and_goes_on(bind, local_rank, more, reason):
    done = bind(local_rank, **more)
    assert done.returncode == 5
    assert done.stderr.startswith(f"europa: rank 17 on {os.uname().nodename} is not bound to NUMA node ")
    assert reason in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout.startswith("not bound to NUMA node")  # the rank can record it
    assert done.stdout.endswith("|a b|c\n")


@pytest.mark.parametrize(("local_rank", "more", "reason"), list(REASONS.values()), ids=list(REASONS))
def test_stops_where_a_binding_is_required(bind, local_rank, more, reason):
    done = bind(local_rank, otherwise="stop", **more)
    assert (done.returncode, done.stdout) == (71, "")
    assert reason in done.stderr
    assert "cluster.numa_required=true" in done.stderr


@pytest.mark.skipif(not shutil.which("numactl"), reason="numactl is not installed")
def test_the_real_numactl_binds():
    show = ["numactl", "--show"]
    environ = {**os.environ, "SLURM_LOCALID": "0", "SLURM_PROCID": "0"}
    done = subprocess.run(
        ["bash", str(ROOT / NUMA_SCRIPT), "cpu_and_memory", "go_on", *show],
        capture_output=True,
        text=True,
        env=environ,
        timeout=30,
    )
    assert done.returncode == 0
    if "not bound" in done.stderr:  # containers may forbid it
        assert "numactl refuses it" in done.stderr or "no such node" in done.stderr
    else:
        assert "membind: 0" in done.stdout
