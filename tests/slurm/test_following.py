"""status, cancel and why against a real Slurm: plain jobs of the shell, and run folders that claim to belong to them."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from clusters import Cluster, until
from recorded import record
from submitting import europa

from europa_exp.launch import squeue
from europa_exp.launch.standing import survey
from europa_exp.runs.folder import RunFolder
from europa_exp.runs.status import State

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(300)]


def job(slurm: Cluster, script: str, *options: str) -> str:
    """Submit a shell script; the job's id."""
    where = ("--output=/dev/null", "--error=/dev/null")
    return slurm.run("sbatch", "--parsable", "--nodes=1", *where, *options, f"--wrap={script}").strip()


def claim(runs: Path, number: int, job_id: str | None, state: str, **fields: object) -> RunFolder:
    """A run folder that says that a job works on it."""
    run = record(runs, f"training.seed={number}", sweep="s", state=state)
    given = {"job_folder": str(runs / ".submitit" / "x"), "job_task": 0, "job_id": job_id}
    run.note(**(given | ({"job_ids": [job_id]} if job_id else {}) | fields))
    return run


def is_in(slurm: Cluster, job_id: str, state: str) -> None:
    until(lambda: slurm.queue().get(job_id) == state, 60, lambda: slurm.run("squeue", "--states=all"))


def states(runs: Path) -> dict[str, str]:
    from europa_exp.runs.folder import list_runs

    return {s.run.name: s.state for s in survey(list_runs(runs)).standings}


def test_what_slurm_says_of_jobs(slurm: Cluster) -> None:
    array = job(slurm, "sleep 60", "--array=0-3%1")
    failed = job(slurm, "srun --ntasks=1 bash -c 'kill -9 $$'; exit 3")
    two = job(slurm, "srun sleep 60", "--nodes=2", "--requeue")
    held = job(slurm, "true", "--hold")
    is_in(slurm, f"{array}_0", "RUNNING")
    is_in(slurm, two, "RUNNING")
    assert slurm.wait_until_over(failed) == {failed: "FAILED"}

    ids = [f"{array}_0", f"{array}_3", failed, two, held, "1", "nonsense"]
    found = squeue.ask(ids)
    assert found.known
    assert not found.silent
    assert {i: s.state for i, s in found.jobs.items()} == {
        f"{array}_0": "RUNNING",
        f"{array}_3": "PENDING",
        failed: "FAILED",
        two: "RUNNING",
        held: "PENDING",
    }
    assert found.jobs[f"{array}_3"].reason == "JobArrayTaskLimit"
    assert found.jobs[held].reason == "JobHeldUser"
    assert len(found.jobs[two].nodes.split("-")) == 2
    assert found.jobs[failed].ended
    assert found.jobs[f"{array}_3"].waiting

    slurm.run("scontrol", "requeue", two)
    is_in(slurm, two, "PENDING")

    def known_steps() -> bool:
        deep = squeue.ask([failed, two], steps=True)
        return bool(deep.jobs[failed].steps) and bool(deep.jobs[two].earlier)

    until(known_steps, 30)  # the accounting is late
    deep = squeue.ask([failed, two], steps=True)
    assert (deep.jobs[failed].exit_code, deep.jobs[failed].signal) == (3, 0)
    assert any(step.name == "0" and step.signal == 9 for step in deep.jobs[failed].steps)
    assert deep.jobs[two].state == "PENDING"
    assert [e.state for e in deep.jobs[two].earlier] == ["REQUEUED"]
    assert squeue.jobs(["1"]) == {}, "a job that nobody knows"


