"""Sending runs with the real client to a server on this machine that keeps what arrives.

What the real server does with it can't be had here; see ``wandb_server``.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from making import config, make_run
from wandb_server import Stored, WandbServer

from europa_exp.config import io
from europa_exp.runs import sync, wandb_process
from europa_exp.runs.folder import RunFolder
from europa_exp.runs.metrics import MetricsWriter
from europa_exp.runs.sync import SENT_FILE, Outcome, offline_folders, summary
from europa_exp.runs.tracking import CONFIG_KEY, STEP_KEY, open_tracker
from europa_exp.runs.wandb_log import read_log
from europa_exp.runs.wandb_process import WandbUnavailable

KEY = "0123456789" * 4


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No login and no settings of the person who runs the tests."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "wandb-config"))
    monkeypatch.setattr(sync, "CONFIRM_PAUSES_S", (0.0,))
    before = dict(os.environ)
    yield
    for name in set(os.environ) - set(before):
        del os.environ[name]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[WandbServer]:
    found = WandbServer()
    monkeypatch.setenv("WANDB_BASE_URL", found.url)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    yield found
    found.close()


def attempt(run: RunFolder, steps: range, state: str | None = "completed", wide: int = 1) -> None:
    """Train for some steps, as far as metrics and W&B are concerned. Without a state it goes on."""
    kept = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("WANDB_")}
    run.set_state("running")
    cfg = run.config()
    tracker = open_tracker(run, cfg)
    with MetricsWriter(run.metrics_file) as writer:
        for step in steps:
            row = {"loss": 1.0 / step} | {f"wide/{i}": float(i) for i in range(wide)}
            writer.write(row, step)
            tracker.log(row, step)
    tracker.finish(0)
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        del os.environ[name]
    os.environ.update(kept)
    run.set_state(state or "running", **({} if state else {"pid": os.getpid()}))


KILLED = """
import os, sys, time; sys.path[:0] = {path!r}
from pathlib import Path
from typing import Any
from europa_exp.runs.folder import RunFolder
from europa_exp.runs.metrics import MetricsWriter
from europa_exp.runs.tracking import open_tracker
run = RunFolder({run!r})
tracker = open_tracker(run, run.config())
while "folder" not in run.status().extra.get("tracking", {{}}): time.sleep(0.02)
writer = MetricsWriter(run.metrics_file)
for step in range({first}, {last}):
    row = {{"loss": 1.0 / step}} | {{f"wide/{{i}}": float(i) for i in range({wide})}}
    writer.write(row, step)
    tracker.log(row, step)
time.sleep(1.0)
os.kill(os.getpid(), 9)
"""


def killed_attempt(run: RunFolder, steps: range, wide: int = 1) -> None:
    """The same in a process that is killed as a node that fails would kill it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    given = {"path": sys.path, "run": str(run.path), "first": steps.start, "last": steps.stop, "wide": wide}
    run.set_state("running")
    done = subprocess.run([sys.executable, "-c", KILLED.format(**given)], env=kept, timeout=300)
    assert done.returncode == -9


def send(*runs: RunFolder) -> list[Outcome]:
    told: list[Outcome] = []
    outcomes = sync.sync(runs, told.append)
    assert told == outcomes
    return outcomes


def stored(server: WandbServer, run: RunFolder) -> Stored:
    (found,) = [stored for name, stored in server.runs.items() if name.startswith(run.name)]
    return found


def steps(found: Stored) -> list[int]:
    """The axis as it arrived, after a check that each line came once, in order, with one step of W&B's own."""
    assert [number for number, _ in found.history] == list(range(len(found.history)))
    assert [row["_step"] for row in found.rows] == list(range(len(found.history)))
    return [row[STEP_KEY] for row in found.rows]


def filled(config: dict[str, Any]) -> dict[str, Any]:
    """Without empty mappings, which W&B's config does not keep."""
    found = {key: filled(value) if isinstance(value, dict) else value for key, value in config.items()}
    return {key: value for key, value in found.items() if value != {}}


