"""The real client, offline; what it wrote is read back from its own log."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from making import CODE, config, make_run

from europa_exp.config import io
from europa_exp.runs import tracking
from europa_exp.runs.folder import RunFolder
from europa_exp.runs.tracking import CONFIG_KEY, FROZEN_FILE, STEP_KEY, open_tracker, wandb_id
from europa_exp.runs.wandb_log import records


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The tests' own W&B settings: no login of the person who runs them, and their variables are put back."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "wandb-config"))
    before = dict(os.environ)
    yield
    for name in set(os.environ) - set(before):
        del os.environ[name]


def nested(items: Any) -> dict[str, Any]:
    """Items of W&B's protocol (config, summary, history) as a nested dict."""
    found: dict[str, Any] = {}
    for item in items:
        place = found
        keys = list(item.nested_key) or [item.key]
        for key in keys[:-1]:
            place = place.setdefault(key, {})
        place[keys[-1]] = json.loads(item.value_json)
    return found


def written(run: RunFolder) -> dict[str, list[Any]]:
    """What the client wrote for a run: the records of its log, by type."""
    (log,) = run.path.glob("wandb/offline-run-*/*.wandb")
    found: dict[str, list[Any]] = {}
    for record in records(log):
        kind = record.WhichOneof("record_type")
        found.setdefault(kind, []).append(getattr(record, kind))
    return found


def wait_until_started(run: RunFolder) -> None:
    deadline = time.monotonic() + 120
    while "folder" not in run.status().extra.get("tracking", {}):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_disabled_writes_nothing_and_starts_nothing(tmp_path: Path) -> None:
    cfg = config("tracking=disabled")
    run = make_run(tmp_path, cfg)
    tracker = open_tracker(run, cfg)
    tracker.log({"loss": 1.0}, 1)
    tracker.finish(0)
    assert not run.wandb_dir.exists()
    assert run.status().extra["tracking"]["mode"] == "disabled"


def test_offline_holds_config_files_axis_and_history(tmp_path: Path) -> None:
    cfg = config("tags=[first,second]", "tracking.notes=a note", "+nccl.extra.NCCL_ALGO=Ring")
    secret = "hf_" + "aB3dE" * 7
    run = make_run(tmp_path, cfg, sweep="six points", parent="debug-old", overrides=[f"x={secret}"])
    random.seed(7)
    state = random.getstate()
    tracker = open_tracker(run, cfg)
    for step in range(10, 2010, 10):  # enough that the log has several blocks
        tracker.log({"loss/global_avg": math.nan if step == 30 else 1.0 / step, "grad_norm": 1.0}, step)
    tracker.log(
        {"loss/global_avg": 0.5, "grad_norm": math.inf, "word": "no number"}, 20
    )  # as after a restart
    tracker.finish(0)
    assert random.getstate() == state, "the client must not use the training's random numbers"

    assert tracker.record["mode"] == "offline"
    assert tracker.record["notes"] == []
    assert run.status().extra["tracking"] == tracker.record
    found = written(run)
    record = found["run"][0]
    assert record.display_name == run.name
    assert record.run_id == tracker.record["id"] == f"{run.name}-{run.provenance()['uid']}"
    assert record.run_group == "six points"
    assert record.job_type == "train"
    assert list(record.tags) == ["first", "second"]
    assert record.notes == "a note"
    assert record.project == "europa_exp"
    assert record.git.commit == CODE.commit
    recorded = nested(record.config.update)
    about = recorded.pop(CONFIG_KEY)
    recorded.pop("_wandb", None)
    assert recorded == io.to_dict(cfg)
    assert (about["identity"], about["parent"], about["commit"]) == ("0123456789ab", "debug-old", CODE.commit)

    (star,) = [metric for metric in found["metric"] if metric.glob_name == "*"]
    assert star.step_metric == STEP_KEY
    rows = [nested(row.item) for row in found["history"]]
    assert [row[STEP_KEY] for row in rows] == [*range(10, 2010, 10), 20]
    assert math.isnan(rows[2]["loss/global_avg"])
    assert rows[-1]["grad_norm"] == math.inf
    assert "word" not in rows[-1]
    assert found["exit"][0].exit_code == 0
    last: dict[str, Any] = {}
    for change in found["summary"]:
        last |= nested(change.update)
    assert last["loss/global_avg"] == 0.5

    saved = {file.path for change in found["files"] for file in change.files}
    assert saved == {FROZEN_FILE, "overrides.yaml", "provenance.json", "code.diff"}
    files = run.path / tracker.record["folder"] / "files"
    assert io.from_yaml((files / FROZEN_FILE).read_text()) == cfg
    assert (files / "code.diff").read_text() == CODE.diff
    for path in run.path.rglob("*"):
        if path.is_file():
            assert secret.encode() not in path.read_bytes()


def test_group_of_the_configuration_wins_over_the_sweep(tmp_path: Path) -> None:
    cfg = config("tracking.group=mine")
    run = make_run(tmp_path, cfg, sweep="six")
    tracker = open_tracker(run, cfg)
    tracker.finish(3)
    found = written(run)
    assert found["run"][0].run_group == "mine"
    assert found["exit"][0].exit_code == 3


