"""Tasks of a Slurm job without Slurm: processes with its variables, and a scontrol that answers from a file."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launching import config, environ, make_runs, until

from europa_exp.config.schema import Executor
from europa_exp.launch import environment, slurm_exclude, slurm_task
from europa_exp.launch.slurm_task import LayoutError, Task
from europa_exp.launch.standing import survey
from europa_exp.runs import checkpoints
from europa_exp.runs.attempts import STOPPED, Reason, attempts_of, open_attempt
from europa_exp.runs.folder import RunFolder

TASK = "import sys; from europa_exp.launch import slurm_rank\n" + (
    "from europa_exp.runs.folder import RunFolder\n"
    "slurm_rank.work([RunFolder(p) for p in sys.argv[2:]], 'rank_targets:' + sys.argv[1])\n"
)

SCONTROL = """#!/bin/sh
[ ! -e "$EUROPA_FAKE/ending" ] || kill -TERM $$
echo "$*" >>"$EUROPA_FAKE/asked"
case "$*" in
*"show job"*) cat "$EUROPA_FAKE/job" ;;
requeue*) [ ! -e "$EUROPA_FAKE/away" ] || { echo "slurm_requeue error: Unexpected message received" >&2; exit 1; }
    [ ! -e "$EUROPA_FAKE/refuse" ] || { echo "Requested operation is presently disabled" >&2; exit 1; } ;;
