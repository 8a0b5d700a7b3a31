"""The agent and what it supervises: causes, signals, environments, servers that are kept or replaced."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from launching import config, environ, make_runs, mentioning, until

from europa_exp.launch import environment, failure
from europa_exp.launch.agent import _reserved_port
from europa_exp.launch.failure import Failure, examine, first_cause, shorten
from europa_exp.launch.ranks import ForkedRanks, StartError
from europa_exp.runs.folder import RunFolder
from europa_exp.runs.status import State

pytestmark = pytest.mark.timeout(150)

AGENT = """
import sys
from pathlib import Path
from europa_exp.launch.agent import Agent
from europa_exp.runs.folder import RunFolder
folder, entry, preload, *runs = sys.argv[1:]
Agent([RunFolder(r) for r in runs], Path(folder), entry="rank_targets:" + entry, preload=preload).work()
"""


def start(tmp_path: Path, entry: str, *configs, preload: str = "", **env: str):
    runs = make_runs(tmp_path / "runs", *configs)
    arguments = [str(tmp_path), entry, preload, *(str(r.path) for r in runs)]
    process = subprocess.Popen(
        [sys.executable, "-c", AGENT, *arguments],
        env=environ(EUROPA_TEST=str(tmp_path), **env),
        stdin=subprocess.DEVNULL,
        cwd=tmp_path,
    )
    return process, runs


def work(tmp_path: Path, entry: str, *configs, preload: str = "", **env: str) -> list[RunFolder]:
    process, runs = start(tmp_path, entry, *configs, preload=preload, **env)
    assert process.wait(120) == 0
    return runs


def pids(run: RunFolder) -> list[int]:
    until(lambda: run.launcher_log.exists() and " ranks: " in run.launcher_log.read_text())
    text = run.launcher_log.read_text().partition(" ranks: ")[2].partition("\n")[0]
    return [int(part.rpartition(" ")[2]) for part in text.split(", ")]


# ------------------------------------------------------------------------------------------------- failures of ranks


@pytest.mark.slow
@pytest.mark.parametrize("preload", [True, False])
def test_a_rank_that_is_killed_ends_the_run_and_names_itself(tmp_path, preload):
    process, [run] = start(tmp_path, "gloo_for_ever", config(4, preload=preload))
    until(lambda: all((run.path / f"up_{r}").exists() for r in range(4)), 100)
    os.kill(pids(run)[3], signal.SIGKILL)
    process.wait(30)
    status = run.status()
    assert status.state is State.failed
    assert status.error["rank"] == 3
    assert "rank 3 was killed by signal 9" in status.error["message"]
    assert status.exit_codes["3"] == -9
    assert set(status.exit_codes) == {"0", "1", "2", "3"}
    assert not mentioning(str(tmp_path))


@pytest.mark.slow
def test_the_rank_that_raised_is_the_cause_not_its_peers(tmp_path):
    [run] = work(tmp_path, "gloo_fails_on_1", config(3))
    error = run.status().error
    assert (error["rank"], error["type"]) == (1, "ValueError")
    assert "the third step is bad" in error["traceback"]
    assert run.status().exit_codes["1"] == 1
    assert "the third step is bad" in run.log(1).read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("entry", "code", "text"),
    [
        ("exit_7_on_1", 7, "7"),
        ("vanish_on_1", 3, "rank 1 ended with exit code 3 and left no record"),
        ("crash_on_1", -11, "rank 1 was killed by signal 11 (SIGSEGV)"),
    ],
)
def test_other_ends(tmp_path, entry, code, text):
    [run] = work(tmp_path, entry, config())
    status = run.status()
    assert status.state is State.failed
    assert status.error["rank"] == 1
    assert text in status.error["message"]
    assert status.exit_codes == {"0": -15, "1": code}
    if entry == "crash_on_1":
        assert "Segmentation fault" in status.error["traceback"]


@pytest.mark.slow
def test_a_thread_that_never_ends_keeps_no_rank(tmp_path):
    [run] = work(tmp_path, "hang_at_exit", config())
    assert run.status().state is State.completed


@pytest.mark.slow
def test_what_ranks_leave_behind_is_ended(tmp_path):
    [run] = work(tmp_path, "leave_a_daemon", config())
    assert run.status().state is State.completed
    assert (run.path / "daemon").exists()
    assert not mentioning(str(tmp_path))


@pytest.mark.slow
def test_a_preload_that_fails_says_why(tmp_path):
    runs = work(tmp_path, "write_steps", config(), config(seed=2), preload="no_such_module")
    for run in runs:
        assert run.status().state is State.failed
        assert "No module named 'no_such_module'" in run.status().error["message"]


@pytest.mark.slow
def test_a_server_that_is_killed_fails_its_run_and_the_next_gets_a_new_one(tmp_path):
    process, [first, second] = start(tmp_path, "sleep_if_first", config(seed=13), config(seed=2))
    rank = pids(first)[0]
    server = int(Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(server, signal.SIGKILL)
    process.wait(60)
    assert first.status().state is State.failed
    assert "fork server was killed by signal 9" in first.status().error["message"]
    assert second.status().state is State.completed
    assert not mentioning(str(tmp_path))


@pytest.mark.slow
def test_a_broken_configuration_fails_its_run_only(tmp_path):
    runs = make_runs(tmp_path / "runs", config(), config(seed=2))
    (runs[0].path / "config.yaml").write_text("model: [")
    arguments = [str(tmp_path), "write_steps", "", *(str(r.path) for r in runs)]
    subprocess.run(
        [sys.executable, "-c", AGENT, *arguments], env=environ(), timeout=100, check=True, cwd=tmp_path
    )
    assert [r.status().state for r in runs] == [State.failed, State.completed]


# ------------------------------------------------------------------------------------------------- environments


@pytest.mark.slow
@pytest.mark.parametrize("preload", [True, False])
def test_the_environment_of_a_rank(tmp_path, preload):
    cfg = config(
        2, preload=preload, env={"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, threads_per_rank=3
    )
    cfg.parallelism.nodes, cfg.parallelism.gpus_per_node = 2, 2
    cfg.nccl.max_ctas = 16
    stale = {
        "RANK": "77",
        "WORLD_SIZE": "99",
        "SLURM_PROCID": "5",
        "NCCL_MAX_CTAS": "3",
        "OMP_NUM_THREADS": "64",
    }
    [run] = work(tmp_path, "record_environment", cfg, CUDA_VISIBLE_DEVICES="", **stale)
    assert run.status().state is State.completed, run.status().error
    for rank in range(4):
        got = json.loads((run.path / f"environment_{rank}.json").read_text())
        assert got["RANK"] == str(rank)
        assert got["LOCAL_RANK"] == str(rank % 2)
        assert got["GROUP_RANK"] == str(rank // 2)
        assert (got["WORLD_SIZE"], got["LOCAL_WORLD_SIZE"], got["MASTER_ADDR"]) == ("4", "2", "127.0.0.1")
        assert got["OMP_NUM_THREADS"] == "3"
        assert got["NCCL_MAX_CTAS"] == "16"
        assert got["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
        assert "SLURM_PROCID" not in got
        assert (run.path / f"stdin_{rank}").read_text() == ""
        assert "raw output" in run.log(rank).read_text()  # below Python's own streams
    runtime = run.runtime()
    assert runtime["environment"]["NCCL_MAX_CTAS"] == "16"
    assert runtime["environment"]["RANK"] == "0"
    assert any("NCCL_MAX_CTAS of the calling shell" in note for note in runtime["notes"])


@pytest.mark.slow
def test_a_server_serves_runs_that_agree_and_is_replaced_for_others(tmp_path):
    configs = [config(1), config(1, seed=2), config(1, env={"MIMALLOC_X": "1"})]
    process, runs = start(tmp_path, "record_parent", *configs)
    process.wait(100)
    first, second, third = [(r.path / "parent").read_text() for r in runs]
    assert first == second != third


def test_the_environment_a_torch_import_sees_is_in_place_in_the_server(tmp_path, monkeypatch):
    """The preloaded module itself finds it; setting it after the import would be too late."""
    (tmp_path / "sees.py").write_text(
        "import os, pathlib; pathlib.Path(__file__).with_name('seen').write_text(os.environ['OMP_NUM_THREADS'])"
    )
    environ = os.environ | environment.at_import(config(threads_per_rank=5)) | {"PYTHONPATH": str(tmp_path)}
    ranks = ForkedRanks(environ, tmp_path / "log", "sees")
    until(lambda: ranks.poll() == [] and ranks.load_seconds is not None)
    ranks.close()
    assert (tmp_path / "seen").read_text() == "5"


def test_a_server_that_can_not_load_its_module_says_why(tmp_path):
    ranks = ForkedRanks(os.environ, tmp_path / "log", "no_such_module")
    with pytest.raises(StartError, match="no_such_module"):
        until(lambda: ranks.poll() and False)
    ranks.close()


def test_inherited_leaves_out_what_describes_other_ranks():
    kept, left_out = environment.inherited(
        {
            "HOME": "/h",
            "RANK": "1",
            "SLURM_JOB_ID": "2",
            "NCCL_DEBUG": "INFO",
            "WANDB_API_KEY": "k",
            "RANKING": "x",
        }
    )
    assert kept == {"HOME": "/h", "WANDB_API_KEY": "k", "RANKING": "x"}
    assert left_out == ["NCCL_DEBUG"]


def test_each_logical_node_gets_its_own_accelerators():
    cfg = config()
    cfg.parallelism.nodes, cfg.parallelism.gpus_per_node = 2, 2
    places = [
        environment.place(cfg, r, master_addr="h", master_port=1, devices=["0", "1", "5", "7"])
        for r in range(4)
    ]
    assert [(p.local_rank, p.devices) for p in places] == [
        (0, ("0", "1")),
        (1, ("0", "1")),
        (0, ("5", "7")),
        (1, ("5", "7")),
    ]
    assert environment.of_rank(cfg, places[2])["CUDA_VISIBLE_DEVICES"] == "5,7"


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, ["0", "1"]), ("", []), ("-1", []), ("1", ["1"]), ("GPU-ab, 0", ["GPU-ab", "0"])],
)
def test_accelerators(monkeypatch, visible, expected):
    names = [Path("/dev/nvidia1"), Path("/dev/nvidiactl"), Path("/dev/nvidia0"), Path("/dev/nvidia-uvm")]
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter(names))
    found = environment.accelerators({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    assert found == expected


def test_a_reserved_port_is_given_to_nobody_else_but_can_be_listened_on():
    with _reserved_port() as port, socket.socket() as store, socket.socket() as stranger:
        with pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", port))
        store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        store.bind(("", port))
        store.listen()
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            pass


# ------------------------------------------------------------------------------------------------- causes

LOST = "[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:31998"


def failed(rank, kind="ValueError", message="bad", at=0.0):
    return Failure(rank, kind, message, "", at)


def test_the_first_cause_is_the_earliest_that_is_no_echo():
    echo = failed(0, "RuntimeError", LOST, at=1.0)
    cause, later = failed(2, at=2.0), failed(1, at=3.0)
    assert first_cause([echo, later, cause]) is cause
    assert first_cause([echo]) is echo
    assert first_cause([]) is None


@pytest.mark.parametrize(
    ("kind", "message", "echo"),
    [
        ("RuntimeError", LOST, True),
        ("RuntimeError", "[x/pair.cc] Read error [127.0.0.1]:80: Connection reset by peer", True),
        ("RuntimeError", "[x/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation", True),
        ("DistNetworkError", "The client socket has timed out after 60000ms", True),
        ("DistBackendError", "NCCL error: remote process exited or there was a network error", True),
        ("RuntimeError", "The size of tensor a (3) must match the size of tensor b (4)", False),
        ("ConnectionResetError", "Connection reset by peer", False),
        ("ValueError", "timeout must be positive", False),
    ],
)
def test_echoes(kind, message, echo):
    assert failed(0, kind, message).is_echo is echo


def test_examine_reads_the_record_of_a_rank(tmp_path):
    [run] = make_runs(tmp_path, config())
    assert examine(run, 1, 0) is None
    record = {
        "rank": 1,
        "type": "KeyError",
        "message": "'x'",
        "traceback": "T",
        "time": "2026-01-01T00:00:00+00:00",
    }
    run.error_file(1).write_text(json.dumps(record))
    found = examine(run, 1, 1)
    assert (found.type, found.message, found.traceback, found.at) == ("KeyError", "'x'", "T", 1767225600.0)
    run.error_file(1).write_text("{cut")
    assert "left no record" in examine(run, 1, 1).message


def test_shorten_keeps_the_end():
    text = "\n".join(f"line {i}" for i in range(100))
    short = shorten(text).splitlines()
    assert len(short) == failure.SHORT_LINES + 1
    assert short[-1] == "line 99"
    assert "84 lines more" in short[0]
    assert shorten("one") == "one"
