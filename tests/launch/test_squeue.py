"""Asking Slurm, with commands that answer like its own, or badly, late, or never; its real ones are in tests/slurm."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from europa_exp.launch import squeue
from europa_exp.launch.standing import current_job, survey
from europa_exp.runs.folder import RunFolder
from europa_exp.runs.slurm_record import ENDED, Answer, SlurmState, job_ids, node_names

Install = Callable[[str, str], None]

# What Slurm 22.05 printed, with the formats that are asked for.
QUEUE = """579820|RUNNING|127.0.0.1|2026-11-29T16:54:19|2027-11-29T16:54:19|None
579821_1|CANCELLED|127.0.0.1|2026-11-29T16:54:19|2026-11-29T16:54:52|None
579821_5|PENDING||N/A|N/A|JobArrayTaskLimit
579823|PENDING||2026-11-29T16:54:32|NONE|BeginTime
"""
ACCOUNTS = """579822|FAILED|3:0|127.0.0.1|2026-11-29T16:54:19|2026-11-29T16:54:19|None
579822.batch|FAILED|3:0|127.0.0.1|2026-11-29T16:54:19|2026-11-29T16:54:19|
579822.0|CANCELLED|0:9|127.0.0.1|2026-11-29T16:54:19|2026-11-29T16:54:19|
579823|REQUEUED|0:0|127.0.0.[1-2]|2026-11-29T16:54:19|2026-11-29T16:54:21|None
579823.0|CANCELLED|0:15|127.0.0.[1-2]|2026-11-29T16:54:19|2026-11-29T16:54:21|
579821_1|CANCELLED by 1004|0:0|127.0.0.1|2026-11-29T16:54:19|2026-11-29T16:54:52|None
579821_3|RUNNING|0:0|127.0.0.1|2026-11-29T16:54:52|Unknown|JobArrayTaskLimit
579821_[3,5-6%2]|PENDING|0:0|None assigned|Unknown|Unknown|JobArrayTaskLimit
"""
ALL = ["579820", "579821_1", "579821_3", "579821_5", "579822", "579823"]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts a shell script in the place of a command; no other squeue or sacct is in sight."""
    place = tmp_path / "bin"
    place.mkdir()
    for tool in ("bash", "cat", "sleep", "env"):
        os.symlink(f"/bin/{tool}" if Path(f"/bin/{tool}").exists() else f"/usr/bin/{tool}", place / tool)
    monkeypatch.setenv("PATH", str(place))

    def put(name: str, script: str) -> None:
        (place / name).write_text(f"#!/bin/bash\n{script}\n")
        (place / name).chmod(0o755)

    return put


def printing(tmp_path: Path, name: str, text: str) -> str:
    """A script that prints ``text`` and keeps its arguments."""
    (tmp_path / f"{name}.txt").write_text(text)
    return f'echo "$@" >> {tmp_path}/{name}.called\ncat {tmp_path}/{name}.txt'


def test_one_call_of_each_for_all_jobs(tmp_path: Path, install: Install) -> None:
    install("squeue", printing(tmp_path, "squeue", QUEUE))
    install("sacct", printing(tmp_path, "sacct", ACCOUNTS))
    found = squeue.ask([*ALL, "579821_5", "7", "nonsense", "1; rm -rf /"])
    assert {i: (s.state, s.source) for i, s in found.jobs.items()} == {
        "579820": ("RUNNING", "squeue"),
        "579821_1": ("CANCELLED", "squeue"),
        "579821_5": ("PENDING", "squeue"),
        "579823": ("PENDING", "squeue"),
        "579821_3": ("RUNNING", "sacct"),
        "579822": ("FAILED", "sacct"),
    }
    assert (found.silent, found.known) == ((), True)
    [asked] = (tmp_path / "squeue.called").read_text().splitlines()
    assert "--jobs=579820,579821,579822,579823,7 " in asked, "an array is one id, however many tasks it has"
    [asked] = (tmp_path / "sacct.called").read_text().splitlines()
    assert "--jobs=579821,579822,7 " in asked, "only what squeue does not know"
    waits = found.jobs["579823"]
    assert (waits.reason, waits.waiting, waits.nodes, waits.ended_at) == ("BeginTime", True, "", "")
    assert found.jobs["579820"].ended_at == "", "when its time runs out is not when it ended"
    assert found.jobs["579821_1"].ended_at == "2026-11-29T16:54:52"


