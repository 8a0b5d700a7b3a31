"""rerun=RUN: the same experiment without changes, a child with them, and records that nobody should trust."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from composing import call, plan

from europa_exp.config import io
from europa_exp.config.errors import ConfigError
from europa_exp.config.identity import identity
from europa_exp.launch.rerun import find_record
from europa_exp.runs.code import CodeState
from europa_exp.runs.folder import RunFolder, create_run

CODE = CodeState(commit="0" * 40, fingerprint="f" * 12)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def recorded(*overrides: str, change=None, runs_dir: str = "runs") -> RunFolder:
    """A run folder as submitting makes it."""
    (point,) = plan(*overrides).points
    cfg = point.cfg
    if change is not None:
        change(cfg)
    return create_run(
        runs_dir,
        cfg,
        overrides=list(overrides),
        name=point.name,
        identity=identity(cfg),
        sweep=None,
        repeat=0,
        command=["launch.py"],
        code=CODE,
        data_fingerprint=None,
    )


def ids(points) -> set[str]:
    return {p.identity for p in points}


def test_without_changes_it_is_the_same_experiment_and_always_runs(submitted):
    run = recorded("comm=fp8", "nccl=jupiter", "training.steps=7", "+tags=[a]", "tracking.notes=mine")
    before = sorted(p.name for p in run.path.iterdir())
    for text in (str(run.path), run.name, run.name[:30], identity(run.config())):
        result = call(f"rerun={text}")
        assert result.code == 0, result.err
        assert "the same experiment" in result.out
    assert ids(p for points in submitted for p in points) == {identity(run.config())}
    (point,) = submitted[0]
    assert point.force
    assert point.parent == run.name
    assert point.name == run.name
    assert point.cfg.tags == ["a"]
    assert point.cfg.tracking.notes is None
    assert sorted(p.name for p in run.path.iterdir()) == before
    assert sorted(p.name for p in Path().iterdir()) == ["runs"]


def test_differences_are_told_before_anything_else(submitted):
    run = recorded("comm=fp8")
    provenance = json.loads((run.path / "provenance.json").read_text())
    provenance["packages"]["torch"] = "1.0"
    provenance["host"] = "elsewhere"
    (run.path / "provenance.json").write_text(json.dumps(provenance))
    out = call(f"rerun={run.name}", "launch.preview=true").out
    assert "torch: 1.0 ->" in out
    assert "host: elsewhere ->" in out
    assert "code:" in out
    assert out.index("torch: 1.0") < out.index("hash")
    assert submitted == []


def test_a_field_and_a_group_change_and_the_rest_stays_as_recorded(submitted):
    run = recorded("comm=fp8", "nccl=jupiter", "nccl.max_ctas=8", "training.steps=7")
    result = call(f"rerun={run.name}", "nccl=default", "nccl.extra.NCCL_ALGO=Ring", "training.seed=3")
    assert result.code == 0, result.err
    assert "a new experiment with this parent" in result.out
    ((point,),) = submitted
    assert point.identity != identity(run.config())
    assert point.parent == run.name
    assert point.cfg.nccl.max_ctas is None
    assert point.cfg.nccl.socket_ifname is None
    assert point.cfg.nccl.extra == {"NCCL_ALGO": "Ring"}
    assert point.cfg.training.seed == 3
    assert point.cfg.training.steps == 7
    assert point.cfg.comm.expert_all_gather.name == "fp8"
    assert point.overrides == ["nccl=default", "++nccl.extra.NCCL_ALGO=Ring", "training.seed=3"]


def test_a_record_keeps_what_todays_conf_changed(submitted):
    run = recorded(change=lambda cfg: setattr(cfg.optimizer, "lr", 0.125))
    call(f"rerun={run.name}")
    assert submitted[0][0].cfg.optimizer.lr == 0.125


def test_sweeps_over_a_rerun(submitted):
    run = recorded("comm=fp8", "training.steps=7")
    assert call(f"rerun={run.name}", "-m", "comm=bf16,fp8", "nccl.max_ctas=8,16").code == 0
    assert call("-m", "+sweeps=comm_nccl", f"rerun={run.name}").code == 0
    assert [len(points) for points in submitted] == [4, 6]
    assert {p.cfg.training.steps for points in submitted for p in points} == {7}
    assert len(ids(submitted[1])) == 6
    result = call(f"rerun={run.name}", "nccl.max_ctas=8,16")
    assert result.code == 2
    assert "-m" in result.err


def test_where_and_how_come_from_here_but_results_stay(submitted):
    def elsewhere(cfg):
        cfg.cluster.name = "their_cluster"
        cfg.cluster.threads_per_rank = 5
        cfg.cluster.env = {"MIMALLOC_ALLOW_THP": "0"}
        cfg.cluster.preload = False
        cfg.tracking.project = "theirs"
        cfg.launch.repeat = 9
        cfg.launch.force = True
        cfg.trust = True

    run = recorded(change=elsewhere)
    result = call(f"rerun={run.name}")
    ((point,),) = submitted
    assert point.identity == identity(run.config())
    assert (point.cfg.cluster.name, point.cfg.cluster.preload) == ("local", True)
    assert (point.cfg.cluster.threads_per_rank, point.cfg.cluster.env) == (5, {"MIMALLOC_ALLOW_THP": "0"})
    assert point.cfg.tracking.project == "europa_exp"
    assert (point.cfg.launch.repeat, point.cfg.launch.force, point.cfg.trust) == (1, False, False)
    assert "cluster.threads_per_rank: 1 here, 5 as recorded" in result.out
    assert "cluster.env" in result.out

    call(f"rerun={run.name}", "cluster=local")
    call(f"rerun={run.name}", "cluster.threads_per_rank=2", "cluster.env.TZ=UTC")
    assert submitted[1][0].cfg.cluster.threads_per_rank == 1
    assert submitted[1][0].cfg.cluster.env == {}
    assert submitted[2][0].cfg.cluster.threads_per_rank == 2
    assert submitted[2][0].cfg.cluster.env == {"TZ": "UTC"}


@pytest.mark.parametrize(
    ("name", "value"),
    [("LD_PRELOAD", "evil.so"), ("PYTHONSTARTUP", "x"), ("ANYTHING", "1"), ("TORCH_HOME", "/their/folder")],
)
def test_a_records_environment_is_not_taken_blindly(submitted, name, value):
    run = recorded(change=lambda cfg: cfg.cluster.env.update({name: value}))
    result = call(f"rerun={run.name}")
    assert result.code == 2
    assert f"cluster.env.{name}" in result.err
    assert "cluster.env={}" in result.err
    assert submitted == []
    assert call(f"rerun={run.name}", "cluster.env={}").code == 0
    assert submitted[0][0].cfg.cluster.env == {}


@pytest.mark.parametrize(
    ("extra", "part"),
    [("NCCL_NET_PLUGIN", "plugins"), ("LD_PRELOAD", "NCCL_*"), ("NCCL_TOPO_FILE", "file paths")],
)
def test_a_records_nccl_variables_are_checked(submitted, extra, part):
    run = recorded(change=lambda cfg: cfg.nccl.extra.update({extra: "x"}))
    result = call(f"rerun={run.name}")
    assert result.code == 2
    assert part in result.err
    assert submitted == []


def test_a_checkpoint_from_elsewhere_needs_trust(submitted, tmp_path):
    theirs = tmp_path / "their_checkpoint"
    theirs.mkdir()
    (theirs / ".metadata").touch()

    def change(cfg):
        cfg.training.initial_checkpoint = str(theirs)
        cfg.trust = True

    run = recorded(change=change)
    result = call(f"rerun={run.name}")
    assert result.code == 2
    assert "trust=true" in result.err
    assert submitted == []


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("_target_: os.system", "_target_"),
        ("trust: ${oc.env:HOME}", "trust"),
        ("tags: [!!python/object/apply:os.getcwd []]", "config"),
        ("unknown: 1", "unknown"),
    ],
)
def test_a_record_is_data(submitted, line, part):
    run = recorded("comm=fp8")
    path = run.path / "config.yaml"
    text = path.read_text()
    key = line.split(":")[0]
    path.write_text(re.sub(rf"^{key}:.*\n", "", text, flags=re.MULTILINE) + line + "\n")
    result = call(f"rerun={run.name}")
    assert result.code == 2, result.out
    assert part in result.err
    assert str(Path.home()) not in result.err
    assert "Traceback" not in result.err
    assert submitted == []


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["rerun=nothing"], ["rerun='nothing'", "run folder", "prefix", "hash", "ENTITY/PROJECT/ID"]),
        (["rerun="], ["names no run", "run folder"]),
        (["rerun=RUN", "rerun=RUN"], ["once"]),
        (["rerun=RUN", "experiment=ladder/00_baseline"], ["experiment", "groups"]),
        (["rerun=RUN", "nccl.max_cta=3"], ["nccl.max_ctas"]),
        (["rerun=RUN", "comm=fp9"], ["bf16, bf16_a2a, fp8, fp8_a2a"]),
        (["rerun=RUN", "nccl.max_ctas=0"], ["1 to 64"]),
        (["rerun=RUN", "training.steps=${nowhere}"], ["training.steps", "nowhere"]),
        (["rerun=RUN", "hydra.verbose=true"], ["hydra.verbose"]),
        (["rerun=RUN", "--help"], ["--help"]),
        (["rerun=RUN", "-m", "--cfg", "job"], ["--cfg"]),
        (["rerun=RUN", "+sweeps=comm_nccl"], ["-m"]),
        (["rerun=RUN", "-m", "+sweeps=nothing"], ["comm_nccl"]),
    ],
)
def test_bad_reruns_are_one_clear_message(submitted, arguments, parts):
    run = recorded("comm=fp8")
    result = call(*(a.replace("RUN", run.name) for a in arguments))
    assert result.code == 2, result.out
    assert "Traceback" not in result.err
    for part in parts:
        assert part in result.err
    assert submitted == []
    assert [p.name for p in Path("runs").iterdir() if not p.name.startswith(".")] == [run.name]


def test_runs_that_a_text_fits_are_listed_one_a_line(submitted):
    runs = [recorded(f"nccl.max_ctas={n}") for n in (16, 17)]
    result = call("rerun=max_ctas")
    assert result.code == 2
    lines = result.err.splitlines()
    first = next(i for i, line in enumerate(lines) if "fits 2 runs; type more of the name. Give" in line)
    for line, run in zip(lines[first + 1 : first + 3], runs, strict=True):
        assert line.startswith(f"      {run.name}  (created, ")
    assert submitted == []


def test_cfg_job_prints_the_configuration_that_would_run(submitted):
    run = recorded("comm=fp8")
    result = call(f"rerun={run.name}", "--cfg", "job", "nccl.max_ctas=16")
    assert result.code == 0
    cfg = io.from_yaml(result.out)
    assert cfg.nccl.max_ctas == 16
    assert cfg.comm.expert_all_gather.name == "fp8"
    assert submitted == []


def test_a_run_of_another_runs_folder(submitted):
    run = recorded("comm=fp8", runs_dir="theirs")
    assert call(f"rerun={run.name}").code == 2
    assert call(f"rerun={run.name}", "launch.runs_dir=theirs").code == 0
    assert call(f"rerun=theirs/{run.name}").code == 0
    assert [p[0].cfg.launch.runs_dir for p in submitted] == ["theirs", "runs"]


def test_an_offline_wandb_folder(submitted):
    run = recorded("comm=fp8", "training.steps=7")
    folder = Path("wandb/offline-run-20260101_000000-abc")
    (folder / "files").mkdir(parents=True)
    (folder / "run-abc.wandb").write_bytes(b"")
    from europa_exp.runs.tracking import FROZEN_FILE

    (folder / "files" / FROZEN_FILE).write_text(run.config_text())
    result = call(f"rerun={folder}")
    assert result.code == 0, result.err
    assert ids(submitted[0]) == {identity(run.config())}
    assert submitted[0][0].parent == str(folder)


def test_a_wandb_path_is_asked_of_wandb_and_a_failure_says_both(monkeypatch):
    from europa_exp.runs import wandb_source

    run = recorded("comm=fp8")
    known = wandb_source.RecordedConfig(run.config_text(), "source", {"host": "there"}, None)
    monkeypatch.setattr(wandb_source, "recorded_config", lambda text: known)
    record = find_record("entity/project/id", "runs")
    assert record.name == "entity/project/id"
    assert record.provenance == {"host": "there"}
    assert identity(record.cfg) == identity(run.config())

    def refused(text):
        raise wandb_source.WandbSourceError("nobody is logged in")

    monkeypatch.setattr(wandb_source, "recorded_config", refused)
    with pytest.raises(ConfigError) as e:
        find_record("entity/project/id", "runs")
    for part in ("no run 'entity/project/id'", "nobody is logged in", "run folder"):
        assert part in str(e.value)


# ---------------------------------------------------------------------------------------- the folder for checkpoints


FOLDER = "cluster.checkpoint_dir"


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """A run on this machine that was told to keep its checkpoints in ``scratch``; the user has a file of settings."""
    monkeypatch.setenv("EUROPA_USER_CONFIG", str(tmp_path / "mine.yaml"))
    (tmp_path / "mine.yaml").write_text("")
    return recorded("training.checkpoint_every=2", f"{FOLDER}={tmp_path}/scratch")


def folder_of(submitted) -> str | None:
    return submitted.pop()[0].cfg.cluster.checkpoint_dir


@pytest.mark.parametrize("chosen", [[], ["cluster=local"]])
def test_the_folder_for_checkpoints_stays_as_recorded_on_the_same_cluster(submitted, saved, tmp_path, chosen):
    result = call(f"rerun={saved.name}", *chosen)
    assert result.code == 0, result.err
    assert folder_of(submitted) == f"{tmp_path}/scratch"
    assert f"{FOLDER}: {tmp_path}/scratch as recorded is used" in result.out
    assert "None" not in result.out


@pytest.mark.parametrize("by", ["call", "null", "file"])
def test_the_call_and_the_users_own_file_say_where_checkpoints_go(submitted, saved, tmp_path, by):
    given = {"call": [f"{FOLDER}={tmp_path}/other"], "null": [f"{FOLDER}=null"], "file": []}[by]
    if by == "file":
        (tmp_path / "mine.yaml").write_text(f"local:\n  checkpoint_dir: {tmp_path}/other\n")
    result = call(f"rerun={saved.name}", *given)
    assert result.code == 0, result.err
    assert folder_of(submitted) == (None if by == "null" else f"{tmp_path}/other")
    used = "the run folders" if by == "null" else f"{tmp_path}/other"
    assert f"{FOLDER}: {tmp_path}/scratch recorded and {used} used" in result.out
    assert f"{FOLDER}={tmp_path}/scratch takes the recorded one" in result.out


def test_the_folder_of_another_cluster_or_of_somebody_else_is_not_taken(
    submitted, saved, tmp_path, monkeypatch
):
    result = call(f"rerun={saved.name}", "cluster.name=other")
    assert folder_of(submitted) is None
    assert f"{FOLDER}: {tmp_path}/scratch recorded, on local, and the run folders used" in result.out
    (tmp_path / "scratch").mkdir()
    if os.geteuid() == 0:
        os.chown(tmp_path / "scratch", 4321, -1)
    else:
        monkeypatch.setattr("os.geteuid", lambda: 4321)
    result = call(f"rerun={saved.name}")
    assert folder_of(submitted) is None
    assert f"{tmp_path}/scratch belongs to somebody else" in result.out


def test_nothing_is_said_of_a_folder_that_is_the_same(submitted, saved, tmp_path):
    (tmp_path / "mine.yaml").write_text(f"local:\n  checkpoint_dir: {tmp_path}/scratch\n")
    assert FOLDER not in call(f"rerun={saved.name}").out
    assert folder_of(submitted) == f"{tmp_path}/scratch"


def test_a_record_makes_no_checkpoint_ours_by_naming_its_folder(submitted, tmp_path):
    theirs = tmp_path / "theirs" / "run-1" / "step-1"
    theirs.mkdir(parents=True)
    (theirs / ".metadata").touch()

    def change(cfg):
        cfg.training.initial_checkpoint = str(theirs)
        cfg.cluster.checkpoint_dir = str(tmp_path / "theirs")

    run = recorded(change=change)
    result = call(f"rerun={run.name}")
    assert result.code == 2
    assert "trust=true" in result.err
    assert submitted == []
    assert call(f"rerun={run.name}", f"{FOLDER}={tmp_path}/theirs").code == 0


def test_another_cluster_than_recorded_is_told(submitted):
    """A rerun takes neither the cluster nor its settings from the record."""
    slurm = ("cluster=slurm", "cluster.network_interface=lo", "cluster.time_limit='00:10:00'")
    run = recorded(*slurm)
    result = call(f"rerun={run.name}")
    assert result.code == 0, result.err
    assert "  cluster: slurm as recorded, local here\n" in result.out
    result = call(f"rerun={run.name}", *slurm[:2], "cluster.time_limit='00:20:00'")
    assert result.code == 0, result.err
    assert "  cluster.time_limit: 00:10:00 as recorded, 00:20:00 here\n" in result.out
    result = call(f"rerun={run.name}", *slurm)
    assert result.code == 0, result.err
    assert "  cluster" not in result.out
