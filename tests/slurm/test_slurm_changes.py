"""What changes between submitting and running, or afterwards: files are edited, Slurm's daemons come and go."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from clusters import ROOT
from submitting import config, europa, states, submit, wait_for_state

from europa_exp.runs.folder import RunFolder

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(300)]

HELD = ("launch.detach=true", "+cluster.sbatch_args.hold='true'")


def copy_of_the_code(folder: Path) -> Path:
    """The working tree as a repository of its own, to be edited."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "europa_exp", "conf", "*.*"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file() and not name.startswith("tests/"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    git = ("git", "-c", "user.name=test", "-c", "user.email=test@localhost")
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "copy"]):
        subprocess.run([*git, *command], cwd=folder, check=True)
    return folder


def test_edits_after_submit_change_nothing(slurm, tmp_path):
    code_folder = copy_of_the_code(tmp_path / "code")
    edited = code_folder / "europa_exp" / "launch" / "points.py"
    before = edited.read_text()
    # Not committed, not even tracked: the job sees it nevertheless.
    (code_folder / "europa_exp" / "new_module.py").write_text("VALUE = 'as submitted'\n")
    cfg = config(1, 2, "launch.snapshot=true", "training.seed=5", *HELD)
    code, out = submit(slurm, tmp_path / "runs", "slurm_targets:report_code", [cfg], root=code_folder)
    assert code == 0, out
    run = tmp_path / "runs" / "run0"

    edited.write_text(before + "\nraise RuntimeError('edited after submit')\n")
    (code_folder / "europa_exp" / "new_module.py").write_text("VALUE = 'edited after submit'\n")
    for path in (code_folder / "conf").rglob("*.yaml"):
        path.write_text("edited after submit: [")
    (tmp_path / "runs-0.yaml").write_text("edited after submit: [")
    slurm.run("scontrol", "release", RunFolder(run).status().extra["job_id"])

    assert wait_for_state(run, "completed", "failed", "cancelled") == "completed"
    found = json.loads((run / "code.json").read_text())
    assert not Path(found["file"]).is_relative_to(code_folder / "europa_exp")
    assert found["new_module"] == "as submitted"
    assert found["seed"] == 5


def test_status_while_daemons_come_and_go(slurm, tmp_path):
    """A run that ended, one that runs and one that waits, as `europa status` tells them whoever is there to ask."""
    runs = tmp_path / "runs"
    done = config(1, 1, "training.seed=1", "launch.detach=true", "training.steps=1")
    going = config(1, 1, "training.seed=2", "launch.detach=true")
    waiting = config(1, 1, "training.seed=3", *HELD)
    for name, entry, cfg in (
        ("done", "write_steps", done),
        ("going", "stay", going),
        ("waiting", "stay", waiting),
    ):
        code, out = submit(slurm, runs / name, f"slurm_targets:{entry}", [cfg])
        assert code == 0, out
    wait_for_state(runs / "done" / "run0", "completed")
    wait_for_state(runs / "going" / "run0", "running")
    expected = {"done": "completed", "going": "running", "waiting": "queued"}

    def shown() -> dict[str, str]:
        found = {}
        for name in expected:
            told = europa(slurm, runs / name, "status", "--runs-dir", ".")
            assert told.returncode == 0, told.stdout + told.stderr
            [line] = [text for text in told.stdout.splitlines() if text.startswith("run0")]
            [found[name]] = [word for word in line.split() if word in ("completed", "running", "queued")]
        return found

    assert shown() == expected
    slurm.script("restart-controller")
    assert shown() == expected
    slurm.script("kill-dbd")
    assert shown() == expected
    slurm.script("start-dbd")

    # A job that vanishes without a word: only Slurm can say that it is over.
    job = RunFolder(runs / "going" / "run0").status().extra["job_id"]
    slurm.run("scancel", "--signal=KILL", "--full", job)
    slurm.wait_until_over(job)
    told = europa(slurm, runs / "going", "status", "--runs-dir", ".").stdout
    assert "running" not in told, told
    assert states(runs / "waiting") == {"run0": "queued"}