esac
"""

SQUEUE = """#!/bin/sh
[ ! -e "$EUROPA_FAKE/ending" ] || kill -TERM $$
"""

SCANCEL = """#!/bin/sh
echo "scancel $*" >>"$EUROPA_FAKE/asked"
"""

RUNNING = "JobId=77 JobState=RUNNING Restarts=0 RunTime=00:00:10 TimeLimit=01:00:00 PreemptTime=None ExcNodeList=(null)"
OVERTIME = RUNNING.replace("00:00:10", "00:59:30")


def variables(
    rank: int, ranks: int, *, job: int = 77, restarts: int = 0, nodes: str = "127.0.0.1"
) -> dict[str, str]:
    """What Slurm tells a task of a step on one node."""
    return {
        "SLURM_JOB_ID": str(job),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
        "SLURM_NTASKS": str(ranks),
        "SLURM_STEP_NUM_TASKS": str(ranks),
        "SLURM_JOB_NODELIST": nodes,
        "SLURMD_NODENAME": "127.0.0.1",
        "SLURM_RESTART_COUNT": str(restarts),
    }


class Step:
    """Tasks of one job step, as srun would start them. It does not kill the others when one fails; ``end`` does."""

    def __init__(self, place: Path) -> None:
        self.place = place
        place.mkdir(exist_ok=True)
        (place / "job").write_text(RUNNING)
        for name, text in (("scontrol", SCONTROL), ("squeue", SQUEUE), ("scancel", SCANCEL)):
            (place / name).write_text(text)
            (place / name).chmod(0o755)
        self.tasks: list[subprocess.Popen[str]] = []

    def start(self, entry: str, *runs: RunFolder, ranks: int = 2, **slurm) -> list[subprocess.Popen[str]]:
        self.tasks = [
            subprocess.Popen(
                [sys.executable, "-c", TASK, entry, *[str(run.path) for run in runs]],
                env=environ(
                    EUROPA_FAKE=str(self.place),
                    PATH=f"{self.place}:{os.environ['PATH']}",
                    **variables(rank, ranks, **slurm),
                ),
                cwd=self.place,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
            for rank in range(ranks)
        ]
        return self.tasks

    def codes(self) -> list[int]:
        return [task.wait(timeout=60) for task in self.tasks]

    def signal(self, number: int, *ranks: int) -> None:
        for rank in ranks or range(len(self.tasks)):
            self.tasks[rank].send_signal(number)

    def end(self) -> None:
        for task in self.tasks:
            task.kill()
            task.wait()
            task.stdout.close()

    def asked(self) -> str:
        path = self.place / "asked"
        return path.read_text() if path.exists() else ""


@pytest.fixture
def step(tmp_path):
    made = Step(tmp_path / "slurm")
    yield made
    made.end()


def on_slurm(ranks: int = 2, **cluster):
    cfg = config(ranks, executor=Executor.slurm, network_interface="lo", **{"max_attempts": 3, **cluster})
    cfg.cluster.preload = False
    return cfg


def attempts(run: RunFolder) -> list[dict]:
    return attempts_of(run.status())


def up(run: RunFolder, ranks: int = 2) -> None:
    until(lambda: all((run.path / f"up_{rank}").exists() for rank in range(ranks)))


# --------------------------------------------------------------------------------------------------- what a task is


def test_a_task_of_an_array():
    found = Task.here(
        variables(5, 8, restarts=2)
        | {
            "SLURM_NODEID": "1",
            "SLURM_LOCALID": "1",
            "SLURM_ARRAY_JOB_ID": "70",
            "SLURM_ARRAY_TASK_ID": "4",
            "SLURM_STEP_NODELIST": "n[01-02]",
        }
    )
    assert (found.rank, found.node, found.local_rank, found.tasks) == (5, 1, 1, 8)
    assert (found.job, found.job_id, found.restarts) == (77, "70_4", 2)
    assert found.nodes == ("n01", "n02")
    assert found.start == "77.2.0"


def test_no_task_at_all():
    with pytest.raises(LayoutError, match="no task of a Slurm job"):
        Task.here({"SLURM_JOB_ID": "7"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"SLURM_STEP_NUM_TASKS": "3"}, "started 3 tasks on 1 nodes; .* asks for 1 x 2"),
        ({"SLURM_JOB_NODELIST": "n[1-2]"}, "2 tasks on 2 nodes"),
        ({"SLURM_LOCALID": "1"}, "task 0 is number 1 on node 0; .* blocks"),
    ],
)
def test_other_tasks_than_ranks_are_refused(change, message):
    with pytest.raises(LayoutError, match=message):
        Task.here(variables(0, 2) | change).check(on_slurm())


def test_devices_of_a_node():
    cfg = on_slurm(4)
    where, notes = environment.place_on_node(cfg, 2, master_addr="n1", master_port=1, devices=list("0123"))
    assert (where.local_rank, where.devices, notes) == (2, ("0", "1", "2", "3"), [])
    dealt, notes = environment.place_on_node(cfg, 2, master_addr="n1", master_port=1, devices=["2"])
    assert (dealt.rank, dealt.local_rank, dealt.devices) == (2, 0, ("2",))
    assert "LOCAL_RANK is 0" in notes[0]
    with pytest.raises(ValueError, match=r"4 ranks a node.*shows 2.*cluster\.gres"):
        environment.place_on_node(cfg, 2, master_addr="n1", master_port=1, devices=["0", "1"])


# ------------------------------------------------------------------------------------------------------ whole runs


def test_a_run(step, tmp_path):
    [run] = make_runs(tmp_path / "runs", on_slurm())
    step.start("record_environment", run)
    assert step.codes() == [0, 0]
    status = run.status()
    assert status.state == "completed"
    assert status.exit_codes == {"0": 0, "1": 0}
    [attempt] = attempts(run)
    assert (attempt["n"], attempt["job_id"], attempt["nodes"]) == (1, "77", ["127.0.0.1"])
    assert attempt["reason"] == "completed"
    assert attempt["ended_at"]
    found = [json.loads((run.path / f"environment_{rank}.json").read_text()) for rank in range(2)]
    assert [f["RANK"] for f in found] == ["0", "1"]
    assert {f["MASTER_ADDR"] for f in found} == {"127.0.0.1"}
    assert len({f["MASTER_PORT"] for f in found}) == 1
    assert {f["GLOO_SOCKET_IFNAME"] for f in found} == {"lo"}
    assert run.runtime()["rendezvous"]["strategy"] == "first_host"
    assert "job 77, rank 1 on 127.0.0.1" in run.log(1).read_text()
    reports = (run.path / "logs" / "host_memory.jsonl").read_text().splitlines()
    assert {json.loads(line)["rank"] for line in reports} == {0, 1}


def test_wrong_number_of_tasks(step, tmp_path):
    [run] = make_runs(tmp_path / "runs", on_slurm(4))
    step.start("write_steps", run, ranks=2)
    assert step.tasks[0].wait(timeout=60) == 1
    status = run.status()
    assert status.state == "failed"
    assert "Slurm started 2 tasks" in status.error["message"]
    assert attempts(run) == [] or attempts(run)[0]["reason"] == "bad_configuration"


def test_a_failing_rank_that_is_not_the_first(step, tmp_path):
    [run] = make_runs(tmp_path / "runs", on_slurm(requeue=True))
    step.start("exit_7_on_1", run)
    assert step.tasks[1].wait(timeout=60) == 7
    step.signal(signal.SIGTERM, 0)  # as srun does
    assert step.tasks[0].wait(timeout=60) == 7
    status = run.status()
    assert (status.state, status.error["rank"]) == ("failed", 1)
    assert attempts(run)[0]["reason"] == "exception"
    assert "requeue" not in step.asked()


@pytest.mark.slow
def test_a_failing_rank_ends_the_others_where_nobody_else_does(step, tmp_path):
    """srun can't while Slurm's controller is away."""
    [run] = make_runs(tmp_path / "runs", on_slurm(3))
    step.start("exit_7_on_1", run, ranks=3)
    assert step.codes() == [7, 7, 137]
    status = run.status()
    assert (status.state, status.error["rank"]) == ("failed", 1)
    assert attempts(run)[0]["reason"] == "exception"


def test_a_crash_is_tried_again(step, tmp_path):
    [run] = make_runs(tmp_path / "runs", on_slurm(requeue=True))
    step.start("crash_on_1", run)
    assert step.tasks[1].wait(timeout=60) == 128 + signal.SIGSEGV
    step.signal(signal.SIGTERM, 0)
    until(lambda: "requeue 77" in step.asked())
    status = run.status()
    assert status.state == "queued"
    assert attempts(run)[0]["reason"] == "segmentation_fault"
    assert attempts(run)[0]["error"]["rank"] == 1
    assert step.tasks[0].poll() is None, "it waits to be killed"

    step.end()
    step.start("write_steps", run, restarts=1)
    assert step.codes() == [0, 0]
    assert run.status().state == "completed"
    assert [a["n"] for a in attempts(run)] == [1, 2]
    assert "starts anew: it keeps no checkpoints" in run.launcher_log.read_text()
    assert run.log(1).read_text().count("======== ") == 2, "the log holds both attempts"


@pytest.mark.parametrize("how", ["crash", "success"])
def test_a_start_that_hung_does_not_speak_for_the_one_that_followed(step, tmp_path, how):
    """Slurm gave its node up, and the run went on elsewhere; then the node is back."""
    [run] = make_runs(tmp_path / "runs", on_slurm(requeue=True))
    step.start("crash_on_1" if how == "crash" else "wait_for_go", run)
    # Before that it may hold the lock of the record, which nobody would give back.
    until(lambda: run.launcher_log.exists() and "attempt 1" in run.launcher_log.read_text())
    step.signal(signal.SIGSTOP)
    open_attempt(run.path, job_id="77", start="77.1.0", nodes=["127.0.0.2"], lost=Reason.node_failure)
    (run.path / "go").touch()
    step.signal(signal.SIGCONT)
    if how == "crash":
        step.tasks[1].wait(timeout=60)
        step.signal(signal.SIGTERM, 0)
    step.codes()
    assert [a["reason"] for a in attempts(run)] == ["node_failure", None]
    assert run.status().state == "running"
    assert "requeue" not in step.asked()


def test_checkpoints_that_are_gone_end_the_run(step, tmp_path):
    """It does not begin again with the first step, and is not tried again."""
    cfg = on_slurm(requeue=True, checkpoint_dir=str(tmp_path / "scratch"))
    cfg.training.checkpoint_every = 5
    [run] = make_runs(tmp_path / "runs", cfg)
    place = checkpoints.place(run, cfg.cluster.checkpoint_dir)
    checkpoints.make_place(run, place)
    for saved in (5, 10):
        (place / f"step-{saved}").mkdir()
        (place / f"step-{saved}" / ".metadata").touch()
        checkpoints.note_saved(run, saved)
    (place / "step-15").mkdir()
    (place / "step-10" / ".metadata").unlink()
    step.start("write_steps", run)
    assert step.codes() == [0, 0]
    log = run.launcher_log.read_text()
    assert "removed step-10" in log
    assert "removed step-15" in log
    assert "goes on from step 5; step 10 was saved and is gone" in log

    step.end()
    shutil.rmtree(place.parent)
    run.set_state("queued")
    step.start("write_steps", run, restarts=1)
    assert step.tasks[0].wait(timeout=60) == 1
    status = run.status()
    assert (status.state, attempts(run)[-1]["reason"]) == ("failed", "bad_configuration")
    assert f"{place}: {run.name} has saved step 10 there" in status.error["message"]
    assert "requeue" not in step.asked()


def test_a_controller_that_is_away_is_asked_again(step, tmp_path):
    """And at once when Slurm ends the job: it is back then."""
    [run] = make_runs(tmp_path / "runs", on_slurm(requeue=True))
    (step.place / "away").touch()
    step.start("crash_on_1", run)
    step.tasks[1].wait(timeout=60)
    step.signal(signal.SIGTERM, 0)
    until(lambda: "Unexpected message received; it is asked again" in run.launcher_log.read_text())
    assert run.status().state == "queued"
    (step.place / "away").unlink()
    step.signal(signal.SIGTERM, 0)
    until(lambda: run.launcher_log.read_text().endswith(" requeued\n"))
    assert step.asked().count("requeue 77") >= 2
    assert run.status().state == "queued"


@pytest.mark.parametrize(("ends_in", "asked"), [(30, 1), (-100, 1), (None, 3)])
def test_it_is_asked_again_only_while_the_job_has_time(step, tmp_path, monkeypatch, ends_in, asked):
    (step.place / "away").touch()
    monkeypatch.setenv("PATH", f"{step.place}:{os.environ['PATH']}")
    monkeypatch.setenv("EUROPA_FAKE", str(step.place))
    ends = {} if ends_in is None else {"SLURM_JOB_END_TIME": str(int(time.time()) + ends_in)}
    pauses, said = [], []

    def pause(seconds):
        pauses.append(seconds)
        if len(pauses) == 2:
            (step.place / "away").rename(step.place / "refuse")

    trouble = slurm_task.requeue(Task.here(variables(0, 2) | ends), pause=pause, say=said.append)
    assert step.asked().count("requeue 77") == asked
    assert ("presently disabled" if asked == 3 else "Unexpected message") in trouble
    assert len(said) == (1 if asked == 3 else 0)


def test_where_slurm_refuses_the_run_has_failed(step, tmp_path):
    [run] = make_runs(tmp_path / "runs", on_slurm(requeue=True))
    (step.place / "refuse").touch()
    step.start("crash_on_1", run)
    step.tasks[1].wait(timeout=60)
    step.signal(signal.SIGTERM, 0)
    assert step.tasks[0].wait(timeout=60) == 128 + signal.SIGSEGV
    assert run.status().state == "failed"
    assert "presently disabled" in run.status().extra["reason"]


def test_a_first_task_that_looks_late_does_not_take_a_failure_for_a_cancellation(step, tmp_path):
    [run] = make_runs(tmp_path / "runs", on_slurm())
    step.start("exit_7_on_1", run)
    assert step.tasks[1].wait(timeout=60) == 7
    over = "JobState=COMPLETING Reason=NonZeroExitCode Restarts=0 PreemptTime=None RunTime=00:00:10 TimeLimit=01:00:00"
    (step.place / "job").write_text(over)
    step.signal(signal.SIGTERM, 0)
    assert step.tasks[0].wait(timeout=60) == 7
    assert (run.status().state, run.status().error["rank"]) == ("failed", 1)


def test_slurm_may_be_faster_with_the_requeue(step, tmp_path):
    [run] = make_runs(tmp_path / "runs", on_slurm(requeue=True))
    (step.place / "refuse").touch()
    (step.place / "job").write_text(RUNNING.replace("Restarts=0", "Restarts=1"))
    step.start("stop_when_asked", run)
    up(run)
    step.signal(signal.SIGUSR2)
    until(lambda: "requeue 77" in step.asked() and "requeued" in run.launcher_log.read_text())
    assert run.status().state == "queued"
    assert [task.poll() for task in step.tasks] == [None, None]


@pytest.mark.parametrize("who", [0, 1])
def test_ranks_that_were_asked_to_stop_start_again(step, tmp_path, who):
    [run] = make_runs(tmp_path / "runs", on_slurm(requeue=True))
    (step.place / "job").write_text(OVERTIME)
    step.start("save_when_asked", run)
    up(run)
    step.signal(signal.SIGUSR2, who)
    until(lambda: "requeue 77" in step.asked())
    assert run.status().state == "queued"
    assert attempts(run)[0]["reason"] == "time_limit"
    assert [task.poll() for task in step.tasks] == [None, None], "no task ends before Slurm kills it"


def test_a_time_limit_ends_a_run_that_would_begin_again_with_nothing(step, tmp_path):
    """Of a job with two runs the second had only what the first left it of the time: it starts again, and then it is judged."""
    (step.place / "job").write_text(OVERTIME)
    [alone] = make_runs(tmp_path / "alone", on_slurm(requeue=True))
    step.start("stop_when_asked", alone)
    up(alone)
    step.signal(signal.SIGUSR2)
    assert step.codes() == [STOPPED, STOPPED]
    status = alone.status()
    assert (status.state, attempts(alone)[0]["reason"]) == ("failed", "time_limit")
    assert "training.checkpoint_every=0: it would begin again and end again" in status.error["message"]
    assert "requeue" not in step.asked()

    step.end()
    late = on_slurm(requeue=True)
    late.training.seed = 13
    first, second = make_runs(tmp_path / "both", on_slurm(requeue=True), late)
    step.start("stop_unless_first", first, second)
    up(second)
    step.signal(signal.SIGUSR2)
    until(lambda: "requeue 77" in step.asked())
    assert [str(run.status().state) for run in (first, second)] == ["completed", "queued"]
    step.end()
    for name in ("asked", "up_0", "up_1"):
        (second.path / name).unlink()
    step.start("stop_unless_first", first, second, restarts=1)
    up(second)
    step.signal(signal.SIGUSR2)
    assert step.codes() == [STOPPED, STOPPED]
    assert second.status().state == "failed"


def test_a_checkpoint_of_an_earlier_attempt_does_not_count_for_this_one(step, tmp_path):
    (step.place / "job").write_text(OVERTIME)
    saving = on_slurm(requeue=True)
    saving.training.checkpoint_every = 5
    [run] = make_runs(tmp_path / "runs", saving)
    (run.checkpoints / "step-5").mkdir(parents=True)
    (run.checkpoints / "step-5" / ".metadata").touch()
    checkpoints.note_saved(run, 5)
    step.start("stop_when_asked", run)
    up(run)
    step.signal(signal.SIGUSR2)
    assert step.codes() == [STOPPED, STOPPED]
    assert "no checkpoint was saved since step 5" in run.status().error["message"]


def test_without_requeue_the_next_job_of_a_chain_goes_on(step, tmp_path):
    chained, alone = make_runs(tmp_path / "runs", on_slurm(), on_slurm())
    chained.note(job_id="78", job_ids=["77", "78"])
    for run, state in ((chained, "queued"), (alone, "failed")):
        step.start("stop_when_asked", run)
        up(run)
        step.signal(signal.SIGUSR2)
        assert step.tasks[0].wait(timeout=60) == STOPPED
        assert run.status().state == state
        step.end()
    assert "requeue" not in step.asked()
    assert "scancel" not in step.asked(), "the next job has something to do"
    assert alone.status().extra["reason"] == "asked: cluster.requeue=false, and no job follows this one"
    [listed] = survey([alone]).standings
    assert listed.note == alone.status().extra["reason"], "the reason is told once"


def test_what_is_over_takes_the_rest_of_its_chain_out_of_the_queue(step, tmp_path):
    """Of the job's two runs the first is done long before the second, which the rest of the chain may have to continue."""
    first, second = make_runs(tmp_path / "runs", on_slurm(), on_slurm())
    for run in (first, second):
        run.note(job_id="76", job_ids=["76", "77", "78", "79"])
    first.set_state("completed")
    step.start("wait_for_go", first, second)
    up(second)
    assert "scancel" not in step.asked()
    (second.path / "go").touch()
    assert step.codes() == [0, 0]
    assert step.asked().splitlines() == ["scancel 78 79"], "by one task, once"
    step.end()
    # The next one may have begun before that: it has nothing to do, and says so as well.
    step.start("write_steps", first, second, job=78)
    assert step.codes() == [0, 0]
    assert step.asked().splitlines()[1:] == ["scancel 79"]