def test_steps_and_earlier_starts_come_from_the_accounting(tmp_path: Path, install: Install) -> None:
    install("squeue", printing(tmp_path, "squeue", QUEUE))
    install("sacct", printing(tmp_path, "sacct", ACCOUNTS))
    found = squeue.ask(ALL, steps=True).jobs
    assert (found["579822"].exit_code, found["579822"].signal) == (3, 0)
    assert [(s.name, s.state, s.signal) for s in found["579822"].steps] == [
        ("batch", "FAILED", 0),
        ("0", "CANCELLED", 9),
    ]
    assert found["579821_1"].by == "1004"
    waits = found["579823"]
    assert (waits.state, waits.source, waits.steps) == ("PENDING", "squeue", ())
    [before] = waits.earlier
    assert (before.state, before.nodes, before.steps[0].signal) == ("REQUEUED", "127.0.0.[1-2]", 15)


def test_tasks_of_an_array_that_was_cancelled_while_all_of_it_waited(
    tmp_path: Path, install: Install
) -> None:
    install("squeue", printing(tmp_path, "squeue", "582280|CANCELLED||N/A|2026-11-29T16:54:52|JobHeldUser\n"))
    install("sacct", printing(tmp_path, "sacct", "582280_4|COMPLETED|0:0|n1|Unknown|Unknown|None\n"))
    found = squeue.jobs(["582280_3", "582280_4", "582280", "582281_3"])
    assert {i: (s.job_id, s.state) for i, s in found.items()} == {
        "582280_3": ("582280_3", "CANCELLED"),
        "582280_4": ("582280_4", "COMPLETED"),
        "582280": ("582280", "CANCELLED"),
    }


def test_nobody_asked_means_no_call(tmp_path: Path, install: Install) -> None:
    install("squeue", printing(tmp_path, "squeue", QUEUE))
    assert squeue.ask([]) == Answer(known=True)
    assert squeue.jobs(["nonsense"]) == {}
    assert not (tmp_path / "squeue.called").exists()


def test_everything_known_to_squeue_leaves_the_accounting_alone(tmp_path: Path, install: Install) -> None:
    install("squeue", printing(tmp_path, "squeue", QUEUE))
    install("sacct", printing(tmp_path, "sacct", ACCOUNTS))
    squeue.jobs(["579820", "579821_5"])
    assert not (tmp_path / "sacct.called").exists()


