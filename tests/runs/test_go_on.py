"""Going on from the newest checkpoint of a run that ended early: the command that is told does it, pasted as it is."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from composing import call
from console import europa
from making import config, make_run

from europa_exp.launch.go_on import go_on_command
from europa_exp.launch.overrides import normalize, parse
from europa_exp.runs.folder import RunFolder

NAME = 'max_ctas=16,it\'s-"1"'


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def ended(runs: Path, *overrides: str, name: str = NAME, state: str = "cancelled") -> RunFolder:
    """A run that ended early, with whole checkpoints of steps 4 and 12 and a cut one of step 14."""
    run = make_run(runs, config("training.checkpoint_every=2"), name=name, overrides=list(overrides))
    for step in (4, 12, 14):
        (run.checkpoints / f"step-{step}").mkdir(parents=True)
        if step != 14:
            (run.checkpoints / f"step-{step}" / ".metadata").touch()
    run.set_state(state)
    return run


def pasted(text: str) -> list[str]:
    """The words that bash makes of a line, without ``python launch.py``."""
    shell = ["bash", "-c", f"printf '%s\\0' {text}"]
    words = subprocess.run(shell, capture_output=True, text=True, check=True).stdout.split("\0")[:-1]
    assert words[:2] == ["python", "launch.py"]
    return words[2:]


@pytest.mark.parametrize("runs", ["runs", "their runs=2"])
def test_the_command_goes_on_from_the_newest_whole_checkpoint(submitted, tmp_path, runs):
    run = ended(tmp_path / runs)
    text = go_on_command(run, "cancelled")
    assert text is not None
    result = call(*pasted(text))
    assert result.code == 0, result.err
    ((point,),) = submitted
    assert point.cfg.training.initial_checkpoint == str(run.checkpoints / "step-12")
    assert point.parent == run.name
    assert Path(point.cfg.launch.runs_dir).resolve() == tmp_path / runs


def test_checkpoints_elsewhere_are_named_by_the_runs_link(submitted, tmp_path):
    run = ended(tmp_path / "runs")
    (tmp_path / "scratch").mkdir()
    shutil.move(run.checkpoints, tmp_path / "scratch" / "r-1")
    run.checkpoints.symlink_to(tmp_path / "scratch" / "r-1")
    result = call(*pasted(go_on_command(run, "failed") or ""))
    assert result.code == 0, result.err
    assert submitted[0][0].cfg.training.initial_checkpoint == str(run.checkpoints / "step-12")


def test_the_cluster_that_was_named_is_named_again(tmp_path):
    run = ended(tmp_path / "runs", "comm=fp8", "cluster=slurm", "cluster.nodelist=n1")
    assert [w for w in pasted(go_on_command(run, "lost") or "") if w.startswith("cluster")] == [
        "cluster=slurm"
    ]


@pytest.mark.parametrize("state", ["completed", "running", "queued", "created"])
def test_a_run_that_goes_on_or_is_complete_needs_none(tmp_path, state):
    assert go_on_command(ended(tmp_path / "runs"), state) is None


def test_no_command_without_a_checkpoint_or_a_step_left(tmp_path):
    run = ended(tmp_path / "runs")
    steps = run.config().training.steps
    (run.checkpoints / f"step-{steps}").mkdir()
    (run.checkpoints / f"step-{steps}" / ".metadata").touch()
    assert go_on_command(run, "failed") is None
    shutil.rmtree(run.checkpoints)
    assert go_on_command(run, "failed") is None
    (run.path / "config.yaml").unlink()
    assert go_on_command(ended(tmp_path / "runs", name="other"), "failed") is not None
    assert go_on_command(run, "failed") is None


@pytest.mark.parametrize("state", ["failed", "cancelled"])
def test_why_and_show_tell_it(tmp_path, state):
    run = ended(tmp_path / "runs", state=state)
    text = go_on_command(run, state)
    for verb in ("why", "show"):
        told = europa(verb, run.name, runs=tmp_path / "runs").stdout
        assert any(
            line.endswith(str(text)) and "go on" in line and "newest" in line for line in told.splitlines()
        ), told


def test_a_checkpoint_of_a_run_can_be_typed_as_it_is_read(submitted, tmp_path):
    run = ended(tmp_path / "runs", name="a=b-1")
    typed = "runs/a=b-1/checkpoints/step-12"
    for first in (f"rerun={run.name}", "training.checkpoint_every=2"):
        result = call(first, f"training.initial_checkpoint={typed}")
        assert result.code == 0, result.err
        assert submitted.pop()[0].cfg.training.initial_checkpoint == typed


@pytest.mark.parametrize("raw", ["a,b=c", "[a=b]", "choice(a=b,c)", '"a=b"', "a=b c"])
def test_what_means_something_in_the_grammar_is_left_alone(raw):
    assert normalize(f"training.initial_checkpoint={raw}") == f"training.initial_checkpoint={raw}"
    assert normalize("tracking.notes=a=b") == "tracking.notes=a=b"
    assert parse(normalize("training.initial_checkpoint=a=b")).value() == "a=b"
