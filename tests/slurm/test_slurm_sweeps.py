"""Sweeps on a real Slurm: arrays, what one failing point costs, chunks, many ranks."""

from __future__ import annotations

import json
import re
import statistics

import pytest
from submitting import SITE, config, europa, evidence, launch, states, submit

from europa_exp.runs.folder import RunFolder, list_runs

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(300)]


def array_ids(runs_dir) -> list[str]:
    """The Slurm number of each run, in the order of the runs."""
    return [RunFolder(runs_dir / f"run{i}").status().extra["job_id"] for i in range(len(states(runs_dir)))]


def test_a_sweep_trains_and_compares(slurm, tmp_path):
    done = launch(
        slurm,
        tmp_path,
        "-m",
        *SITE,
        "cluster.time_limit='00:04:00'",
        "comm=bf16,fp8",
        "training.seed=1,2",
        "training.steps=4",
        "launch.throttle=2",
        "launch.sweep_name=ladder",
    )
    assert done.returncode == 0, done.stdout + done.stderr + evidence(tmp_path / "runs")
    runs = list_runs(tmp_path / "runs")
    assert set(states(tmp_path / "runs").values()) == {"completed"}
    assert len(runs) == 4
    jobs = [run.status().extra["job_id"] for run in runs]
    assert len({job.partition("_")[0] for job in jobs}) == 1, "one array for the sweep"
    assert {job.partition("_")[2] for job in jobs} == {"0", "1", "2", "3"}
    [script] = {p.read_text() for p in (tmp_path / "runs").glob(".submitit/**/*submission*.sh")}
    assert re.search(r"^#SBATCH --array=0-3%2$", script, re.M)
    for run in runs:
        assert [row["step"] for row in run.metrics()] == [1, 2, 3, 4]
        assert run.runtime()["world_size"] == 4
    compared = europa(slurm, tmp_path, "compare", "--sweep", "ladder", "--format", "json")
    assert compared.returncode == 0, compared.stderr
    rows = json.loads(compared.stdout)["rows"]
    assert sorted(row["fields"]["comm.expert_all_gather"] for row in rows) == ["bf16", "fp8"]
    assert [len(row["runs"]) for row in rows] == [2, 2], "seeds are repeats"
    status = europa(slurm, tmp_path, "status", "--sweep", "ladder")
    assert status.returncode == 0, status.stdout + status.stderr
    assert status.stdout.count("completed") >= 4


def test_384_ranks_on_96_nodes(start_slurm, tmp_path):
    slurm = start_slurm(nodes=96)
    cfg = config(96, 4, "cluster.cpus_per_task=4", "cluster.numa_binding=cpu_and_memory", "training.steps=1")
    code, out = submit(slurm, tmp_path / "runs", "slurm_targets:report_environment", [cfg])
    run = tmp_path / "runs" / "run0"
    assert code == 0, out + evidence(tmp_path / "runs")
    # A run is over with its rank 0, the others may take a moment longer.
    slurm.wait_until_over(RunFolder(run).status().extra["job_id"])
    assert len(list((tmp_path / "runs").glob(".submitit/*/*"))) < 10, "no file for each rank"
    ranks = [json.loads(path.read_text()) for path in (run / "ranks").glob("*.json")]
    assert len(ranks) == 384
    assert {int(rank["RANK"]) for rank in ranks} == set(range(384))
    assert all(rank["RANK"] == rank["SLURM_PROCID"] for rank in ranks)
    assert len({(rank["SLURMD_NODENAME"], rank["LOCAL_RANK"]) for rank in ranks}) == 384
    assert {rank["LOCAL_RANK"] for rank in ranks} == {"0", "1", "2", "3"}
    assert {rank["WORLD_SIZE"] for rank in ranks} == {"384"}
    assert len({rank["pid"] for rank in ranks}) == 384
    [address] = {rank["MASTER_ADDR"] for rank in ranks}
    [zero] = [rank for rank in ranks if rank["RANK"] == "0"]
    assert address == zero["SLURMD_NODENAME"]
    assert len({rank["MASTER_PORT"] for rank in ranks}) == 1
    assert {rank["SLURM_CPUS_PER_TASK"] for rank in ranks} == {"4"}, "srun was told as well"
    # Two idle cores have 120 s of CPU time in a minute, for all ranks and for Slurm. What a rank takes hardly depends on load.
    used = [json.loads(rank["cpu"]) for rank in ranks]
    assert statistics.median(u["user"] + u["system"] for u in used) < 0.25, (
        "a rank imports too much before its training"
    )
    # Each rank asks for the NUMA node of its number. This machine may not have as many: then it is told so.
    for rank in ranks:
        assert re.search(rf"\bnode {rank['LOCAL_RANK']}\b", rank["EUROPA_NUMA"]), rank["EUROPA_NUMA"]