BROKEN = {
    "absent": None,
    "refuses": "echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1",
    "hangs": f"sleep 1000.{os.getpid()} & wait",
    "crashes": "kill -9 $$",
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_squeue_that_does_not_answer(tmp_path: Path, install: Install, how: str) -> None:
    if BROKEN[how] is not None:
        install("squeue", str(BROKEN[how]))
    install("sacct", printing(tmp_path, "sacct", ACCOUNTS))
    found = squeue.ask(ALL, timeout=0.5)
    assert {i: s.state for i, s in found.jobs.items()} == {
        "579822": "FAILED",
        "579823": "REQUEUED",
        "579821_1": "CANCELLED",
        "579821_3": "RUNNING",
        "579821_5": "PENDING",
    }
    assert not found.known, "what sacct lacks may be in the queue all the same"
    [complaint] = found.silent
    assert complaint.startswith("squeue: ")
    if how == "refuses":
        assert "Unable to contact slurm controller" in complaint
    if how == "hangs":
        assert "no answer in 0.5 s" in complaint
        left = subprocess.run(["/bin/ps", "-eo", "args"], capture_output=True, text=True).stdout
        assert f"sleep 1000.{os.getpid()}" not in left, "its children are gone, too"


@pytest.mark.parametrize("how", [*BROKEN, "empty", "garbage"])
def test_an_accounting_that_does_not_answer(tmp_path: Path, install: Install, how: str) -> None:
    install("squeue", printing(tmp_path, "squeue", QUEUE))
    script = {
        "empty": "exit 0",
        "garbage": "echo 'Slurm accounting storage is disabled'; echo '|||'",
    } | BROKEN
    if script[how] is not None:
        install("sacct", str(script[how]))
    found = squeue.ask(ALL, timeout=0.5)
    assert set(found.jobs) == {"579820", "579821_1", "579821_5", "579823"}
    assert found.known
    assert len(found.silent) == (0 if how in ("empty", "garbage") else 1)


def test_a_forgotten_job_is_no_trouble(install: Install) -> None:
    # Asked for one job that it does not know, squeue fails; asked for several, it leaves it out.
    install("squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    install("sacct", "exit 0")
    assert squeue.ask(["7"]) == Answer(known=True)


def test_personal_formats_do_not_reach_the_commands(
    tmp_path: Path, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SQUEUE_FORMAT", "SQUEUE_STATES", "SACCT_FORMAT", "SLURM_TIME_FORMAT"):
        monkeypatch.setenv(name, "relative")
    monkeypatch.setenv("SLURM_CONF", "/kept")
    install("squeue", f"env > {tmp_path}/environ")
    squeue.jobs(["7"])
    environ = (tmp_path / "environ").read_text()
    assert "relative" not in environ
    assert "SLURM_CONF=/kept" in environ


@pytest.mark.parametrize(
    ("text", "jobs"),
    [
        ("7", ["7"]),
        ("7_3", ["7_3"]),
        ("7_[1-3,9%2]", ["7_1", "7_2", "7_3", "7_9"]),
        ("7_[0-6:3]", ["7_0", "7_3", "7_6"]),
        (" 7 ", ["7"]),
        ("", []),
        ("7.batch", []),
        ("-7", []),
        ("7,8", []),
    ],
)
def test_job_ids(text: str, jobs: list[str]) -> None:
    assert job_ids(text) == jobs


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("n1", ["n1"]),
        ("n[01-03,7],login", ["n01", "n02", "n03", "n7", "login"]),
        ("jpbo-[001-002]-[1-2]", ["jpbo-001-1", "jpbo-001-2", "jpbo-002-1", "jpbo-002-2"]),
        ("127.0.0.[9-10]", ["127.0.0.9", "127.0.0.10"]),
        ("", []),
        ("None assigned", []),
        ("(null)", []),
        ("n[1-x]", []),
    ],
)
def test_node_names(text: str, nodes: list[str]) -> None:
    assert node_names(text) == nodes


def test_the_terminal_states() -> None:
    for state in [
        "COMPLETED",
        "FAILED",
        "TIMEOUT",
        "CANCELLED",
        "NODE_FAIL",
        "PREEMPTED",
        "OUT_OF_MEMORY",
        "BOOT_FAIL",
        "DEADLINE",
        "REVOKED",
    ]:
        assert SlurmState("7", state, "squeue").ended
        assert not SlurmState("7", state, "squeue").waiting
    for state in [
        "PENDING",
        "RUNNING",
        "COMPLETING",
        "CONFIGURING",
        "SUSPENDED",
        "REQUEUED",
        "REQUEUE_HOLD",
        "SIGNALING",
    ]:
        assert state not in ENDED


# ------------------------------------------------------------------------------------------ the record and Slurm's word


def test_of_a_chain_the_job_that_runs_or_waits_matters() -> None:
    ended, waits, runs = (
        SlurmState("1", "FAILED", "squeue"),
        SlurmState("2", "PENDING", "squeue"),
        SlurmState("3", "RUNNING", "squeue"),
    )
    assert current_job(["1", "2", "3"], Answer({"1": ended, "2": waits, "3": runs})) == ("3", runs)
    assert current_job(["1", "2"], Answer({"1": ended, "2": waits})) == ("2", waits)
    assert current_job(["1", "2"], Answer({"1": ended})) == ("1", ended)
    assert current_job(["1", "2"], Answer()) == ("2", None)
    assert current_job([], Answer()) == (None, None)


def test_of_a_chain_the_job_that_ended_the_run_matters(tmp_path: Path) -> None:
    tries = [{"n": 1, "job_id": "7_1"}, {"n": 2, "job_id": "8_1"}]
    run = make(tmp_path, "completed", job_ids=["7_1", "8_1", "9_1"], attempts=tries)
    cancelled = SlurmState("9_1", "CANCELLED", "squeue")
    for answer in (Answer(known=True), Answer({"9_1": cancelled}, known=True)):
        [found] = survey([run], slurm=answer).standings
        assert (found.job_id, found.slurm, found.state) == ("8_1", None, "completed")


def make(tmp_path: Path, state: str, **fields: object) -> RunFolder:
    (tmp_path / "run").mkdir()
    run = RunFolder(tmp_path / "run")
    run.set_state(state, job_id="7", job_folder=str(tmp_path), **fields)
    return run


@pytest.mark.parametrize(
    "word", ["NODE_FAIL", "TIMEOUT", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY", "REVOKED"]
)
def test_slurm_knows_what_a_dead_node_could_not_record(tmp_path: Path, word: str) -> None:
    run = make(tmp_path, "running")
    answer = Answer({"7": SlurmState("7", word, "squeue")}, known=True)
    [found] = survey([run], ask=lambda ids: answer).standings
    assert (found.state, found.source, found.bad) == ("failed", "squeue", True)
    assert word in found.note


def test_a_last_word_that_comes_while_slurm_is_asked_counts(tmp_path: Path) -> None:
    run = make(tmp_path, "running")

    def ask(ids: object) -> Answer:
        run.set_state("completed")
        return Answer({"7": SlurmState("7", "COMPLETED", "squeue")}, known=True)

    assert [s.state for s in survey([run], ask=ask).standings] == ["completed"]


def test_runs_that_have_ended_cost_no_question(tmp_path: Path) -> None:
    run = make(tmp_path, "completed")

    def ask(ids: object) -> Answer:
        raise AssertionError("nobody needs to know")

    assert [s.state for s in survey([run], ask=ask).standings] == ["completed"]


def test_no_answer_is_not_no_job(tmp_path: Path) -> None:
    run = make(tmp_path, "running")
    unknown = survey([run], ask=lambda ids: Answer(silent=("squeue: down", "sacct: down"))).standings[0]
    assert (unknown.state, unknown.bad) == ("running", False)
    assert "Slurm did not answer" in unknown.note
    gone = survey([run], ask=lambda ids: Answer(known=True)).standings[0]
    assert (gone.state, gone.bad) == ("lost", True)


def test_a_run_that_is_just_being_submitted_is_not_lost(tmp_path: Path) -> None:
    run = make(tmp_path, "queued")
    run.note(job_id=None)
    assert survey([run]).standings[0].state == "queued"
    long_ago = (run.path / "status.json").stat().st_mtime - 600
    os.utime(run.path / "status.json", (long_ago, long_ago))
    found = survey([run]).standings[0]
    assert (found.state, found.bad) == ("lost", True)
    assert "never handed to Slurm" in found.note


def test_runs_that_share_a_job_wait_for_their_turn(tmp_path: Path) -> None:
    runs = []
    for name, state in (("a", "running"), ("b", "queued")):
        (tmp_path / name).mkdir()
        runs.append(RunFolder(tmp_path / name))
        runs[-1].set_state(state, job_id="7")
    answer = Answer({"7": SlurmState("7", "RUNNING", "squeue")}, known=True)
    first, second = survey(runs, ask=lambda ids: answer).standings
    assert (first.state, second.state) == ("running", "queued")
    assert "waits for its turn in job 7" in second.note
    assert [s.state for s in survey(runs[1:], ask=lambda ids: answer).standings] == ["loading"]


def test_a_hundred_runs_are_one_question(tmp_path: Path, install: Install) -> None:
    lines = "".join(f"7_{i}|RUNNING|n{i}|2026-11-29T16:54:19|N/A|None\n" for i in range(100))
    install("squeue", printing(tmp_path, "squeue", lines))
    runs = []
    for i in range(100):
        (tmp_path / f"run{i}").mkdir()
        runs.append(RunFolder(tmp_path / f"run{i}"))
        runs[-1].set_state("running", job_id=f"7_{i}")
    found = survey(runs)
    assert [s.state for s in found.standings] == ["running"] * 100
    assert found.standings[42].nodes == "n42"
    assert len((tmp_path / "squeue.called").read_text().splitlines()) == 1


def test_a_refusal_is_told_of_each_job_in_its_own_words(install: Install) -> None:
    """One call of scancel for many jobs complains of each, and its last line is about one of them only."""
    lines = [
        f"scancel: error: Kill job error on job id {i}: {why}" for i, why in (("7", "no"), ("70_1", "down"))
    ]
    install("scancel", "\n".join(f"echo '{line}' >&2" for line in lines) + "\nexit 1")
    refused = squeue.run(["scancel", "7", "70_1", "700"])
    assert isinstance(refused, squeue.Refused)
    assert refused.about(["7"]) == lines[0]
    assert refused.about(["70_1"]) == refused.about(["8", "70_1"]) == lines[1]
    assert refused.about(["700"]) == refused.text == lines[1], "nothing of its own: the last word"
