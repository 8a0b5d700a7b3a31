"""A call typed again, as people type it: what it says about the runs that are there already is true."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from clusters import Cluster, until
from submitting import SITE, environ, launch, states

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(300)]

LAYOUT = (
    "parallelism.nodes=1",
    "parallelism.gpus_per_node=2",
    "parallelism.data_parallel_shard_degree=2",
    "parallelism.expert_parallel_degree=1",
)
WAITS = "+cluster.sbatch_args.begin='now+1hour'"


def call(slurm: Cluster, cwd: Path, *overrides: str) -> str:
    done = launch(slurm, cwd, "-m", *SITE, *LAYOUT, WAITS, "launch.detach=true", *overrides)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def pasted(slurm: Cluster, cwd: Path, text: str, which: str) -> subprocess.CompletedProcess[str]:
    """The command that follows ``which`` in a line of the output, pasted into a shell."""
    [command] = [line.removeprefix(which) for line in text.splitlines() if line.startswith(which)]
    script = f'europa() {{ "{sys.executable}" -m europa_exp.cli "$@"; }}; {command.replace(" --watch", "")}'
    return subprocess.run(
        ["bash", "-c", script],
        env={**environ(slurm), "COLUMNS": "200"},
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_a_sweep_typed_again_names_the_sweep_that_there_is(slurm: Cluster, tmp_path: Path) -> None:
    first = call(slurm, tmp_path, "training.seed=1,2")
    again = call(slurm, tmp_path, "training.seed=1,2")
    assert again.count("already submitted: ") == 2, again
    following = [line for line in first.splitlines() if line.startswith(("Next: ", "To cancel: "))]
    assert [line for line in again.splitlines() if line.startswith(("Next: ", "To cancel: "))] == following
    assert "--sweep" in following[0]

    more = call(slurm, tmp_path, "training.seed=2,3")
    assert more.count("already submitted: ") == 1, more
    told = pasted(slurm, tmp_path, more, "Next: ")
    assert told.returncode == 0, told.stderr
    listed = {line.split()[0] for line in told.stdout.splitlines() if " queued " in line}
    assert len(listed) == 2, f"those of the call, and no other: {told.stdout}"

    done = pasted(slurm, tmp_path, again, "To cancel: ")
    assert done.returncode == 0, done.stderr
    found = states(tmp_path / "runs")
    assert sorted(found.values()) == ["cancelled", "cancelled", "queued"]
    until(lambda: len(slurm.queue()) == 1, 30, slurm.queue)


def test_ctrl_c_after_a_call_typed_again_names_it_too(slurm: Cluster, tmp_path: Path) -> None:
    call(slurm, tmp_path, "training.seed=1,2")
    arguments = ("-m", *SITE, *LAYOUT, WAITS, "training.seed=1,2")
    with open(tmp_path / "out", "w") as out:
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve().parents[2] / "launch.py"), *arguments],
            env=environ(slurm),
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    said = (tmp_path / "out").read_text
    until(lambda: "Slurm lets wait" in said(), 120, said)
    os.killpg(process.pid, 2)
    assert process.wait(timeout=60) == 130, said()
    told = pasted(slurm, tmp_path, said(), "Next: ")
    assert told.returncode == 0, told.stderr
    assert told.stdout.count(" queued ") == 2, told.stdout