@pytest.mark.parametrize(
    ("says", "state", "reason"),
    [
        (
            "JobState=COMPLETING Restarts=0 PreemptTime=None RunTime=00:00:10 TimeLimit=01:00:00",
            "cancelled",
            "cancelled",
        ),
        (
            "JobState=COMPLETING Restarts=1 PreemptTime=None RunTime=00:00:10 TimeLimit=01:00:00",
            "queued",
            "requeued",
        ),
        (
            "JobState=COMPLETING Restarts=1 PreemptTime=2026-11-29T16:58:49 RunTime=00:00:10 TimeLimit=01:00:00",
            "queued",
            "preemption",
        ),
    ],
)
def test_what_sigterm_means_is_asked_of_slurm(step, tmp_path, says, state, reason):
    [run] = make_runs(tmp_path / "runs", on_slurm(requeue=True))
    step.start("sleep_for_ever", run)
    up(run)
    (step.place / "job").write_text(says)
    step.signal(signal.SIGTERM)
    until(lambda: run.status().state == state)
    assert attempts(run)[0]["reason"] == reason
    assert "requeue 77" not in step.asked()
    if state == "cancelled":
        assert all(code != 0 for code in step.codes())


def test_a_job_that_starts_twice_does_not_run_what_is_done(step, tmp_path):
    done, cancelled, left = make_runs(tmp_path / "runs", *[on_slurm()] * 3)
    step.start("write_steps", done)
    assert step.codes() == [0, 0]
    cancelled.set_state("cancelled")
    step.end()
    step.start("write_steps", done, cancelled, left, restarts=1)
    assert step.codes() == [0, 0]
    assert [len(attempts(run)) for run in (done, cancelled, left)] == [1, 0, 1]
    assert [str(run.status().state) for run in (done, cancelled, left)] == [
        "completed",
        "cancelled",
        "completed",
    ]


