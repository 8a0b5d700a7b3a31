"""The job script on a real Slurm: sbatch takes it, ranks find what they need, exit codes come through."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from compose import composed

from europa_exp.launch import slurm as script

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

RANK = """
import json, os, sys
from pathlib import Path
print("from", os.environ["SLURM_PROCID"], file=sys.stderr)
(Path(sys.argv[1]) / (os.environ["SLURM_PROCID"] + ".json")).write_text(json.dumps(dict(os.environ)))
sys.exit(7 if os.environ["SLURM_PROCID"] == sys.argv[2] else 0)
"""


def ranks(tmp_path: Path, fail: str) -> str:
    """Something in Python's place that leaves each rank's environment; rank ``fail`` ends with 7."""
    (tmp_path / "rank.py").write_text(RANK)
    (tmp_path / "seen").mkdir()
    return f"{sys.executable} {tmp_path / 'rank.py'} {tmp_path / 'seen'} {fail}"


def text(tmp_path: Path, *overrides: str, **more) -> str:
    cfg = composed("cluster=slurm", *overrides)
    return script.script_text(cfg, cfg.launch, folder=tmp_path / "job", **more)


def submitted(cluster, tmp_path: Path, text: str, *options: str, **environ: str) -> str:
    (tmp_path / "job").mkdir(exist_ok=True)
    (tmp_path / "job.sh").write_text(text)
    return cluster.run("sbatch", *options, str(tmp_path / "job.sh"), **environ)


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("cluster.gres='gpu:2'", "cluster.cpus_per_task=2", "cluster.comment='CPU_POWER_CAP=1;THP=never'"),
        ("cluster.partition=main", "cluster.exclude='127.0.0.4'", "cluster.switches='1@00:01:00'", "cluster.mail_user=a@b.c",
         "cluster.mail_type=FAIL", "cluster.requeue=false", "++cluster.sbatch_args.exclusive='true'", "cluster.setup=[true]"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("n_jobs", [1, 3])
def test_slurm_takes_the_script(slurm, tmp_path, overrides, n_jobs):
    (tmp_path / "job.sh").write_text(text(tmp_path, *overrides, n_jobs=n_jobs))
    done = subprocess.run(
        ["sbatch", "--test-only", str(tmp_path / "job.sh")],
        env=slurm.environ(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"Job \d+ to start at", done.stderr)


def test_a_failing_rank_fails_the_job_and_every_rank_finds_its_environment(slurm, tmp_path):
    job = text(
        tmp_path,
        f"cluster.python='{ranks(tmp_path, fail='1')}'",
        "cluster.cpus_per_task=2",
        "cluster.numa_binding=cpu_and_memory",
        "++cluster.sbatch_args.wait_all_nodes='1'",
    )
    said = submitted(slurm, tmp_path, job, SECRET_API_KEY="verysecret")
    job_id = said.split()[-1]
    assert slurm.wait_until_over(job_id) == {job_id: "FAILED"}
    assert slurm.job(job_id)["ExitCode"] == "7:0"
    seen = [json.loads(f.read_text()) for f in (tmp_path / "seen").iterdir()]
    assert len(seen) >= 2  # --kill-on-bad-exit may be faster than the slowest rank
    for environ in seen:
        assert environ["SRUN_CPUS_PER_TASK"] == environ["SLURM_CPUS_PER_TASK"] == "2"
        assert environ["SLURM_NTASKS"] == "4"
        assert environ["SUBMITIT_EXECUTOR"] == "slurm"
        local = environ["SLURM_LOCALID"]
        assert re.match(
            rf"node {local}, cpu_and_memory|not bound to NUMA node {local}: ", environ["EUROPA_NUMA"]
        )
    batch = slurm.run("scontrol", "write", "batch_script", job_id, "-")
    assert batch.strip() == job.strip()
    assert "verysecret" not in batch


def test_success_is_success(slurm, tmp_path):
    job = text(tmp_path, f"cluster.python='{ranks(tmp_path, fail='none')}'")
    job_id = submitted(slurm, tmp_path, job).split()[-1]
    assert slurm.wait_until_over(job_id) == {job_id: "COMPLETED"}
    assert sorted(f.name for f in (tmp_path / "seen").iterdir()) == [f"{r}.json" for r in range(4)]
    out, err = f"{job_id}_0_log.out", f"{job_id}_0_log.err"
    assert sorted(f.name for f in (tmp_path / "job").iterdir()) == [err, out], "whatever the number of ranks"
    said = (tmp_path / "job" / err).read_text().splitlines()
    assert sorted(said) == [f"{rank}: from {rank}" for rank in range(4)]


def test_nothing_of_the_allocation_that_submits_gets_into_the_job(slurm, tmp_path):
    """sbatch typed inside an allocation: its variables win over the script unless they are left out."""
    job = text(tmp_path, f"cluster.python='{ranks(tmp_path, fail='none')}'")
    (tmp_path / "job").mkdir()
    (tmp_path / "job.sh").write_text(job)
    code = (
        "import subprocess, sys\n"
        "from europa_exp.launch.slurm import clean_environment\n"
        "with clean_environment():\n"
        f"    print(subprocess.check_output(['sbatch', '{tmp_path / 'job.sh'}'], text=True))\n"
    )
    leaks = {
        "SBATCH_PARTITION": "high",
        "SBATCH_TIMELIMIT": "5",
        "SLURM_NTASKS": "1",
        "SLURM_CPU_BIND": "none",
        "CUDA_VISIBLE_DEVICES": "7",
        "PMIX_RANK": "3",
        "PYTHONPATH": str(script.ROOT),
    }
    said = slurm.run(
        "salloc", "--quiet", "--nodes=1", "--ntasks-per-node=1", sys.executable, "-c", code, **leaks
    )
    job_id = said.split()[-1]
    slurm.wait_until_over(job_id)
    found = slurm.job(job_id)
    assert (found["Partition"], found["TimeLimit"], found["NumTasks"]) == ("main", "01:00:00", "4")
    seen = [json.loads(f.read_text()) for f in (tmp_path / "seen").iterdir()]
    assert len(seen) == 4
    for environ in seen:
        assert "PMIX_RANK" not in environ
        assert environ.get("CUDA_VISIBLE_DEVICES") != "7"
        assert environ["SLURM_NTASKS"] == "4"
        assert not [name for name in environ if name.startswith("SBATCH_")]


def test_the_environment_is_unpacked_on_every_node_before_ranks_start(slurm, tmp_path):
    (tmp_path / "env").mkdir()
    (tmp_path / "env/python").symlink_to(sys.executable)
    archive, place = tmp_path / "my env.tar.gz", tmp_path / "node's"
    subprocess.run(["tar", "-czf", archive, "-C", tmp_path, "env"], check=True)
    python = ranks(tmp_path, fail="none").replace(sys.executable, f'"{place}/env/python"')
    cfg = composed("cluster=slurm")
    cfg.cluster.unpack, cfg.cluster.unpack_to = str(archive), str(place)
    cfg.cluster.python = python
    job = script.script_text(cfg, cfg.launch, folder=tmp_path / "job")
    job_id = submitted(slurm, tmp_path, job).split()[-1]
    assert slurm.wait_until_over(job_id) == {job_id: "COMPLETED"}
    assert (place / "env/python").is_symlink()
    assert len(list((tmp_path / "seen").iterdir())) == 4

    archive.write_text("no archive")
    job_id = submitted(slurm, tmp_path, job).split()[-1]
    assert slurm.wait_until_over(job_id) == {job_id: "FAILED"}


def test_a_module_that_is_missing_fails_the_job_before_a_rank_starts(slurm, tmp_path):
    job = text(tmp_path, f"cluster.python='{ranks(tmp_path, fail='none')}'", "cluster.modules=[NoSuchModule]")
    job_id = submitted(slurm, tmp_path, job).split()[-1]
    assert slurm.wait_until_over(job_id) == {job_id: "FAILED"}
    (log,) = (tmp_path / "job").glob("*_0_log.err")
    assert "cluster.modules: failed to load NoSuchModule on" in log.read_text()
    assert os.listdir(tmp_path / "seen") == []