def test_status_holds_the_record_against_slurm(slurm: Cluster, tmp_path: Path) -> None:
    running, waiting = job(slurm, "sleep 100"), job(slurm, "true", "--hold")
    ended_well, ended_badly = job(slurm, "true"), job(slurm, "exit 7")
    lost_node = job(slurm, "sleep 100", "--nodelist=127.0.0.4", "--no-requeue")
    again = job(slurm, "sleep 100", "--nodelist=127.0.0.3", "--requeue")
    for i in (running, lost_node, again):
        is_in(slurm, i, "RUNNING")
    slurm.wait_until_over(ended_well, ended_badly)
    slurm.script("down", "127.0.0.4")
    slurm.run("scontrol", "requeue", again)
    is_in(slurm, again, "PENDING")
    slurm.run(
        "scontrol", "update", f"JobId={again}", "StartTime=now+1hour"
    )  # it waits, however slow this machine is
    slurm.wait_until_over(lost_node)

    claims = {
        "running": claim(tmp_path, 1, running, "running"),
        "queued": claim(tmp_path, 2, waiting, "queued"),
        "completed": claim(tmp_path, 3, ended_badly, "completed"),
        "lost": claim(tmp_path, 4, ended_well, "running"),
        "failed": claim(tmp_path, 5, ended_badly, "running"),
        "node": claim(tmp_path, 6, lost_node, "running"),
        "requeued": claim(tmp_path, 7, again, "running"),
        "chain": claim(tmp_path, 8, again, "queued"),
        "unknown": claim(tmp_path, 9, "1", "running"),
        "never": claim(tmp_path, 10, None, "queued"),
    }
    long_ago = time.time() - 600
    os.utime(claims["never"].path / "status.json", (long_ago, long_ago))
    claims["chain"].note(job_id=again, job_ids=[ended_well, again])  # a chain: its second job waits
    expected = {
        "running": "running",
        "queued": "queued",
        "completed": "completed",  # the run's own word, whatever became of the job
        "lost": "lost",
        "failed": "failed",
        "node": "failed",
        "requeued": "queued",
        "chain": "queued",
        "unknown": "lost",
        "never": "lost",
    }
    found = states(tmp_path)
    assert {name: found[run.name] for name, run in claims.items()} == expected
    notes = {name: survey([run]).standings[0].note for name, run in claims.items()}
    assert "JobHeldUser" in notes["queued"]
    assert "NODE_FAIL" in notes["node"]
    assert "requeued" in notes["requeued"]
    assert "recorded no end" in notes["lost"]

    told = europa(slurm, tmp_path, "status", "--sweep", "s", "--runs-dir", ".")
    assert told.returncode == 1
    why = europa(slurm, tmp_path, "why", "--runs-dir", ".", claims["node"].name)
    assert why.returncode == 0, why.stdout
    assert "cause: node_failure" in why.stdout
    assert "NODE_FAIL" in why.stdout
    assert "127.0.0.4" in why.stdout

    # The controller restarts: the same. It and then the accounting are gone: the record is all there is, and that is said.
    slurm.script("restart-controller")
    assert {name: states(tmp_path)[run.name] for name, run in claims.items()} == expected
    slurm.script("stop-controller")
    without = survey([claims["running"], claims["failed"]])
    assert [s.state for s in without.standings] == ["running", "failed"], "the accounting knows"
    assert without.standings[1].source == "sacct"
    assert any("squeue" in text for text in without.silent)
    slurm.script("kill-dbd")
    without = survey([claims["running"], claims["failed"]])
    assert [s.state for s in without.standings] == ["running", "running"]
    assert len(without.silent) == 2
    slurm.script("start-dbd")
    slurm.script("start-controller")


def test_without_accounting_nothing_is_missing(slurm: Cluster, tmp_path: Path) -> None:
    i = job(slurm, "exit 7")
    slurm.wait_until_over(i)
    run = claim(tmp_path, 1, i, "running")
    slurm.script("kill-dbd")
    found = survey([run])
    assert (found.standings[0].state, found.standings[0].source) == ("failed", "squeue")
    assert not found.silent
    slurm.script("start-dbd")


def test_cancel(slurm: Cluster, tmp_path: Path) -> None:
    running, waiting, other = job(slurm, "sleep 100"), job(slurm, "true", "--hold"), job(slurm, "sleep 100")
    follows = job(slurm, "sleep 100", f"--dependency=afterany:{running}")
    is_in(slurm, running, "RUNNING")
    is_in(slurm, other, "RUNNING")
    chain = claim(tmp_path, 1, running, "running", job_ids=[running, follows])
    queued = claim(tmp_path, 2, waiting, "queued")
    done = claim(tmp_path, 3, other, "completed")
    told = europa(slurm, tmp_path, "cancel", "--sweep", "s", "--runs-dir", ".")
    assert told.returncode == 0, told.stdout
    assert f"{chain.name}: job {running}, {follows} cancelled" in told.stdout
    assert f"{queued.name}: job {waiting} cancelled" in told.stdout
    assert f"{done.name}: nothing to cancel" in told.stdout
    assert {run.name: run.status().state for run in (chain, queued, done)} == {
        chain.name: State.cancelled,
        queued.name: State.cancelled,
        done.name: State.completed,
    }
    assert slurm.wait_until_over(running, waiting, follows) == dict.fromkeys(
        (running, waiting, follows), "CANCELLED"
    )
    assert slurm.queue() == {other: "RUNNING"}, "what is not open was left alone"

    again = europa(slurm, tmp_path, "cancel", chain.name, "--runs-dir", ".")
    assert again.returncode == 0
    assert "nothing to cancel: it is cancelled already" in again.stdout
    why = europa(slurm, tmp_path, "why", "--runs-dir", ".", chain.name).stdout
    assert "cause: cancelled" in why
    assert "europa cancel" in why


