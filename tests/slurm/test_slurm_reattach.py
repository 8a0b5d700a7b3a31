"""A call typed again, as people type it: what it says about the runs that are there already is true."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from clusters import Cluster, until
from submitting import SITE, environ, europa, launch, states

from europa_exp.runs.folder import RunFolder

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


def test_what_a_sweep_was_given_outlives_a_broken_status_and_a_removed_folder(
    slurm: Cluster, tmp_path: Path
) -> None:
    call(slurm, tmp_path, "training.seed=1,2,3", "launch.sweep_name=mine")
    runs = [RunFolder(path) for path in sorted((tmp_path / "runs").glob("[!.]*"))]
    broken, removed, whole = runs
    jobs = {run.name: str(run.status().extra["job_id"]) for run in runs}
    text = (broken.path / "status.json").read_text()
    (broken.path / "status.json").write_text(text[: len(text) // 2])
    shutil.rmtree(removed.path)

    told = europa(slurm, tmp_path, "status", "--sweep", "mine")
    rows = {line.split()[0]: line.split()[1:3] for line in told.stdout.splitlines()}
    assert rows[broken.name] == ["unknown", jobs[broken.name]], told.stdout
    assert rows[whole.name] == ["queued", jobs[whole.name]]
    [line] = [line for line in told.stdout.splitlines() if "without a folder any more" in line]
    assert line.startswith(
        f"! 1 run of sweep mine without a folder any more: {removed.name} (job {jobs[removed.name]})"
    )

    done = europa(slurm, tmp_path, "cancel", "--sweep", "mine")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{broken.name}: job {jobs[broken.name]} cancelled" in done.stdout
    assert states(tmp_path / "runs") == {broken.name: "cancelled", whole.name: "cancelled"}
    assert list(slurm.queue()) == [jobs[removed.name]]
    slurm.run("bash", "-c", line[line.index("scancel ") :])
    until(lambda: not slurm.queue(), 30, slurm.queue)