@pytest.mark.parametrize("failed_at", [0, 1])
def test_a_job_of_a_run_that_failed_before_is_no_success(step, tmp_path, failed_at):
    """Whether it comes before or after the one that this start works on: that one is done undisturbed."""
    runs = make_runs(tmp_path / "runs", on_slurm(), on_slurm())
    runs[failed_at].set_state("failed")
    live = runs[1 - failed_at]
    step.start("wait_for_go", *runs, restarts=1)
    up(live)
    (live.path / "go").touch()
    assert step.codes() == [1, 1]
    assert [str(run.status().state) for run in (runs[failed_at], live)] == ["failed", "completed"]
    step.end()
    step.start("write_steps", *runs, restarts=2)
    assert step.codes() == [1, 1]


def test_one_bad_point_of_a_job_leaves_the_others(step, tmp_path):
    good, bad = on_slurm(), on_slurm()
    bad.training.seed = 13
    runs = make_runs(tmp_path / "runs", good, bad, good)
    step.start("fail_when_marked", *runs)
    assert all(code == 1 for code in step.codes())
    assert [str(run.status().state) for run in runs] == ["completed", "failed", "completed"]
    assert runs[1].status().error["message"] == "unlucky seed"


def test_slurm_can_not_start_a_run_for_ever(step, tmp_path):
    [run] = make_runs(tmp_path / "runs", on_slurm(max_attempts=1))
    for restarts in range(3):
        step.end()
        run.set_state("queued")
        step.start("exit_7_on_1" if restarts < 2 else "write_steps", run, restarts=restarts)
        step.tasks[1].wait(timeout=60)
        step.signal(signal.SIGTERM, 0)
        step.tasks[0].wait(timeout=60)
    assert run.status().state == "failed"
    assert "attempt 3" in run.status().error["message"]


