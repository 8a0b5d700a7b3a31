"""Settings from the user's own file: where they are looked for, what may stand there, who wins."""

from __future__ import annotations

import pytest

from europa_exp.config import personal
from europa_exp.config.errors import ConfigError
from europa_exp.config.schema import IDENTITY_EXCLUDES
from europa_exp.launch.compose import resolve
from europa_exp.launch.plugins import composer

CLUSTERS = ["jupiter", "slurm", "local"]


@pytest.fixture
def write(tmp_path, monkeypatch):
    file = tmp_path / "mine.yaml"
    monkeypatch.setenv(personal.VARIABLE, str(file))

    def written(text):
        file.write_text(text)
        return file

    return written


def test_where_the_file_is(monkeypatch, tmp_path):
    monkeypatch.delenv(personal.VARIABLE, raising=False)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert personal.path() == tmp_path / ".config/europa_exp/cluster.yaml"
    assert personal.settings(CLUSTERS) == {}
    monkeypatch.setenv("XDG_CONFIG_HOME", "/x")
    assert str(personal.path()) == "/x/europa_exp/cluster.yaml"
    monkeypatch.setenv(personal.VARIABLE, "~/mine.yaml")
    assert personal.path() == tmp_path / "mine.yaml"
    monkeypatch.setenv(personal.VARIABLE, "")
    assert personal.path() is None
    assert personal.settings(CLUSTERS) == {}


def test_settings_by_cluster(write):
    write("jupiter:\n  account: b\n  runs_dir: /p/runs\n  setup: [a, b]\nslurm:\n")
    assert personal.settings(CLUSTERS) == {
        "jupiter": {
            "cluster.account": "b",
            "launch.runs_dir": "/p/runs",
            "cluster.setup": ["a", "b"],
        },
        "slurm": {},
    }


@pytest.mark.parametrize("text", ["", "# nothing yet\n", "jupiter: {}\n"])
def test_an_empty_file_is_fine(write, text):
    write(text)
    assert all(not values for values in personal.settings(CLUSTERS).values())


WRONG = {
    "jupyter: {account: b}": ["jupyter", "no such cluster", "jupiter"],
    "jupiter: {acount: b}": ["jupiter.acount", "Did you mean account?"],
    "jupiter: {account: 3}": ["jupiter.account=3", "text"],
    "jupiter: {requeue: 1}": ["jupiter.requeue=1", "true or false"],
    "jupiter: {requeue: 'yes'}": ["jupiter.requeue='yes'", "true or false"],
    "jupiter: {setup: a}": ["jupiter.setup", "list"],
    "jupiter: mybudget": ["jupiter=", "mapping"],
    "jupiter: {env: {A: b}}": ["jupiter.env", "can change a result", "cluster.env=..."],
    "jupiter: {numa_binding: cpu}": ["jupiter.numa_binding", "can change a result"],
    "jupiter: {executor: local}": ["jupiter.executor"],
    "account: b": ["account", "no such cluster"],
    "- a": ["mapping"],
    "jupiter: {account: a, account: b}": ["account", "line 1"],
    "jupiter: {account: b": ["line"],
    "jupiter: {account: !!python/object/apply:os.system [x]}": ["line 1"],
}


@pytest.mark.parametrize("text", list(WRONG))
def test_what_is_wrong_is_told_with_the_file(write, text):
    file = write(text)
    with pytest.raises(ConfigError) as e:
        personal.settings(CLUSTERS)
    for words in [str(file), *WRONG[text]]:
        assert words in str(e.value)


def test_everything_wrong_is_told_at_once(write):
    write("jupiter: {acount: b, mail_user: 3}\nslrm: {}\n")
    with pytest.raises(ConfigError) as e:
        personal.settings(CLUSTERS)
    assert len(e.value.problems) == 3


@pytest.mark.parametrize("make", [lambda f: f.mkdir(), lambda f: f.write_bytes(b"\xff\xfe"), lambda f: None])
def test_a_file_that_cannot_be_read_is_named(write, tmp_path, make):
    make(tmp_path / "mine.yaml")
    with pytest.raises(ConfigError, match=r"mine\.yaml"):
        personal.settings(CLUSTERS)


def test_folders_are_written_out_as_this_shell_has_them(write, monkeypatch):
    monkeypatch.setenv("SCRATCH", "/scratch/budget")
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("NOWHERE", raising=False)
    write("slurm: {checkpoint_dir: $SCRATCH/me, runs_dir: ~/runs, setup: ['export A=$SCRATCH']}")
    assert personal.settings(CLUSTERS)["slurm"] == {
        "cluster.checkpoint_dir": "/scratch/budget/me",
        "launch.runs_dir": "/home/me/runs",
        "cluster.setup": ["export A=$SCRATCH"],
    }
    write("slurm: {checkpoint_dir: '${SCRATCH}/me'}")
    assert personal.settings(CLUSTERS)["slurm"] == {"cluster.checkpoint_dir": "/scratch/budget/me"}
    file = write("slurm: {checkpoint_dir: $NOWHERE/me}")
    with pytest.raises(ConfigError) as e:
        personal.settings(CLUSTERS)
    for part in (str(file), "slurm.checkpoint_dir", "$NOWHERE/me"):
        assert part in str(e.value)


def test_only_what_changes_no_result_is_personal():
    allowed = set(personal.keys())
    assert {f"cluster.{key}" for key in allowed - {"runs_dir"}} <= IDENTITY_EXCLUDES
    assert {"account", "mail_user", "mail_type", "runs_dir", "python", "setup"} <= allowed


# ------------------------------------------------------------------------------------------------------ in a composition


def composed(make_conf, *overrides):
    with composer(make_conf) as made:
        return resolve(made.compose(overrides).cfg)


def test_file_replaces_conf_and_gives_way_to_the_command_line(write):
    from compose import CONF

    write(
        "jupiter: {account: b, partition: devel, runs_dir: /p/runs, sbatch_args: {qos: q}}\nslurm: {account: c}\n"
    )
    cfg = composed(CONF, "cluster=jupiter")
    assert (cfg.cluster.account, cfg.cluster.partition, cfg.launch.runs_dir) == ("b", "devel", "/p/runs")
    assert cfg.cluster.sbatch_args == {"qos": "q"}
    cfg = composed(CONF, "cluster=jupiter", "cluster.account=mine", "launch.runs_dir=here")
    assert (cfg.cluster.account, cfg.cluster.partition, cfg.launch.runs_dir) == ("mine", "devel", "here")
    assert composed(CONF, "cluster=slurm").cluster.account == "c"
    assert composed(CONF).cluster.account is None
    assert composed(CONF).launch.runs_dir == "runs"


def test_a_broken_file_is_one_message_for_a_whole_sweep(write):
    from composing import call

    file = write("jupiter: {acount: b}")
    result = call("-m", "comm=fp8,bf16", "nccl.max_ctas=1,2,3", "launch.preview=true")
    assert result.code == 2
    assert result.err.count("acount") == 1
    assert str(file) in result.err