def test_variables_of_the_shell_do_not_change_what_was_configured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "WANDB_MODE": "disabled",
        "WANDB_PROJECT": "other",
        "WANDB_RUN_ID": "other",
        "WANDB_NAME": "other",
        "WANDB_TAGS": "other",
        "WANDB_RUN_GROUP": "other",
        "WANDB_JOB_TYPE": "other",
        "WANDB_NOTES": "other",
        "WANDB_RESUME": "must",
        "WANDB_SERVICE": "9-1-unix-/nowhere",
    }.items():
        monkeypatch.setenv(name, value)
    run = make_run(tmp_path, sweep="six")
    tracker = open_tracker(run, config())
    tracker.finish(0)
    record = written(run)["run"][0]
    assert (record.project, record.display_name, record.run_group, record.job_type) == (
        "europa_exp",
        run.name,
        "six",
        "train",
    )
    assert (list(record.tags), record.notes) == ([], "")


def test_nothing_is_written_outside_the_run_folder(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    script = f"""
import sys; sys.path[:0] = {sys.path!r}
from pathlib import Path
from making import make_run, config
from europa_exp.runs.tracking import open_tracker
cfg = config()
run = make_run(Path({str(tmp_path / "runs")!r}), cfg)
tracker = open_tracker(run, cfg)
tracker.log({{"loss": 1.0}}, 1)
tracker.finish(0)
"""
    place = tmp_path / "here"
    place.mkdir()
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "TMPDIR": str(place)}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=place, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert [p for p in (*home.rglob("*"), *place.rglob("*")) if p.is_file()] == []


def test_online_without_a_login_becomes_offline_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cfg = config("tracking=online")
    run = make_run(tmp_path, cfg)
    tracker = open_tracker(run, cfg)
    tracker.log({"loss": 1.0}, 1)
    tracker.finish(0)
    assert run.status().extra["tracking"]["wanted"] == "online"
    assert run.status().extra["tracking"]["mode"] == "offline"
    assert "nobody is logged in" in run.status().extra["tracking"]["notes"][0]
    assert "tracked offline" in caplog.text
    assert len(written(run)["history"]) == 1


@pytest.mark.slow
def test_online_with_a_server_that_refuses_becomes_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789" * 4)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(tracking, "INIT_TIMEOUT_S", 3.0)
    cfg = config("tracking=online")
    run = make_run(tmp_path, cfg)
    tracker = open_tracker(run, cfg)
    tracker.log({"loss": 1.0}, 1)
    tracker.finish(0)
    record = run.status().extra["tracking"]
    assert record["mode"] == "offline"
    assert "can't be reached" in record["notes"][0]
    assert "0123456789" * 4 not in json.dumps(record)
    assert len(written(run)["history"]) == 1
    assert not list(run.wandb_dir.glob("run-*")), "a second fragment of the same id would spoil a sync"


def test_an_exception_of_the_client_stays_with_the_tracker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("inside the client")

    monkeypatch.setattr(wandb, "init", broken)
    run = make_run(tmp_path)
    tracker = open_tracker(run, config())
    tracker.log({"loss": 1.0}, 1)
    tracker.finish(0)
    tracker.finish(0)
    tracker.log({"loss": 1.0}, 2)
    assert run.status().extra["tracking"]["notes"] == ["W&B stopped: ZeroDivisionError: inside the client"]


def service_of(pid: int) -> list[int]:
    """The client's processes whose parent is this process."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = path.joinpath("stat").read_text().rpartition(")")[2].split()[1]
            if int(parent) == pid and b"wandb-core" in path.joinpath("cmdline").read_bytes():
                found.append(int(path.name))
        except (OSError, IndexError):
            continue
    return found


needs_proc = pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="processes are looked up in /proc"
)


@needs_proc
def test_a_killed_client_is_noted_and_training_goes_on(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    tracker = open_tracker(run, config())
    tracker.log({"loss": 1.0}, 1)
    wait_until_started(run)
    (pid,) = service_of(os.getpid())
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    step = 1
    while not run.status().extra["tracking"]["notes"] and time.monotonic() < deadline:
        step += 1
        tracker.log({"loss": 1.0}, step)
        time.sleep(0.05)
    tracker.finish(0)
    assert run.status().extra["tracking"]["notes"][0].startswith("W&B stopped")


@needs_proc
def test_a_client_that_hangs_is_ended_in_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "WAIT_S", {"offline": 1.0})
    run = make_run(tmp_path)
    tracker = open_tracker(run, config())
    wait_until_started(run)
    (pid,) = service_of(os.getpid())
    os.kill(pid, signal.SIGSTOP)
    tracker.finish(0)
    assert "did not finish within 1 s" in run.status().extra["tracking"]["notes"][0]
    deadline = time.monotonic() + 30
    while pid in service_of(os.getpid()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert pid not in service_of(os.getpid())


@needs_proc
@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "os._exit(0)"])
def test_a_killed_rank_leaves_no_client_behind(tmp_path: Path, end: str) -> None:
    script = f"""
import os, sys, time; sys.path[:0] = {sys.path!r}
from pathlib import Path
from making import make_run, config
from test_tracking import open_tracker, service_of, wait_until_started
cfg = config()
run = make_run(Path({str(tmp_path)!r}), cfg)
tracker = open_tracker(run, cfg)
tracker.log({{"loss": 1.0}}, 1)
wait_until_started(run)
print(*service_of(os.getpid()), flush=True)
{end}
"""
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, timeout=120)
    (pid,) = map(int, done.stdout.split())
    deadline = time.monotonic() + 60
    while alive(pid):
        assert time.monotonic() < deadline, "the client outlived its rank"
        time.sleep(0.1)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_ids_are_safe_short_and_different() -> None:
    assert wandb_id("a=b,c/d é", "12345678") == "a-b-c-d-12345678"
    assert len(wandb_id("x" * 100, "12345678")) == 64
    assert wandb_id("x" * 100, "12345678").endswith("-12345678")
    assert wandb_id("///", "") == "run"