def test_a_memory_floor_names_all_nodes_and_avoids_them(step, tmp_path):
    [run] = make_runs(tmp_path / "runs", on_slurm(requeue=True, memory_floor_gib=10.0**6))
    step.start("write_steps", run)
    step.tasks[1].wait(timeout=60)
    until(lambda: "update JobId=77 ExcNodeList=127.0.0.1\n" in step.asked())
    asked = step.asked().splitlines()
    assert asked.index("requeue 77") < asked.index("update JobId=77 ExcNodeList=127.0.0.1"), asked
    entries = json.loads(slurm_exclude.place_of(run).read_text())
    assert [entry["node"] for entry in entries] == ["127.0.0.1"]
    assert attempts(run)[0]["reason"] == "memory_floor"


def test_what_is_asked_of_slurm_outlives_the_step_that_it_ends(step, tmp_path):
    """SIGTERM comes to every process of a step that Slurm ends or starts again, so also to the commands that ask Slurm."""
    [run] = make_runs(tmp_path / "runs", on_slurm(requeue=True, memory_floor_gib=10.0**6))
    (step.place / "ending").touch()
    step.start("write_steps", run)
    until(lambda: "update JobId=77 ExcNodeList=127.0.0.1" in step.asked())
    assert "does not" not in run.launcher_log.read_text()


def test_a_memory_floor_in_a_chain_keeps_the_next_job_away(step, tmp_path):
    [run] = make_runs(tmp_path / "runs", on_slurm(memory_floor_gib=10.0**6))
    run.note(job_id="79", job_ids=["77", "78", "79"])
    step.start("write_steps", run)
    assert step.tasks[0].wait(timeout=60) == STOPPED
    assert "update JobId=78 ExcNodeList=127.0.0.1" in step.asked()
    assert run.status().state == "queued"
