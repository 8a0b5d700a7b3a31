"""Handing runs to a real Slurm: refusals, broken submissions, calls typed twice, several points in one job."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections import Counter
from pathlib import Path

import pytest
from clusters import ROOT, until
from submitting import config, europa, finish, start, states, submit

from europa_exp.launch import snapshot
from europa_exp.runs.folder import RunFolder

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(300)]

STAY = "dispatch_targets:wait_for_go"
DETACHED = "launch.detach=true"


@pytest.fixture
def code(tmp_path) -> Path:
    """The code of this moment: whether a call is identical must not depend on somebody who edits the checkout meanwhile."""
    return snapshot.freeze(ROOT, tmp_path / "frozen" / ".code")


def configs(n: int, *overrides: str) -> list:
    return [config(1, 2, f"training.seed={seed}", *overrides) for seed in range(1, n + 1)]


def jobs(runs_dir: Path) -> dict[str, str]:
    return {name: str(RunFolder(runs_dir / name).status().extra.get("job_id")) for name in states(runs_dir)}


def record(runs_dir: Path) -> dict:
    return json.loads((runs_dir / ".sweeps" / "s.json").read_text())


def go(runs_dir: Path, n: int) -> None:
    """Let the waiting runs end, and wait for it."""
    (runs_dir.parent / "go").touch()
    until(lambda: Counter(states(runs_dir).values())["completed"] == n, 100, lambda: states(runs_dir))


def test_a_refusal_halfway_is_completed_by_the_same_call(slurm, tmp_path, code):
    runs_dir = tmp_path / "runs"
    good, bad = configs(4), configs(4)
    for cfg in bad[2:]:
        cfg.cluster.partition = "nonsense"  # not part of the identity: the call below asks for the same runs
    exit_code, out = submit(slurm, runs_dir, STAY, bad, root=code)
    assert exit_code == 1
    assert "Slurm refused job 2 of 2 (run2 and 1 more; 1 x 2 ranks)" in out
    assert "Invalid partition name specified" in out
    assert "2 runs of 4 not submitted" in out
    assert "europa cancel --sweep s" in out
    assert sorted(states(runs_dir)) == ["run0", "run1"]
    assert len(record(runs_dir)["unfinished"]) == 1
    before = jobs(runs_dir)

    for cfg in good:
        cfg.launch.detach = True
    exit_code, out = submit(slurm, runs_dir, STAY, good, root=code)
    assert exit_code == 0, out
    assert out.count("already submitted: run") == 2
    after = jobs(runs_dir)
    assert {name: after[name] for name in before} == before
    assert sorted(after) == ["run0", "run1", "run2", "run3"]
    assert sorted(slurm.queue()) == sorted(after.values())
    assert record(runs_dir)["unfinished"] == []
    assert {name: entry["job_id"] for name, entry in record(runs_dir)["runs"].items()} == after

    exit_code, out = submit(slurm, runs_dir, STAY, good, root=code)
    assert exit_code == 0
    assert out.count("already submitted: run") == 4
    assert len(slurm.queue()) == 4
    go(runs_dir, 4)


def test_a_refusal_of_everything_leaves_no_run(slurm, tmp_path):
    exit_code, out = submit(slurm, tmp_path / "runs", STAY, configs(3, "cluster.partition=nonsense"))
    assert exit_code == 1
    assert "Slurm refused the job (run0 and 2 more; 1 x 2 ranks): " in out
    assert "Nothing was submitted" in out
    assert "Traceback" not in out
    assert states(tmp_path / "runs") == {}
    assert not (tmp_path / "runs" / ".sweeps" / "s.json").exists()
    assert not list((tmp_path / "runs" / ".submitit").iterdir())


def without(tmp_path: Path, *commands: str) -> str:
    """A PATH on which Slurm's commands are missing."""
    folder = tmp_path / "bin"
    folder.mkdir(exist_ok=True)
    for name in ("git", "bash", "env"):
        target = shutil.which(name)
        if target and name not in commands and not (folder / name).exists():
            os.symlink(target, folder / name)
    return str(folder)


