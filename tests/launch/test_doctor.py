"""europa doctor: what it finds, and its exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from compose import CONF

from europa_exp.config.errors import ConfigError
from europa_exp.launch import doctor
from europa_exp.launch.doctor import Health, examine


@pytest.fixture(autouse=True)
def clean(monkeypatch, tmp_path):
    for name in list(os.environ):
        if name.startswith(("SLURM", "SBATCH", "WANDB")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("EUROPA_USER_CONFIG", "")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def commands(monkeypatch, tmp_path):
    """Only these commands (which end well and say UP) are on PATH, with bash and git."""
    folder = tmp_path / "bin"
    folder.mkdir()

    def have(*names):
        for name in names:
            (folder / name).write_text("#!/bin/sh\necho Slurmctld is UP\n")
            (folder / name).chmod(0o755)
        monkeypatch.setenv("PATH", str(folder))

    for name in ("bash", "git"):
        found = next(p for d in os.environ["PATH"].split(":") if (p := Path(d) / name).exists())
        (folder / name).symlink_to(found)
    have()
    return have


def found(*overrides):
    return {f.subject: f for f in examine(CONF, overrides)}


SLURM = ("sbatch", "srun", "squeue", "scontrol", "sacct")


def test_this_machine_has_what_a_local_run_needs():
    everything = list(examine(CONF, []))
    assert not [f for f in everything if f.health is Health.missing]
    by_subject = {f.subject: f.text for f in everything}
    assert "torch 2." in by_subject["packages"]
    assert "torchtitan 0." in by_subject["packages"]
    assert "offline" in by_subject["W&B"]
    assert "not used" in by_subject["Slurm"]
    assert not Path("runs").exists()


def test_slurm_and_its_absence(commands):
    commands("sbatch", "srun", "scontrol")
    result = found("cluster=slurm")
    assert result["sbatch"].health is Health.ok
    assert result["squeue"].health is Health.missing
    assert result["sacct"].health is Health.note
    assert result["controller"].health is Health.ok
    commands(*SLURM)
    assert not [f for f in found("cluster=slurm").values() if f.health is Health.missing]


def test_controller_that_does_not_answer(commands, tmp_path):
    commands(*SLURM)
    (tmp_path / "bin/scontrol").write_text("#!/bin/sh\necho Slurmctld is DOWN\nexit 1\n")
    assert found("cluster=slurm")["controller"].health is Health.missing


def test_account_and_personal_settings(commands, monkeypatch, tmp_path):
    commands(*SLURM)
    assert "cluster.account" in found("cluster=jupiter")["configuration"].text
    mine = tmp_path / "mine.yaml"
    monkeypatch.setenv("EUROPA_USER_CONFIG", str(mine))
    mine.write_text("jupiter: {account: b}\n")
    result = found("cluster=jupiter")
    assert result["configuration"].health is Health.ok
    assert result["your settings"].text == f"{mine}: account"
    assert "it has jupiter" in found("cluster=slurm")["your settings"].text
    mine.write_text("jupiter: {acount: b}\n")
    with pytest.raises(ConfigError, match="acount"):
        found("cluster=jupiter")


def test_modules(commands, monkeypatch):
    commands(*SLURM)
    overrides = ("cluster=slurm", "cluster.modules=[Stages/2026,GCC]")
    monkeypatch.setenv("BASH_FUNC_module%%", "() { :; }")
    assert found(*overrides)["modules"].health is Health.ok
    monkeypatch.setenv("BASH_FUNC_module%%", '() { [ "$2" != GCC ]; }')
    result = found(*overrides)["modules"]
    assert result.health is Health.missing
    assert result.text.startswith("GCC can't be loaded")


def test_what_a_job_will_not_inherit_is_told(commands, monkeypatch):
    commands(*SLURM)
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    monkeypatch.setenv("SBATCH_PARTITION", "p")
    assert "SBATCH_PARTITION, SLURM_JOB_ID" in found("cluster=slurm")["environment"].text


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_runs_folder_that_cannot_be_written(tmp_path):
    tmp_path.chmod(0o500)
    try:
        assert doctor.runs_folder(tmp_path / "runs").health is Health.missing
    finally:
        tmp_path.chmod(0o700)


def test_runs_folder_below_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    assert doctor.runs_folder(tmp_path / "file" / "runs").health is Health.missing


def test_folder_for_checkpoints(tmp_path):
    assert "checkpoint folder" not in found()
    finding = found(f"cluster.checkpoint_dir={tmp_path}/scratch/me")["checkpoint folder"]
    assert finding.health is Health.ok
    assert finding.text.startswith(f"{tmp_path}/scratch/me (to be made in {tmp_path}), ")
    assert "GiB" in finding.text
    assert not (tmp_path / "scratch").exists()
    (tmp_path / "scratch").touch()
    assert (
        found(f"cluster.checkpoint_dir={tmp_path}/scratch/me")["checkpoint folder"].health is Health.missing
    )


def test_online_needs_a_login(monkeypatch, tmp_path):
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert found("tracking=online")["W&B"].health is Health.missing
    (tmp_path / "netrc").write_text("machine api.wandb.ai\n  login user\n  password verysecret\n")
    finding = found("tracking=online")["W&B"]
    assert finding.health is Health.ok
    assert "verysecret" not in finding.text


def test_console_script_and_its_exit_codes(tmp_path):
    def run(*arguments):
        environ = {**os.environ, "PATH": str(tmp_path)}
        return subprocess.run(
            [sys.executable, "-m", "europa_exp.cli", "doctor", *arguments],
            capture_output=True,
            text=True,
            env=environ,
            timeout=60,
        )

    fine = run()
    assert fine.returncode == 0
    assert all(line.startswith(("ok ", "note ")) for line in fine.stdout.splitlines())
    absent = run("cluster=slurm")
    assert absent.returncode == 1
    assert "missing  sbatch: not on PATH" in absent.stdout
    wrong = run("cluster=slrm")
    assert wrong.returncode == 2
    assert "cluster=slurm" in wrong.stderr
