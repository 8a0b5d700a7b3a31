"""The driver of runs in an allocation, without Slurm: a squeue that answers from a file, and steps that fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from launching import config, environ, make_runs

from europa_exp.launch.standing import survey
from europa_exp.runs.folder import RunFolder
from europa_exp.runs.why import explain

STEP = """echo tried >>"${0%/*}/../tried"
echo "srun: error: Unable to confirm allocation for job 77: Job/step already completing or completed" >&2
exit 1
"""


def drive(tmp_path: Path, squeue: str) -> list[RunFolder]:
    """Three runs whose steps can't start, while squeue says this of the allocation."""
    runs = make_runs(tmp_path / "runs", *[config()] * 3)
    folder, commands = tmp_path / "job", tmp_path / "bin"
    commands.mkdir()
    for name, text in (("squeue", squeue), ("sacct", "exit 0")):
        (commands / name).write_text(f"#!/bin/sh\n{text}\n")
        (commands / name).chmod(0o755)
    for number, _ in enumerate(runs):
        (folder / str(number)).mkdir(parents=True)
        (folder / str(number) / "job.sh").write_text(STEP)
    plan = [[str(run.path), str(folder / str(number))] for number, run in enumerate(runs)]
    (folder / "plan.json").write_text(json.dumps(plan))
    subprocess.run(
        [sys.executable, "-m", "europa_exp.launch.allocation", str(folder)],
        env=environ(PATH=f"{commands}:{os.environ['PATH']}", SLURM_JOB_ID="77"),
        timeout=120,
        check=True,
    )
    return runs


@pytest.mark.parametrize(
    ("squeue", "word"),
    [
        ("echo '77|COMPLETING|n1|N/A|N/A|None'", "job 77, COMPLETING"),
        ("echo '77|TIMEOUT|n1|N/A|N/A|None'", "job 77, TIMEOUT"),
        ("exit 0", "Slurm does not know job 77 any more"),
    ],
)
def test_when_the_allocation_has_ended_no_further_step_is_tried(tmp_path, squeue, word):
    runs = drive(tmp_path, squeue)
    assert (tmp_path / "job" / "tried").read_text().split() == ["tried"]
    for found in survey(runs).standings:
        assert found.state == "cancelled"
        assert found.note.startswith(f"the allocation has ended: {word}")
        assert "the allocation has ended" in explain(found.run).title


@pytest.mark.parametrize("squeue", ["echo '77|RUNNING|n1|N/A|N/A|None'", "exit 1"])
def test_while_it_lasts_or_slurm_is_silent_each_run_has_its_turn(tmp_path, squeue):
    runs = drive(tmp_path, squeue)
    assert (tmp_path / "job" / "tried").read_text().split() == ["tried"] * 3
    assert {str(run.status().state) for run in runs} == {"failed"}
    assert "the ranks did not start" in runs[1].status().error["message"]
