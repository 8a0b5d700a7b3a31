"""``submit`` as people meet it: a command, its exit code, the folders, and no process left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from launching import CODE, command, config, environ, make_runs, mentioning, point, until

from europa_exp.config.errors import ConfigError
from europa_exp.launch import agents, dispatch, environment, submit
from europa_exp.runs.folder import NewRun, RunFolder, RunFolderError, create_runs
from europa_exp.runs.status import State

pytestmark = pytest.mark.timeout(150)


def finish(process: subprocess.Popen, seconds: float = 100) -> str:
    try:
        return process.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        raise


def states(runs_dir: Path) -> dict[str, State]:
    return {p.name: RunFolder(p).status().state for p in sorted(runs_dir.glob("run*"))}


def up(runs_dir: Path, name: str = "run0", ranks: int = 2) -> list[int]:
    """Wait until all ranks of a run are in their training function; their process ids, by rank."""
    until(lambda: all((runs_dir / name / f"up_{r}").exists() for r in range(ranks)))
    until(lambda: RunFolder(runs_dir / name).status().state is State.running)
    line = next(
        text
        for text in RunFolder(runs_dir / name).launcher_log.read_text().splitlines()
        if " ranks: " in text
    )
    return [int(part.rpartition(" ")[2]) for part in line.partition("ranks: ")[2].split(", ")]


def agent_pid(runs_dir: Path) -> int:
    [path] = runs_dir.glob(f".submitit/*/{agents.AGENT_FILE}")
    return json.loads(path.read_text())["pid"]


@pytest.mark.slow
def test_all_points_run_in_one_job_and_only_paths_are_pickled(tmp_path):
    out = finish(p := command(tmp_path / "runs", "write_steps", config(seed=1), config(seed=2)))
    assert p.returncode == 0, out
    assert states(tmp_path / "runs") == {"run0": "completed", "run1": "completed"}
    [pickle] = (tmp_path / "runs").glob(".submitit/*/*_submitted.pkl")
    assert b"sigmoid" not in pickle.read_bytes()
    assert len(pickle.read_bytes()) < 2000
    assert "2 completed" in out
    assert "europa compare --sweep s" in out
    assert not mentioning(str(tmp_path))


@pytest.mark.slow
def test_the_job_reads_what_was_frozen(tmp_path):
    """A configuration that changes between submission and start would show here: the second run is edited by hand."""
    p = command(tmp_path / "runs", "sleep_for_ever", config(), config(steps=3))
    up(tmp_path / "runs")
    assert RunFolder(tmp_path / "runs" / "run1").config().training.steps == 3
    (tmp_path / "point1.yaml").write_text("broken: [")
    os.kill(agent_pid(tmp_path / "runs"), signal.SIGTERM)
    finish(p)
    assert states(tmp_path / "runs") == {"run0": "cancelled", "run1": "cancelled"}


@pytest.mark.slow
def test_one_failing_run_leaves_the_others(tmp_path):
    configs = [config(seed=13), config(seed=1)]
    out = finish(p := command(tmp_path / "runs", "fail_when_marked", *configs))
    assert p.returncode == 1
    assert states(tmp_path / "runs") == {"run0": "failed", "run1": "completed"}
    assert "rank 1: RuntimeError: unlucky seed" in out
    assert "fail_when_marked" in out  # the traceback, shortened
    assert "run_rank" not in out  # without the launcher's own frames
    error = RunFolder(tmp_path / "runs" / "run0").status().error
    assert (error["rank"], error["type"], error["message"]) == (1, "RuntimeError", "unlucky seed")
    assert "unlucky seed" in RunFolder(tmp_path / "runs" / "run0").log(1).read_text()


@pytest.mark.slow
@pytest.mark.parametrize("preload", [True, False])
def test_ctrl_c_cancels_and_leaves_no_process(tmp_path, preload):
    runs_dir = tmp_path / "runs"
    p = command(runs_dir, "sleep_for_ever", config(preload=preload), config(seed=2, preload=preload))
    ranks = up(runs_dir)
    assert set(ranks) < set(mentioning(str(tmp_path)))
    os.killpg(p.pid, signal.SIGINT)  # what a terminal does: everybody in the foreground gets it
    out = finish(p, 30)
    assert p.returncode == 130, out
    assert states(runs_dir) == {"run0": "cancelled", "run1": "cancelled"}
    assert RunFolder(runs_dir / "run0").status().exit_codes == {"0": -15, "1": -15}
    assert not mentioning(str(tmp_path))


@pytest.mark.slow
def test_sigterm_does_the_same_and_stubborn_ranks_are_killed_on_the_second(tmp_path):
    runs_dir = tmp_path / "runs"
    p = command(runs_dir, "ignore_sigterm", config())
    up(runs_dir)
    p.send_signal(signal.SIGTERM)
    until(lambda: "SIGTERM to ranks" in RunFolder(runs_dir / "run0").launcher_log.read_text())
    p.send_signal(signal.SIGTERM)
    out = finish(p, 30)
    assert p.returncode == 130, out
    assert RunFolder(runs_dir / "run0").status().exit_codes == {"0": -9, "1": -9}
    assert states(runs_dir) == {"run0": "cancelled"}
    assert not mentioning(str(tmp_path))


@pytest.mark.slow
def test_ctrl_c_before_the_agent_listens(tmp_path):
    runs_dir = tmp_path / "runs"
    p = command(runs_dir, "sleep_for_ever", config())
    until(lambda: list(runs_dir.glob(".submitit/*/*_submitted.pkl")) if runs_dir.exists() else False)
    os.killpg(p.pid, signal.SIGINT)
    out = finish(p, 60)
    assert p.returncode == 130, out
    assert states(runs_dir) == {"run0": "cancelled"}
    assert not mentioning(str(tmp_path))


@pytest.mark.slow
def test_ctrl_c_while_the_fork_server_loads(tmp_path):
    runs_dir = tmp_path / "runs"
    p = command(runs_dir, "sleep_for_ever", config(), preload="slow_preload")
    until(lambda: (runs_dir / "run0" / "logs" / "launcher.log").exists())
    os.killpg(p.pid, signal.SIGINT)
    out = finish(p, 30)
    assert p.returncode == 130, out
    assert states(runs_dir) == {"run0": "cancelled"}
    assert not mentioning(str(tmp_path))


@pytest.mark.slow
def test_a_killed_agent_takes_its_ranks_and_the_runs_are_failed(tmp_path):
    runs_dir = tmp_path / "runs"
    p = command(runs_dir, "sleep_for_ever", config(), config(seed=2))
    up(runs_dir)
    os.kill(agent_pid(runs_dir), signal.SIGKILL)
    out = finish(p, 30)
    assert p.returncode == 1, out
    assert states(runs_dir) == {"run0": "failed", "run1": "failed"}
    assert "the agent was killed" in RunFolder(runs_dir / "run0").status().error["message"]
    assert "not started" in RunFolder(runs_dir / "run1").status().error["message"]
    until(lambda: not mentioning(str(tmp_path)), 10)


@pytest.mark.slow
def test_the_runs_outlive_a_killed_command(tmp_path):
    runs_dir = tmp_path / "runs"
    p = command(runs_dir, "wait_for_go", config())
    up(runs_dir)
    os.killpg(p.pid, signal.SIGHUP)  # the terminal is closed
    p.wait(10)
    (runs_dir / "run0" / "go").touch()
    until(lambda: states(runs_dir) == {"run0": "completed"})
    until(lambda: not mentioning(str(tmp_path)), 20)


@pytest.mark.slow
def test_a_folder_that_disappears_fails_its_run_only(tmp_path):
    import shutil

    runs_dir = tmp_path / "runs"
    p = command(runs_dir, "sleep_if_first", config(seed=13), config(seed=2))
    up(runs_dir)
    shutil.rmtree(runs_dir / "run0")
    out = finish(p, 60)
    assert p.returncode == 1, out
    assert states(runs_dir) == {"run1": "completed"}
    assert "1 unknown, 1 completed" in out
    assert not mentioning(str(tmp_path))


@pytest.mark.slow
def test_two_at_once(tmp_path):
    runs_dir = tmp_path / "runs"
    both = [command(runs_dir, "serve_on_master_port", config()) for _ in range(2)]
    outs = [finish(p) for p in both]
    assert [p.returncode for p in both] == [0, 0], outs
    assert states(runs_dir) == {"run0": "completed", "run0-r2": "completed"}


@pytest.mark.slow
def test_closed_standard_streams(tmp_path):
    runs_dir = tmp_path / "runs"
    (p := command(runs_dir, "write_steps", config())).wait(100)
    again = subprocess.run(
        ["sh", "-c", f'exec "{p.args[0]}" "$@" <&- >&- 2>&-', "sh", *p.args[1:]],
        env=environ(),
        cwd=tmp_path,
        timeout=100,
        check=False,
    )
    assert again.returncode == 0
    assert set(states(runs_dir).values()) == {State.completed}


# ------------------------------------------------------------------------------------------------------ in this process


@pytest.fixture
def launch(tmp_path):
    cfg = config()
    cfg.launch.runs_dir = str(tmp_path / "runs")
    return cfg.launch


def test_a_secret_is_refused_before_anything_exists(tmp_path, launch):
    cfg = config(env={"HF_TOKEN": "hf_" + "a1B2" * 10})
    with pytest.raises(ConfigError, match=r"cluster\.env\.HF_TOKEN") as caught:
        submit.submit([point(cfg)], launch, sweep=None, command=["test"])
    assert "a1B2" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_more_ranks_than_accelerators(tmp_path, launch, monkeypatch):
    monkeypatch.setattr(environment, "accelerators", lambda *a: ["0"])
    with pytest.raises(ConfigError, match="ranks need 4 accelerators, this machine shows 1"):
        submit.submit([point(config(4))], launch, sweep=None, command=["test"])
    assert not list(tmp_path.iterdir())


def test_the_layout_of_a_cluster_is_refused_on_a_machine_without_accelerators(tmp_path, launch, monkeypatch):
    monkeypatch.setattr(environment, "accelerators", lambda *a: [])
    large, elsewhere = config(), config()
    large.parallelism.nodes = 10_000
    elsewhere.cluster.device_memory_gib = 95
    for cfg, words in (
        (large, r"parallelism\.nodes=10000: 10000 x \d ranks on this machine's \d+ cores"),
        (elsewhere, r"cluster\.device_memory_gib=95: .*this machine shows none"),
    ):
        with pytest.raises(ConfigError, match=words):
            submit.submit([point(cfg)], launch, sweep=None, command=["test"])
    assert not list(tmp_path.iterdir())


def test_data_that_are_not_there(tmp_path, launch):
    cfg = config()
    cfg.data.path = str(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"data\.path"):
        submit.submit([point(cfg)], launch, sweep=None, command=["test"])
    assert not list(tmp_path.iterdir())


def completed(launch, *configs, fingerprint):
    new = [
        NewRun(c, f"done{i}", point(c).identity, data_fingerprint=fingerprint) for i, c in enumerate(configs)
    ]
    for run in create_runs(launch.runs_dir, new, sweep="s", command=["x"], code=CODE):
        run.set_state(State.completed)


def test_completed_points_are_skipped_as_often_as_they_were_run(launch, capsys):
    cfg = config()
    completed(launch, cfg, cfg, fingerprint="d")
    points = [point(cfg, repeat=r) for r in range(3)] + [point(config(seed=2), "other")]
    todo, done = submit._without_done(points, launch, CODE, ["d"] * 4)
    assert [p.name for p, _ in todo] == ["run", "other"]
    assert sorted(run.name for run in done) == ["done0", "done1"]
    assert capsys.readouterr().out.count("skipped run: done") == 2


@pytest.mark.parametrize("how", ["launch.force", "point.force", "data", "code"])
def test_what_is_not_skipped(launch, how):
    cfg = config()
    completed(launch, cfg, fingerprint="d")
    launch.force = how == "launch.force"
    points = [point(cfg, force=how == "point.force")]
    code = CODE if how != "code" else type(CODE)(commit=None, fingerprint="other")
    todo, done = submit._without_done(points, launch, code, ["e" if how == "data" else "d"])
    assert len(todo) == 1
    assert done == []


def test_a_job_that_can_not_start_leaves_nothing(tmp_path, launch, monkeypatch):
    def no_space(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(dispatch, "LocalJob", no_space)
    with pytest.raises(RunFolderError, match="No space left"):
        submit.submit([point(config())], launch, sweep="s", command=["test"])
    assert not list((tmp_path / "runs").glob("run*"))


def test_no_torch_on_the_login_node():
    code = "import sys, europa_exp.launch.submit, europa_exp.launch.agent, europa_exp.launch.follow, europa_exp.launch.job\n"
    code += "import europa_exp.launch.worker, europa_exp.launch.forkserver\n"
    code += "sys.exit(any(m in sys.modules for m in ('torch', 'rich', 'wandb', 'submitit')))"
    assert subprocess.run([os.sys.executable, "-c", code], check=False).returncode == 0


def test_runs_of_a_job_that_starts_twice_are_not_run_again(tmp_path):
    """A cancelled or completed run is left alone by an agent that finds it so."""
    runs = make_runs(tmp_path / "runs", config())
    runs[0].set_state(State.cancelled)
    code = (
        "import sys\nfrom pathlib import Path\nfrom europa_exp.launch.agent import Agent\n"
        "from europa_exp.runs.folder import RunFolder\n"
        "print(Agent([RunFolder(sys.argv[1])], Path(sys.argv[2]), entry='x:y', preload='').work())"
    )
    done = subprocess.run(
        [os.sys.executable, "-c", code, str(runs[0].path), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == "{'run0': 'cancelled'}"


@pytest.mark.slow
def test_ctrl_c_reaches_the_job_when_no_file_can_be_written(tmp_path):
    """As on a full disk: neither the agent's file nor the one that asks it to stop exists."""
    runs_dir = tmp_path / "runs"
    (tmp_path / "sitecustomize.py").write_text(
        "from europa_exp.launch import agents\nagents.AGENT_FILE = agents.STOP_FILE = 'no/such/place'\n"
    )
    path = os.pathsep.join([str(tmp_path), environ()["PYTHONPATH"]])
    p = command(runs_dir, "sleep_for_ever", config(), PYTHONPATH=path)
    up(runs_dir)
    os.killpg(p.pid, signal.SIGINT)
    out = finish(p, 30)
    assert p.returncode == 130, out
    assert states(runs_dir) == {"run0": "cancelled"}
    until(lambda: not mentioning(str(tmp_path)), 10)
