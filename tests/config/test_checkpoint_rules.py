"""Rules of what checkpoints are kept, where, and from which a run may start."""

from __future__ import annotations

import os

import pytest

from europa_exp.config.checks import check
from europa_exp.config.identity import identity
from europa_exp.config.io import to_yaml

KEEP, KEEP_EVERY = "training.checkpoint_keep", "training.checkpoint_keep_every"
FOLDER, INITIAL = "cluster.checkpoint_dir", "training.initial_checkpoint"


@pytest.fixture
def found(make):
    def run(*overrides: str):
        return {p.field: p for p in check(make(*overrides))}

    return run


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (("training.checkpoint_every=5", f"{KEEP}=2", f"{KEEP_EVERY}=20"), None),
        ((f"{KEEP_EVERY}=20",), ["training.checkpoint_every=0 writes nothing"]),
        (("training.checkpoint_every=5", f"{KEEP}=2", f"{KEEP_EVERY}=12"), ["12 % 5 = 2", "Take 15"]),
        (("training.checkpoint_every=5", f"{KEEP_EVERY}=10"), ["keeps every checkpoint", f"{KEEP}=2"]),
        (("training.checkpoint_every=5", f"{KEEP}=2", f"{KEEP_EVERY}=-5"), ["at least 0"]),
    ],
)
def test_kept_for_good(found, overrides, parts):
    problems = found(*overrides)
    if parts is None:
        assert problems == {}
        return
    assert list(problems) == [KEEP_EVERY]
    assert all(part in str(problems[KEEP_EVERY]) for part in parts), str(problems[KEEP_EVERY])


def test_a_folder_for_checkpoints(found, tmp_path):
    saves = "training.checkpoint_every=5"
    assert found(saves, f"{FOLDER}={tmp_path}/not/yet") == {}
    assert found(saves, f"{FOLDER}={tmp_path}", "cluster=slurm") == {}
    for more in ((saves,), ()):
        assert "absolute" in found(*more, f"{FOLDER}=scratch")[FOLDER].rule
    (tmp_path / "file").touch()
    assert found(saves, f"{FOLDER}={tmp_path}/file/me")[FOLDER].rule == f"{tmp_path}/file is no folder"
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    assert "is no folder" in found(saves, f"{FOLDER}={tmp_path}/link/me")[FOLDER].rule
    # Whoever saves nothing, or only looks, needs none.
    assert found(f"{FOLDER}={tmp_path}/file/me") == {}
    assert found(saves, f"{FOLDER}={tmp_path}/file/me", "launch.preview='true'") == {}


def test_home_and_variables_are_not_for_the_command_line(found, monkeypatch):
    monkeypatch.setenv("SCRATCH", "/scratch")
    monkeypatch.setenv("HOME", "/home/me")
    for text, path in (("$SCRATCH/me", "/scratch/me"), ("~/ck", "/home/me/ck")):
        problem = found("training.checkpoint_every=5", f"{FOLDER}='{text}'")[FOLDER]
        assert problem.way_out == f"Write the path itself: {path}"
    monkeypatch.delenv("SCRATCH")
    way_out = found(f"{FOLDER}='$SCRATCH/me'")[FOLDER].way_out
    assert "SCRATCH is not set in this shell" in way_out
    assert "$SCRATCH" not in way_out


def test_what_is_permitted_and_still_takes_no_file(found):
    """A file system of the kernel's own, which lets root do everything and takes no files."""
    problem = found("training.checkpoint_every=2", f"{FOLDER}=/proc/nowhere")[FOLDER]
    assert "can't be written (from /proc on it would have to be made)" in problem.rule


def test_the_probe_leaves_nothing(found, tmp_path):
    assert found("training.checkpoint_every=5", f"{FOLDER}={tmp_path}/not/yet") == {}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("below", ["", "/checkpoints"])