def europa(*arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "europa_exp.cli", "sync", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


# --------------------------------------------------------------------------------------------------- what arrives


def test_a_run_arrives_whole_and_only_once(server: WandbServer, tmp_path: Path) -> None:
    run = make_run(tmp_path, config("tags=[a]", "tracking.notes=a note"), sweep="six")
    attempt(run, range(1, 40))
    (outcome,) = send(run)
    assert (outcome.what, outcome.rows, outcome.notes) == ("sent", 39, [])
    found = stored(server, run)
    assert steps(found) == list(range(1, 40))
    assert found.rows[9]["loss"] == 0.1
    sent = {key: entry["value"] for key, entry in found.config.items() if key != "_wandb"}
    assert sent.pop(CONFIG_KEY)["identity"] == "0123456789ab"
    assert sent == filled(io.to_dict(run.config()))
    axes = json.dumps(found.config["_wandb"]["value"]["m"])
    assert STEP_KEY in axes
    assert found.files["frozen_config.yaml"].decode() == run.config_text()
    assert json.loads(found.files["provenance.json"]) == run.provenance()
    given = {key: found.attributes[key] for key in ("displayName", "groupName", "tags", "notes")}
    assert given == {"displayName": run.name, "groupName": "six", "tags": ["a"], "notes": "a note"}
    assert found.ends == [(0, False)]
    server.operations.clear()
    (again,) = send(run)
    assert (again.what, server.operations) == ("current", [])


@pytest.mark.slow
def test_the_record_of_what_was_sent_may_get_lost(server: WandbServer, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    attempt(run, range(1, 10))
    send(run)
    (run.wandb_dir / SENT_FILE).write_text("{cut")
    send(run)
    assert steps(stored(server, run)) == list(range(1, 10))


def test_attempts_of_a_requeued_run_become_one(server: WandbServer, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    attempt(run, range(1, 21), "queued")
    attempt(run, range(16, 31))  # from a checkpoint at step 15
    first, second = (log.name for folder in offline_folders(run) for log in folder.glob("*.wandb"))
    assert first == second, "one run, so one id"
    (outcome,) = send(run)
    assert (outcome.what, outcome.rows) == ("sent", 35)
    assert len(server.runs) == 1
    found = stored(server, run)
    assert steps(found) == [*range(1, 21), *range(16, 31)]
    assert found.summary[STEP_KEY] == 30
    assert found.ends[-1] == (0, False)


@pytest.mark.slow
def test_a_live_run_is_sent_as_far_as_it_is_and_again_later(server: WandbServer, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    attempt(run, range(1, 8), None)
    (outcome,) = send(run)
    assert (outcome.what, outcome.rows, outcome.live) == ("sent", 7, True)
    found = stored(server, run)
    assert steps(found) == list(range(1, 8))
    assert found.ends == [(1, True)], "marked as a part of a run that goes on"
    (outcome,) = send(run)
    assert (outcome.what, outcome.live) == ("current", True)
    attempt(run, range(8, 12), "failed")
    (outcome,) = send(run)
    assert (outcome.what, outcome.rows, outcome.live) == ("sent", 4, False)
    assert steps(found) == list(range(1, 12))
    assert found.ends == [(1, True), (1, False)]
    assert send(run)[0].what == "current"
    assert all(f.with_name(f.name + ".synced").exists() for f in run.wandb_dir.glob("*/*.wandb"))


@pytest.mark.slow
def test_the_end_of_a_run_is_sent_without_new_steps(server: WandbServer, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    attempt(run, range(1, 8), None)
    send(run)
    run.set_state("completed")
    (outcome,) = send(run)
    assert (outcome.what, outcome.rows) == ("sent", 0)
    found = stored(server, run)
    assert steps(found) == list(range(1, 8))
    assert found.ends == [(1, True), (0, False)]
    assert (found.summary[STEP_KEY], found.summary["loss"]) == (7, pytest.approx(1 / 7))


@pytest.mark.slow
def test_what_the_client_of_a_killed_rank_did_not_write_arrives(server: WandbServer, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    killed_attempt(run, range(1, 6))
    (log,) = run.wandb_dir.glob("*/*.wandb")
    assert read_log(log).rows < 5, "if the client keeps nothing back any more, a lot here can go"
    (outcome,) = send(run)  # while it still counts as running elsewhere
    assert (outcome.what, outcome.rows) == ("sent", 5)
    killed_attempt(run, range(4, 200), wide=20)
    attempt(run, range(150, 160))
    (outcome,) = send(run)
    assert (outcome.what, outcome.rows) == ("sent", 206)
    assert 1 <= len(outcome.notes) <= 2, "the client may or may not have got to the end of its log"
    assert steps(stored(server, run)) == [*range(1, 6), *range(4, 200), *range(150, 160)]


def test_a_log_cut_inside_a_record_is_named_and_stops_nothing(server: WandbServer, tmp_path: Path) -> None:
    cut, whole = make_run(tmp_path, name="cut-0123456789ab"), make_run(tmp_path, name="whole-0123456789ab")
    for run in (cut, whole):
        attempt(run, range(1, 31))
    (log,) = cut.wandb_dir.glob("*/*.wandb")
    data = log.read_bytes()
    log.write_bytes(data[: len(data) * 2 // 3])
    kept = read_log(log).rows
    assert 0 < kept < 30
    first, second = send(cut, whole)
    outcomes = {o.run.name: o for o in (first, second)}
    assert outcomes[cut.name].notes == [
        f"{log.relative_to(cut.path)} breaks off after {kept} steps and is skipped; metrics.jsonl has them all"
    ]
    assert outcomes[whole.name].notes == []
    for run in (cut, whole):
        assert outcomes[run.name].what == "sent"
        assert steps(stored(server, run)) == list(range(1, 31))


@pytest.mark.slow
def test_without_the_steps_a_cut_log_is_skipped_and_named(server: WandbServer, tmp_path: Path) -> None:
    cut, whole = make_run(tmp_path, name="cut-0123456789ab"), make_run(tmp_path, name="whole-0123456789ab")
    for run in (cut, whole):
        attempt(run, range(1, 31))
        run.metrics_file.unlink()
    (log,) = cut.wandb_dir.glob("*/*.wandb")
    data = log.read_bytes()
    log.write_bytes(data[: len(data) * 2 // 3])
    outcomes = {o.run.name: o for o in send(cut, whole)}
    assert outcomes[cut.name].what == "failed"
    assert log.name in outcomes[cut.name].notes[0]
    assert outcomes[whole.name].what == "sent"
    assert steps(stored(server, whole)) == list(range(1, 31))
    assert len(server.runs) == 1


@pytest.mark.slow
def test_a_run_that_died_before_its_first_step_is_there_with_its_end(
    server: WandbServer, tmp_path: Path
) -> None:
    killed, raised = (
        make_run(tmp_path, name="killed-0123456789ab"),
        make_run(tmp_path, name="raised-0123456789ab"),
    )
    killed_attempt(killed, range(1, 1))
    killed.set_state("failed")
    (log,) = killed.wandb_dir.glob("*/*.wandb")
    log.write_bytes(log.read_bytes()[:7])  # what the client writes at once
    attempt(raised, range(1, 1), "failed")
    assert {o.run.name: (o.what, o.rows) for o in send(killed, raised)} == {
        killed.name: ("sent", 0),
        raised.name: ("sent", 0),
    }
    for run in (killed, raised):
        assert stored(server, run).history == []
        assert "model" in stored(server, run).config
    assert stored(server, killed).ends == [(1, False)]
    assert {o.what for o in send(killed, raised)} == {"current"}


@pytest.mark.slow
def test_values_that_are_not_finite_and_wall_times_arrive(server: WandbServer, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.set_state("running")
    with MetricsWriter(run.metrics_file) as writer:
        writer.write({"loss": float("nan"), "grad_norm": float("inf")}, 1)
        writer.write({"loss": 0.5}, 2)
    (outcome,) = send(run)  # no client has begun its log yet
    assert (outcome.what, outcome.rows) == ("sent", 2)
    first, second = stored(server, run).rows
    assert math.isnan(first["loss"])
    assert (first["grad_norm"], second["loss"]) == (math.inf, 0.5)
    times = [datetime.fromisoformat(row["time"]).timestamp() for row in run.metrics()]
    assert [row["_timestamp"] for row in (first, second)] == pytest.approx(times, abs=1e-3)


@pytest.mark.slow
def test_many_runs_in_several_calls(
    server: WandbServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync, "BATCH", 2)
    runs = [make_run(tmp_path) for _ in range(3)]
    for number, run in enumerate(runs):
        run.set_state("running")
        with MetricsWriter(run.metrics_file) as writer:
            writer.write({"loss": 1.0}, number + 1)
    assert [o.what for o in send(*runs)] == ["sent"] * 3
    for number, run in enumerate(runs):
        (found,) = [s for n, s in server.runs.items() if n == f"{run.name}-{run.provenance()['uid']}"]
        assert steps(found) == [number + 1]


# ------------------------------------------------------------------------------------------------- nothing to send


@pytest.mark.slow
def test_a_run_that_nobody_works_on_any_more_gets_its_end(server: WandbServer, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.set_state("running", host="elsewhere")
    with MetricsWriter(run.metrics_file) as writer:
        writer.write({"loss": 1.0}, 1)
    assert [(o.what, o.live) for o in sync.sync([run], lambda _: None, {run})] == [("sent", False)]
    assert stored(server, run).ends == [(1, False)]


def test_what_has_nothing_to_send_says_why_and_needs_no_network(tmp_path: Path) -> None:
    disabled = make_run(tmp_path, config("tracking=disabled"), name="disabled-0123456789ab")
    attempt(disabled, range(1, 3))
    created = make_run(tmp_path, name="created-0123456789ab")
    failed = make_run(tmp_path, name="failed-0123456789ab")
    failed.set_state("failed")
    online = make_run(tmp_path, config("tracking=online"), name="online-0123456789ab")
    online.set_state("running")
    with MetricsWriter(online.metrics_file) as writer:
        writer.write({"loss": 1.0}, 1)
    (online.path / "wandb" / "run-20260101_000000-x").mkdir(parents=True)
    outcomes = {o.run.name.split("-")[0]: (o.what, o.why) for o in send(disabled, created, failed, online)}
    assert outcomes == {
        "disabled": ("nothing", "tracking=disabled"),
        "created": ("nothing", "it is created and has no steps yet"),
        "failed": ("nothing", "it has no steps and no offline W&B folder"),
        "online": ("nothing", "it was tracked online, which sends it by itself"),
    }


@pytest.mark.slow
def test_an_online_run_that_fell_back_to_offline_is_sent(server: WandbServer, tmp_path: Path) -> None:
    run = make_run(tmp_path, config("tracking=online"))
    attempt(run, range(1, 5))  # without a login
    assert run.status().extra["tracking"]["mode"] == "offline"
    assert send(run)[0].what == "sent"
    assert steps(stored(server, run)) == list(range(1, 5))


@pytest.mark.slow
def test_a_broken_folder_stops_nothing(server: WandbServer, tmp_path: Path) -> None:
    broken, good = (
        make_run(tmp_path, name="broken-0123456789ab"),
        make_run(tmp_path, name="good-0123456789ab"),
    )
    for run in (broken, good):
        attempt(run, range(1, 4))
    (broken.path / "config.yaml").write_text("model: [")
    outcomes = {o.run.name: o for o in send(broken, good)}
    assert outcomes[broken.name].what == "failed"
    assert outcomes[good.name].what == "sent"
    assert summary(list(outcomes.values())) == "1 run sent (3 steps), 0 up to date, 1 failed."


def test_two_at_once_do_not_send_one_run_twice(server: WandbServer, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    attempt(run, range(1, 4))
    handle = os.open(run.wandb_dir, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    (outcome,) = send(run)
    os.close(handle)
    assert (outcome.what, outcome.why) == ("failed", "another `europa sync` is sending it")
    assert server.runs == {}


# ------------------------------------------------------------------------------------------------------- trouble


@pytest.mark.slow
def test_a_connection_that_breaks_in_the_middle_is_told_and_completed(
    server: WandbServer, tmp_path: Path
) -> None:
    run = make_run(tmp_path)
    attempt(run, range(1, 21))
    server.take_lines = 8
    (outcome,) = send(run)
    assert outcome.what == "failed"
    assert outcome.why.startswith("the server has 8 of 20 new steps")
    server.take_lines = None
    (outcome,) = send(run)
    assert (outcome.what, outcome.rows) == ("sent", 12)
    assert steps(stored(server, run)) == list(range(1, 21))


@pytest.mark.slow
def test_a_server_that_never_takes_it_ends_in_bounded_time(
    server: WandbServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync, "SEND_S", 8.0)
    run = make_run(tmp_path)
    attempt(run, range(1, 5))
    server.refuse_history = 500  # which the client retries for a long time
    (outcome,) = send(run)
    assert outcome.what == "failed"
    assert "did not end within 8 s" in outcome.why
    server.refuse_history = None
    before = len(server.operations)
    time.sleep(3)
    assert "history" not in server.operations[before:], "the client went on after it was stopped"
    assert send(run)[0].what == "sent"
    assert steps(stored(server, run)) == list(range(1, 5))


@pytest.mark.slow
def test_without_a_login_nothing_is_sent(
    tmp_path: Path, server: WandbServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_API_KEY")
    run = make_run(tmp_path)
    attempt(run, range(1, 3))
    done = europa("--runs-dir", str(tmp_path))
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        f"europa: nobody is logged in to W&B at {server.url}; run `wandb login` (or set WANDB_API_KEY) and try again\n"
    )
    assert not (run.wandb_dir / SENT_FILE).exists()


@pytest.mark.parametrize(
    ("code", "answer", "why"),
    [
        (401, {"errors": [{"message": "user is not logged in"}]}, "user is not logged in; run `wandb login`"),
        (200, {"data": {"viewer": None}}, "run `wandb login`"),
        (404, {}, "check the network"),
    ],
)
@pytest.mark.slow
def test_a_server_that_refuses_is_told_in_one_message(
    code: int,
    answer: dict[str, Any],
    why: str,
    server: WandbServer,
    tmp_path: Path,
) -> None:
    run = make_run(tmp_path)
    attempt(run, range(1, 3))
    server.answer_always = (code, answer)
    with pytest.raises(WandbUnavailable, match=why):
        send(run)


@pytest.mark.slow
def test_without_a_network_one_message_in_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    run = make_run(tmp_path)
    attempt(run, range(1, 3))
    done = europa("--runs-dir", str(tmp_path))
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "W&B at http://127.0.0.1:9 can't be used" in line
    assert "check the network" in line
    assert KEY not in done.stderr


@pytest.mark.slow
def test_a_server_that_accepts_and_says_nothing_ends_in_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wandb_process, "ASK_TIMEOUT_S", 3.0)
    monkeypatch.setattr(wandb_process, "EACH_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        run = make_run(tmp_path)
        attempt(run, range(1, 3))
        with pytest.raises(WandbUnavailable, match="did not answer within 3 s; check the network"):
            send(run)


# --------------------------------------------------------------------------------------------------- command line


@pytest.mark.slow
def test_the_command_tells_each_run_and_a_summary(server: WandbServer, tmp_path: Path) -> None:
    mine = make_run(tmp_path, name="mine-0123456789ab", sweep="s1")
    disabled = make_run(tmp_path, config("tracking=disabled"), name="off-0123456789ab", sweep="s1")
    other = make_run(tmp_path, name="other-0123456789ab", sweep="s2")
    for run in (mine, disabled, other):
        attempt(run, range(1, 4))
    done = europa("--runs-dir", str(tmp_path), "--sweep", "s1")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == sorted(
        [
            "nothing     off-0123456789ab: tracking=disabled",
            "sent        mine-0123456789ab: 3 steps",
            "1 run sent (3 steps), 0 up to date, 1 with nothing to send.",
        ]
    )
    done = europa("other", "mine", "--runs-dir", str(tmp_path))
    assert done.stdout.splitlines()[-1] == "1 run sent (3 steps), 1 up to date."
    assert steps(stored(server, other)) == [1, 2, 3]
    assert europa("absent", "--runs-dir", str(tmp_path)).returncode == 2


@pytest.mark.slow
def test_watching_ends_when_all_runs_have_ended_and_are_sent(server: WandbServer, tmp_path: Path) -> None:
    run = make_run(tmp_path, sweep="s1")
    attempt(run, range(1, 4), None)
    command = [sys.executable, "-m", "europa_exp.cli", "sync", "--sweep", "s1", "--watch", "--every", "1"]
    watch = subprocess.Popen([*command, "--runs-dir", str(tmp_path)], stdout=subprocess.PIPE, text=True)
    guard = threading.Timer(400, watch.kill)
    guard.start()
    try:
        deadline = time.monotonic() + 300
        while not (run.wandb_dir / SENT_FILE).exists():
            assert time.monotonic() < deadline
            time.sleep(0.2)
        attempt(run, range(4, 9))
        out, _ = watch.communicate()
    finally:
        guard.cancel()
        watch.kill()
    assert watch.returncode == 0, out
    assert steps(stored(server, run)) == list(range(1, 9))
    assert stored(server, run).ends[-1] == (0, False)


@pytest.mark.slow
def test_a_run_folder_that_was_copied_keeps_what_it_sent(server: WandbServer, tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    attempt(run, range(1, 4))
    send(run)
    copy = RunFolder(shutil.copytree(run.path, tmp_path / "b" / run.name))
    assert send(copy)[0].what == "current"
    assert steps(stored(server, run)) == [1, 2, 3]
