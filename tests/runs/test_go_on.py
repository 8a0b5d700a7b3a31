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
from europa_exp.runs import checkpoints, commands
from europa_exp.runs.folder import RunFolder, RunFolderError

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


OF_CLUSTER = (
    "cluster=slurm",
    "cluster.network_interface=lo",
    "cluster.time_limit='00:10:00'",
    "cluster.account=ours",
    "+cluster.sbatch_args.hold='true'",
    'cluster.comment="$(touch x)"',
    "cluster.nodelist=n1",
)


def advised(told: str) -> list[str]:
    """The commands that start a run among what is said to be next."""
    lines = [line for line in told.splitlines() if line.startswith("Next: ") and "python launch.py" in line]
    return [line[line.index("python launch.py") :] for line in lines]


def test_every_advice_to_run_it_again_leads_to_where_it_ran(submitted, tmp_path):
    """The cluster with all that was typed of it, and the runs folder: a rerun takes neither from the record."""
    typed = (*OF_CLUSTER, "cluster.nodelist=n2")
    first = call(*typed, "comm=fp8")
    assert first.code == 0, first.err
    wanted = submitted.pop()[0].cfg.cluster
    assert wanted.nodelist == "n2"
    run = ended(tmp_path / "their runs", *typed, "comm=fp8", name="r-1")
    told = europa("why", run.name, runs=tmp_path / "their runs").stdout
    again, goes_on = advised(told)
    for line in (again, goes_on):
        words = pasted(line)
        assert not [w for w in words if w.startswith("comm")], "the record has the rest"
        result = call(*words)
        assert result.code == 0, result.err
        ((point,),) = (submitted.pop(),)
        assert point.cfg.cluster == wanted
        assert point.parent == run.name
        assert Path(point.cfg.launch.runs_dir) == tmp_path / "their runs"
    assert not Path("x").exists()


def test_a_cluster_that_nobody_typed_is_named_too(tmp_path):
    """An experiment or the file of a sweep can choose it."""
    run = make_run(
        tmp_path / "runs",
        config("cluster=slurm", "cluster.time_limit='1:00:00'"),
        overrides=["+experiment=x"],
    )
    assert pasted(commands.rerun(run)) == [f"rerun={run.name}", "cluster=slurm"]
    here = make_run(tmp_path / "runs", name="here")
    assert pasted(commands.rerun(here, "FIELD=VALUE")) == ["rerun=here", "FIELD=VALUE"]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ({"rank": 0, "type": "ConfigError", "message": "seq_len"}, ["FIELD=VALUE"]),
        ({"rank": None, "type": "StepEnded", "message": "srun: error: no such node"}, []),
    ],
)
def test_advice_after_a_failure_names_the_cluster(tmp_path, error, words):
    run = make_run(tmp_path / "runs", overrides=["cluster=slurm", "cluster.nodelist=n1"])
    run.set_state("failed", error={"traceback": "", **error})
    (line,) = advised(europa("why", run.name, runs=tmp_path / "runs").stdout)
    assert pasted(line) == [f"rerun={run.name}", "cluster=slurm", "cluster.nodelist=n1", *words]


def test_checkpoints_that_are_gone_name_the_cluster(tmp_path):
    run = make_run(tmp_path / "runs", overrides=["cluster=slurm", "cluster.nodelist=n1"])
    checkpoints.note_saved(run, 4)
    with pytest.raises(RunFolderError) as error:
        checkpoints.resume_step(run, run.checkpoints)
    line = str(error.value)[str(error.value).index("python launch.py") :]
    assert pasted(line) == [f"rerun={run.name}", "cluster=slurm", "cluster.nodelist=n1"]


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