@pytest.mark.parametrize("saves", [["training.checkpoint_every=5"], []])
def test_among_the_runs_is_no_place(found, tmp_path, monkeypatch, below, saves):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "alias").symlink_to("runs")
    for name in ("runs", "alias"):
        problem = found(*saves, f"{FOLDER}={tmp_path}/{name}{below}")[FOLDER]
        assert "where every folder is a run" in problem.rule
    assert found(*saves, f"{FOLDER}={tmp_path}/runs-too{below}") == {}
    assert found(*saves, f"{FOLDER}={tmp_path}", f"launch.runs_dir={tmp_path}/runs") == {}


def test_writing_while_training_goes_on_needs_something_to_write(found):
    name = "training.checkpoint_async"
    problem = found(f"{name}=true")[name]
    assert "no effect while training.checkpoint_every=0" in problem.rule
    assert "training.checkpoint_every=<steps>" in problem.way_out
    assert found(f"{name}=true", "training.checkpoint_every=5") == {}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written(found, tmp_path):
    (tmp_path / "shut").mkdir(mode=0o500)
    problem = found("training.checkpoint_every=5", f"{FOLDER}={tmp_path}/shut/me")[FOLDER]
    assert "can't be written" in problem.rule


def test_where_checkpoints_lie_changes_no_identity(make):
    assert identity(make(f"{FOLDER}=/scratch/me")) == identity(make())
    assert identity(make("training.checkpoint_every=5", f"{KEEP}=2")) == identity(
        make("training.checkpoint_every=5", f"{KEEP}=2", f"{KEEP_EVERY}=0")
    )


# ------------------------------------------------------------------------------------------- an initial checkpoint


@pytest.fixture
def linked(tmp_path, monkeypatch, make):
    """A run whose checkpoints lie on scratch, with its links; returns its name for the checkpoint."""
    monkeypatch.chdir(tmp_path)
    run, place = tmp_path / "runs" / "r", tmp_path / "scratch" / "r-1a2b3c4d"
    run.mkdir(parents=True)
    (place / "step-2").mkdir(parents=True)
    (place / "step-2" / ".metadata").touch()
    (run / "checkpoints").symlink_to(place)
    (place / "run").symlink_to(run)
    (run / "config.yaml").write_text(to_yaml(make()))
    return run / "checkpoints" / "step-2"


def test_what_a_runs_own_link_leads_to_is_ours(found, linked, tmp_path):
    assert found(f"{INITIAL}={linked}") == {}
    assert found(f"{INITIAL}=runs/r/checkpoints/step-2") == {}
    there = tmp_path / "scratch" / "r-1a2b3c4d" / "step-2"
    assert "trust=true" in found(f"{INITIAL}={there}")[INITIAL].way_out
    assert found(f"{INITIAL}={there}", f"{FOLDER}={tmp_path}/scratch") == {}
    # The link stands for the checkpoints in the folder, not for whatever lies behind those.
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / ".metadata").touch()
    linked.with_name("step-3").symlink_to(tmp_path / "theirs")
    assert "trust=true" in found(f"{INITIAL}={linked.with_name('step-3')}")[INITIAL].way_out


def test_a_link_that_came_with_somebody_elses_run_is_not_ours(found, linked, monkeypatch):
    own = os.stat

    def stat(path, *args, **kwargs):
        info = own(path, *args, **kwargs)
        if str(path) != str(linked.parent):
            return info
        return os.stat_result([info.st_uid + 1 if i == 4 else value for i, value in enumerate(info)])

    monkeypatch.setattr(os, "stat", stat)
    assert "trust=true" in found(f"{INITIAL}={linked}")[INITIAL].way_out


def test_the_model_is_found_through_either_link(found, linked, tmp_path):
    there = tmp_path / "scratch" / "r-1a2b3c4d" / "step-2"
    for path in (linked, there):
        problem = found(f"{INITIAL}={path}", "model.n_layers=2", "trust=true")[INITIAL]
        assert "model.n_layers is 4 there and 2 here" in problem.rule
