"""The virtual Slurm itself does what the tests on it rely on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from clusters import HERE, SCRIPT, until

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(200)]


def sbatch(slurm, folder: Path, command: str, *options: str) -> str:
    script = folder / "job.sh"
    script.write_text(f"#!/bin/bash\n{command}\n")
    return slurm.run(
        "sbatch", "--parsable", f"--output={folder}/%j.log", "--open-mode=append", *options, str(script)
    ).strip()


def test_ranks_on_two_nodes_and_their_account(slurm, tmp_path):
    job = sbatch(
        slurm,
        tmp_path,
        "srun bash -c 'echo $SLURM_PROCID $SLURM_LOCALID $SLURMD_NODENAME'",
        "--nodes=2",
        "--ntasks-per-node=2",
    )
    assert slurm.wait_until_over(job) == {job: "COMPLETED"}
    first, second = slurm.run("scontrol", "show", "hostnames", slurm.job(job)["NodeList"]).split()
    lines = sorted((tmp_path / f"{job}.log").read_text().splitlines())
    assert lines == [f"0 0 {first}", f"1 1 {first}", f"2 0 {second}", f"3 1 {second}"]
    sacct = (
        "sacct",
        "--noheader",
        "--parsable2",
        "--allocations",
        f"--jobs={job}",
        "--format=State,ExitCode",
    )
    until(lambda: slurm.run(*sacct).strip() == "COMPLETED|0:0", 20)


def test_restarted_controller_knows_its_jobs_and_a_down_node_requeues_them(slurm, tmp_path):
    job = sbatch(slurm, tmp_path, "echo attempt $SLURM_RESTART_COUNT; sleep 600", "--nodes=2")
    until(lambda: slurm.job(job)["JobState"] == "RUNNING")
    slurm.script("restart-controller")
    assert slurm.job(job)["JobState"] == "RUNNING"
    until(lambda: (tmp_path / f"{job}.log").exists())
    node = slurm.run("scontrol", "show", "hostnames", slurm.job(job)["NodeList"]).split()[0]
    slurm.script("down", node)
    until(lambda: "attempt 1" in (tmp_path / f"{job}.log").read_text(), 60, slurm.logs)
    assert slurm.job(job)["Restarts"] == "1"


def test_commands_fail_while_their_daemon_is_gone(slurm):
    slurm.script("kill-dbd")
    with pytest.raises(AssertionError, match="refused"):
        slurm.run("sacct")
    assert not slurm.counts()
    slurm.script("start-dbd")
    slurm.run("sacct")
    slurm.script("stop-controller")
    assert not slurm.answers()
    slurm.script("start-controller")
    slurm.run("squeue")


def test_stop_leaves_no_process(start_slurm, tmp_path):
    slurm = start_slurm(nodes=2, MAX_ARRAY_SIZE=11)
    with pytest.raises(AssertionError, match="array"):
        sbatch(slurm, tmp_path, "true", "--array=0-11")
    # A job that forgets a process in a session of its own.
    job = sbatch(
        slurm, tmp_path, "srun bash -c 'setsid sleep 600 & sleep 600'", "--nodes=2", "--array=0-10%1"
    )
    until(lambda: slurm.job(f"{job}_0")["JobState"] == "RUNNING")
    assert len(slurm.processes()) > 6
    slurm.script("stop")
    assert slurm.processes() == []


def test_a_cluster_does_not_outlive_its_owner(tmp_path):
    code = "import clusters, time; c = clusters.Cluster(1); print(c.folder, flush=True); time.sleep(600)"
    owner = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(HERE)},
        stdout=subprocess.PIPE,
        text=True,
    )
    folder = owner.stdout.readline().strip()
    mark = f"EUROPA_TEST_CLUSTER={folder}\0".encode()

    def daemons() -> list[str]:
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (entry / "environ").read_bytes():
                    found.append(entry.name)
            except OSError:
                continue
        return found

    try:
        assert len(daemons()) >= 5
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        until(lambda: not daemons(), 60)
    finally:
        subprocess.run([SCRIPT, "stop", folder], check=True)