def test_cancel_is_not_stopped_by_a_record_with_an_odd_job(slurm: Cluster, tmp_path: Path) -> None:
    half, whole = job(slurm, "sleep 100"), job(slurm, "sleep 100")
    odd = {
        text: claim(tmp_path, i, text, "running", job_ids=[])
        for i, text in enumerate(["abc; rm", "12_[1-3]", "", "12.batch"], 1)
    }
    partly = claim(tmp_path, 5, half, "queued", job_ids=[half, None])
    fine = claim(tmp_path, 6, whole, "queued")
    told = europa(slurm, tmp_path, "cancel", "--sweep", "s", "--runs-dir", ".")
    assert told.returncode == 1, "the odd ones may go on"
    assert "Traceback" not in told.stderr
    assert f"{fine.name}: job {whole} cancelled\n" in told.stdout
    assert f"{partly.name}: job {half} cancelled; its record also names the unknown job null\n" in told.stdout
    for text, run in odd.items():
        assert f"{run.name}: not cancelled: its record names the unknown job {text!r}\n" in told.stdout
        assert run.status().state is State.running, "what was not cancelled is not called so"
        standing = survey([run]).standings[0]
        assert (standing.state, standing.note) == ("lost", f"its record names the unknown job {text!r}")
    assert slurm.wait_until_over(half, whole) == dict.fromkeys((half, whole), "CANCELLED")


def test_cancel_some_runs_of_one_job(slurm: Cluster, tmp_path: Path) -> None:
    i = job(slurm, "sleep 100")
    is_in(slurm, i, "RUNNING")
    first, second = claim(tmp_path, 1, i, "running"), claim(tmp_path, 2, i, "queued")
    third = claim(tmp_path, 3, i, "queued")
    refused = europa(slurm, tmp_path, "cancel", first.name, "--runs-dir", ".")
    assert refused.returncode == 1
    assert "which has more to do" in refused.stdout
    assert first.status().state is State.running
    one = europa(slurm, tmp_path, "cancel", second.name, "--runs-dir", ".")
    assert one.returncode == 0
    assert "will pass it over" in one.stdout
    assert second.status().state is State.cancelled
    assert slurm.queue() == {i: "RUNNING"}
    rest = europa(slurm, tmp_path, "cancel", first.name, third.name, "--runs-dir", ".")
    assert rest.returncode == 0, rest.stdout
    assert slurm.wait_until_over(i) == {i: "CANCELLED"}
    assert {first.status().state, third.status().state} == {State.cancelled}


def test_scancel_by_hand_and_no_controller(slurm: Cluster, tmp_path: Path) -> None:
    by_hand, kept = job(slurm, "sleep 100"), job(slurm, "sleep 100")
    is_in(slurm, by_hand, "RUNNING")
    is_in(slurm, kept, "RUNNING")
    run, other = claim(tmp_path, 1, by_hand, "running"), claim(tmp_path, 2, kept, "running")
    array = job(slurm, "true", "--hold", "--array=0-2")
    waits = claim(tmp_path, 3, f"{array}_1", "queued")
    assert states(tmp_path)[waits.name] == "queued"
    slurm.run("scancel", by_hand, array)
    slurm.wait_until_over(by_hand, array)
    assert (states(tmp_path)[run.name], states(tmp_path)[waits.name]) == ("cancelled", "cancelled")
    until(lambda: "scancel" in europa(slurm, tmp_path, "why", "--runs-dir", ".", run.name).stdout, 30)
    marked = europa(slurm, tmp_path, "cancel", run.name, "--runs-dir", ".")
    assert marked.returncode == 0, marked.stdout
    assert run.status().state is State.cancelled

    slurm.script("stop-controller")
    told = europa(slurm, tmp_path, "cancel", other.name, "--runs-dir", ".")
    slurm.script("start-controller")
    assert told.returncode == 1, told.stdout
    assert "can't be cancelled" in told.stdout
    assert other.status().state is State.running, "what was not cancelled is not called so"