def test_one_of_ten_points_crashes(slurm, tmp_path):
    configs = [config(1, 2, f"training.seed={10 + i}") for i in range(10)]
    code, out = submit(slurm, tmp_path / "runs", "slurm_targets:fail_when_marked", configs)
    assert code == 1, out + evidence(tmp_path / "runs")
    found = states(tmp_path / "runs")
    assert found.pop("run3") == "failed"
    assert found == {f"run{i}": "completed" for i in range(10) if i != 3}
    for name in found:
        assert len(RunFolder(tmp_path / "runs" / name).metrics()) == 16
    job = RunFolder(tmp_path / "runs" / "run3").status().extra["job_id"]
    assert slurm.wait_until_over(job)[job] == "FAILED"
    assert "9 completed" in out
    why = europa(slurm, tmp_path, "why", "run3")
    assert "unlucky seed 13" in why.stdout, why.stdout + why.stderr
    assert "rank 1" in why.stdout


def test_more_points_than_an_array_takes(start_slurm, tmp_path):
    slurm = start_slurm(nodes=4, MAX_ARRAY_SIZE=11)
    configs = [config(1, 1, f"training.seed={i}", "training.steps=1") for i in range(25)]
    code, out = submit(slurm, tmp_path / "runs", "slurm_targets:write_steps", configs)
    assert code == 0, out + evidence(tmp_path / "runs")
    assert states(tmp_path / "runs") == {f"run{i}": "completed" for i in range(25)}
    jobs = array_ids(tmp_path / "runs")
    assert len(set(jobs)) == 25
    arrays = [job.partition("_")[0] for job in jobs]
    assert len(set(arrays)) == 3
    assert max(arrays.count(array) for array in arrays) <= 11
    for i in range(25):
        [row] = RunFolder(tmp_path / "runs" / f"run{i}").metrics()
        assert row["training/seed"] == i


def most_at_once(runs_dir) -> int:
    """The most runs whose ranks were at work at the same moment."""
    lines = [line for path in runs_dir.glob("run*/times") for line in path.read_text().splitlines()]
    spans = [tuple(map(float, line.split())) for line in lines]
    return max(sum(begin <= moment < end for begin, end in spans) for moment, _ in spans)


def test_the_throttle_holds_for_all_arrays_of_a_sweep(start_slurm, tmp_path):
    """25 points in three arrays, one of them started twice, and three of another shape: never more than two at once."""
    slurm = start_slurm(nodes=4, MAX_ARRAY_SIZE=11)
    steps, throttle = "training.steps=1", "launch.throttle=2"
    again = ("cluster.requeue=true", "cluster.max_attempts=2")
    configs = [config(1, 1, f"training.seed={i}", steps, throttle, *again) for i in range(25)]
    other = [config(2, 1, f"training.seed={i}", steps, throttle, *again) for i in range(30, 33)]
    code, out = submit(slurm, tmp_path / "runs", "slurm_targets:take_a_second", [*configs, *other])
    assert code == 0, out + evidence(tmp_path / "runs")
    assert set(states(tmp_path / "runs").values()) == {"completed"}
    assert "launch.throttle=2 holds for the whole sweep: its 4 arrays run in 4 turns" in out
    assert len({job.partition("_")[0] for job in array_ids(tmp_path / "runs")}) == 4
    assert len((tmp_path / "runs" / "run7" / "times").read_text().splitlines()) == 2
    assert most_at_once(tmp_path / "runs") == 2