def test_no_sbatch_on_this_machine(slurm, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv("PATH", without(tmp_path, "sbatch"))
        process = start(slurm, tmp_path / "runs", STAY, configs(1))
        out = finish(process)
    assert process.returncode == 1
    assert "there is no sbatch on this machine" in out
    assert states(tmp_path / "runs") == {}


def test_arrays_are_cut_to_size_and_all_run(slurm, tmp_path):
    runs_dir = tmp_path / "runs"
    exit_code, out = submit(
        slurm, runs_dir, "dispatch_targets:count_starts", configs(5, "launch.max_array_size=2")
    )
    assert exit_code == 0, out
    assert set(states(runs_dir).values()) == {"completed"}
    assert sorted(Counter(job.partition("_")[0] for job in jobs(runs_dir).values()).values()) == [1, 2, 2]
    assert all(len((runs_dir / name / "starts").read_text().splitlines()) == 1 for name in states(runs_dir))


def test_several_points_in_one_job(slurm, tmp_path):
    runs_dir = tmp_path / "runs"
    exit_code, out = submit(
        slurm, runs_dir, "dispatch_targets:count_starts", configs(3, "launch.points_per_job=2")
    )
    assert exit_code == 0, out
    assert set(states(runs_dir).values()) == {"completed"}
    starts = {name: (runs_dir / name / "starts").read_text().split() for name in states(runs_dir)}
    assert starts["run0"][:2] == starts["run1"][:2], "the same job, the same node"
    assert starts["run2"][0] != starts["run0"][0]
    assert float(starts["run0"][2]) < float(starts["run1"][2])


def test_shapes_do_not_mix(slurm, tmp_path):
    runs_dir = tmp_path / "runs"
    small, large = config(1, 2), config(2, 2)
    exit_code, out = submit(slurm, runs_dir, "slurm_targets:write_steps", [small, large])
    assert exit_code == 0, out
    assert len(set(jobs(runs_dir).values())) == 2


def test_dependency(slurm, tmp_path):
    script = tmp_path / "first.sh"
    script.write_text("#!/bin/bash\nwhile [ ! -e go_first ]; do sleep 0.2; done\n")
    first = slurm.run(
        "sbatch", "--parsable", f"--chdir={tmp_path}", "--output=/dev/null", str(script)
    ).strip()
    runs_dir = tmp_path / "runs"
    exit_code, out = submit(
        slurm,
        runs_dir,
        "slurm_targets:write_steps",
        configs(1, f"launch.dependency='afterok:{first}'", DETACHED),
    )
    assert exit_code == 0, out
    [job] = jobs(runs_dir).values()
    until(lambda: slurm.job(job)["Reason"] == "Dependency")
    (tmp_path / "go_first").touch()
    until(lambda: states(runs_dir) == {"run0": "completed"}, 60, lambda: slurm.run("squeue"))


def sbatch_that(tmp_path: Path, text: str) -> str:
    """A PATH whose sbatch does something more than Slurm's."""
    folder = tmp_path / "wrapped"
    folder.mkdir()
    (folder / "sbatch").write_text(f"#!/bin/bash\nreal={shutil.which('sbatch')}\n{text}\n")
    (folder / "sbatch").chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def test_a_command_that_dies_while_submitting(slurm, tmp_path, code, monkeypatch):
    """Slurm has the jobs, and nobody was there to hear it: the second call must not double them."""
    runs_dir = tmp_path / "runs"
    with monkeypatch.context() as patch:
        patch.setenv("PATH", sbatch_that(tmp_path, f"$real $@ > {tmp_path}/heard; sleep 60"))
        process = start(slurm, runs_dir, STAY, configs(2, DETACHED), root=code)
    until(lambda: (tmp_path / "heard").exists() and "job" in (tmp_path / "heard").read_text())
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert set(states(runs_dir).values()) == {"queued"}
    lost = (tmp_path / "heard").read_text().split()[-1]

    exit_code, out = submit(slurm, runs_dir, STAY, configs(2, DETACHED), root=code)
    assert exit_code == 0, out
    assert sorted(states(runs_dir)) == ["run0", "run1"]
    until(lambda: not any(job.startswith(lost) for job in slurm.queue()), 30, slurm.queue)
    assert sorted(slurm.queue()) == sorted(jobs(runs_dir).values())
    go(runs_dir, 2)


def test_ctrl_c_while_submitting(slurm, tmp_path, code, monkeypatch):
    """The terminal's signal ends the second sbatch as well; what the first one submitted stays."""
    runs_dir = tmp_path / "runs"
    cut = (DETACHED, "launch.max_array_size=2")
    mark = tmp_path / "mark"
    with monkeypatch.context() as patch:
        patch.setenv(
            "PATH",
            sbatch_that(tmp_path, f"[ -e {mark} ] && touch {mark}2 && sleep 60\ntouch {mark}\nexec $real $@"),
        )
        process = start(slurm, runs_dir, STAY, configs(3, *cut), root=code)
    until(lambda: (tmp_path / "mark2").exists())
    os.killpg(process.pid, signal.SIGINT)
    out = finish(process)
    assert process.returncode == 130, out
    assert "1 run of 3 not submitted" in out
    before = jobs(runs_dir)
    assert sorted(before) == ["run0", "run1"]
    assert sorted(slurm.queue()) == sorted(before.values())
    exit_code, out = submit(slurm, runs_dir, STAY, configs(3, *cut), root=code)
    assert exit_code == 0, out
    assert sorted(states(runs_dir)) == ["run0", "run1", "run2"]
    assert sorted(slurm.queue()) == sorted(jobs(runs_dir).values())
    go(runs_dir, 3)


def test_a_command_that_dies_after_submitting(slurm, tmp_path, code):
    """What submitit left tells which jobs there are, even if no record was written after Slurm's answer."""
    runs_dir = tmp_path / "runs"
    exit_code, out = submit(slurm, runs_dir, STAY, configs(2, DETACHED), root=code)
    assert exit_code == 0, out
    before = jobs(runs_dir)
    for name in before:
        RunFolder(runs_dir / name).note(job_id=None, job_ids=[])
    exit_code, out = submit(slurm, runs_dir, STAY, configs(2, DETACHED), root=code)
    assert exit_code == 0, out
    assert all(f"already submitted: {name}, job {job}" in out for name, job in before.items())
    assert sorted(slurm.queue()) == sorted(before.values())
    go(runs_dir, 2)


def test_dead_runs_are_submitted_again_in_their_folder(slurm, tmp_path, code):
    runs_dir = tmp_path / "runs"
    held = "+cluster.sbatch_args.begin='now+1hour'"
    exit_code, out = submit(slurm, runs_dir, STAY, configs(2, DETACHED, held), root=code)
    assert exit_code == 0, out
    before = jobs(runs_dir)
    slurm.run("scancel", before["run1"])
    until(lambda: before["run1"] not in slurm.queue())
    assert states(runs_dir) == {"run0": "queued", "run1": "queued"}, "nobody was there to record it"
    exit_code, out = submit(slurm, runs_dir, STAY, configs(2, DETACHED), root=code)
    assert exit_code == 0, out
    assert f"already submitted: run0, job {before['run0']}" in out
    assert f"submitted again: run1, queued, but its job {before['run1']} is gone: " in out, (
        out
    )  # sacct may be late
    after = jobs(runs_dir)
    assert sorted(after) == ["run0", "run1"]
    assert after["run0"] == before["run0"]
    assert after["run1"] != before["run1"]


def test_force_submits_again_beside_a_living_run(slurm, tmp_path, code):
    runs_dir = tmp_path / "runs"
    assert submit(slurm, runs_dir, STAY, configs(1, DETACHED), root=code)[0] == 0
    exit_code, out = submit(slurm, runs_dir, STAY, configs(1, DETACHED, "launch.force=true"), root=code)
    assert exit_code == 0, out
    assert sorted(states(runs_dir)) == ["run0", "run0-r2"]
    assert len(slurm.queue()) == 2
    go(runs_dir, 2)


def test_a_slurm_that_does_not_answer_is_not_taken_for_an_empty_one(slurm, tmp_path, code):
    runs_dir = tmp_path / "runs"
    assert submit(slurm, runs_dir, STAY, configs(1, DETACHED), root=code)[0] == 0
    # A job whose srun does not reach the controller would end at once.
    until(lambda: (runs_dir / "run0" / "up_0").exists(), 120, lambda: slurm.run("squeue"))
    slurm.script("kill-dbd")
    slurm.script("stop-controller")
    exit_code, out = submit(slurm, runs_dir, STAY, configs(1, DETACHED), root=code)
    assert exit_code == 1
    assert "Slurm does not answer" in out
    assert "nothing was submitted" in out
    assert sorted(states(runs_dir)) == ["run0"]
    slurm.script("start-dbd")
    slurm.script("start-controller")
    exit_code, out = submit(slurm, runs_dir, STAY, configs(1, DETACHED), root=code)
    assert exit_code == 0
    assert "already submitted: run0" in out
    go(runs_dir, 1)


def test_ctrl_c_asks_nothing_of_the_runs(slurm, tmp_path):
    runs_dir = tmp_path / "runs"
    process = start(slurm, runs_dir, STAY, configs(2))
    until(lambda: (runs_dir / "run0" / "up_0").exists(), 60, lambda: slurm.run("squeue"))
    os.killpg(process.pid, signal.SIGINT)
    out = finish(process)
    assert process.returncode == 130, out
    assert "2 of 2 runs go on" in out
    assert "europa cancel --sweep s" in out
    assert len(slurm.queue()) == 2
    go(runs_dir, 2)


def test_the_same_call_follows_again(slurm, tmp_path, code):
    runs_dir = tmp_path / "runs"
    assert submit(slurm, runs_dir, STAY, configs(2, DETACHED), root=code)[0] == 0
    process = start(slurm, runs_dir, STAY, configs(2), root=code)
    said = ""
    for line in process.stdout:
        said += line
        if "already submitted: run0" in line:
            break
    (tmp_path / "go").touch()
    out = finish(process)
    assert process.returncode == 0, said + out
    assert "already submitted: run0" in said
    assert "2 completed" in out


def test_a_run_whose_job_vanishes_ends_the_watching(slurm, tmp_path):
    """Cancelled in the queue, a run has nobody who could write that down but the one who watches."""
    runs_dir = tmp_path / "runs"
    process = start(slurm, runs_dir, STAY, configs(1, "+cluster.sbatch_args.begin='now+1hour'"))
    until(lambda: states(runs_dir) and jobs(runs_dir).get("run0") not in (None, "None"), 60)
    slurm.run("scancel", jobs(runs_dir)["run0"])
    out = finish(process)
    assert process.returncode == 1
    assert states(runs_dir) == {"run0": "cancelled"}
    assert "1 cancelled" in out


def test_a_chain_continues_where_slurm_may_not_requeue(slurm, tmp_path):
    runs_dir = tmp_path / "runs"
    chained = ("cluster.requeue=false", "cluster.max_attempts=2")
    exit_code, out = submit(slurm, runs_dir, "dispatch_targets:crash_at_first", configs(2, *chained))
    assert exit_code == 0, out
    assert set(states(runs_dir).values()) == {"completed"}
    for name in states(runs_dir):
        status = RunFolder(runs_dir / name).status()
        assert [a["job_id"] for a in status.extra["attempts"]] == status.extra["job_ids"]
    # A chain whose first job was a success leaves the queue without having run, and the array behind it starts.
    turns = ("launch.throttle=2", "launch.max_array_size=2")
    exit_code, out = submit(
        slurm, tmp_path / "other", "dispatch_targets:count_starts", configs(3, *chained, *turns)
    )
    assert exit_code == 0, out
    assert "its 2 arrays run in 2 turns" in out
    until(lambda: not slurm.queue(), 200, slurm.queue)
    for run in (RunFolder(p) for p in (tmp_path / "other").glob("run*")):
        assert len((run.path / "starts").read_text().splitlines()) == 1
        assert len(run.status().extra["job_ids"]) == 2


def test_of_a_chain_only_what_is_not_done_gets_nodes_again(slurm, tmp_path):
    """Three runs, one of which crashes once: of the second array only its task starts, of the third none."""
    runs_dir = tmp_path / "runs"
    chained = ("cluster.requeue=false", "cluster.max_attempts=3")
    exit_code, out = submit(slurm, runs_dir, "dispatch_targets:crash_seed_2_at_first", configs(3, *chained))
    assert exit_code == 0, out
    until(lambda: not slurm.queue(), 200, slurm.queue)
    found = {name: RunFolder(runs_dir / name).status() for name in states(runs_dir)}
    ids = {name: status.extra["job_ids"] for name, status in found.items()}
    assert {name: len(status.extra["attempts"]) for name, status in found.items()} == {
        "run0": 1,
        "run1": 2,
        "run2": 1,
    }
    # Of a job that ever had nodes there is output.
    place = Path(found["run0"].extra["job_folder"])
    began = {job for name in ids for job in ids[name] if list(place.glob(f"{job}_*_log.out"))}
    assert began == {ids["run0"][0], *ids["run1"][:2], ids["run2"][0]}, ids
    listed = europa(slurm, tmp_path, "status", "--runs-dir", str(runs_dir)).stdout
    assert all(ids[name][0] in listed for name in ("run0", "run2")), listed
    assert not any(job in listed for name in ids for job in ids[name][2:]), listed


def test_two_calls_at_once_do_not_double(slurm, tmp_path, code):
    runs_dir = tmp_path / "runs"
    both = [start(slurm, runs_dir, STAY, configs(3, DETACHED), root=code) for _ in range(2)]
    outs = [finish(process) for process in both]
    assert [process.returncode for process in both] == [0, 0], outs
    assert sorted(states(runs_dir)) == ["run0", "run1", "run2"]
    assert sorted(slurm.queue()) == sorted(jobs(runs_dir).values())
    go(runs_dir, 3)


def test_the_record_says_what_the_job_imports(slurm, tmp_path):
    assert submit(slurm, tmp_path / "a", STAY, configs(1, DETACHED))[0] == 0
    exit_code, out = submit(slurm, tmp_path / "b", STAY, configs(1, DETACHED, "launch.snapshot=true"))
    assert exit_code == 0, out
    [loose], [frozen] = ([*(tmp_path / name).glob("run*")] for name in "ab")
    assert RunFolder(loose).provenance()["imports"] == {"path": str(ROOT), "frozen": False}
    imports = RunFolder(frozen).provenance()["imports"]
    assert imports["frozen"]
    assert Path(imports["path"]).parent == tmp_path / "b" / ".code"
    [script] = (tmp_path / "b").glob(".submitit/*/*_submission.sh")
    assert f"PYTHONPATH={imports['path']}" in script.read_text()


def test_code_where_the_command_was_typed_is_not_imported(slurm, tmp_path):
    """As in the root of the checkout, which is edited while the job waits."""
    (tmp_path / "europa_exp").mkdir()
    (tmp_path / "europa_exp" / "__init__.py").write_text("raise RuntimeError('an edit')\n")
    exit_code, out = submit(slurm, tmp_path / "runs", "slurm_targets:write_steps", configs(1))
    assert exit_code == 0, out
