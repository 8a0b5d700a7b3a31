"""Where a task of a Slurm job begins, without Slurm: which runs are its own, whether the job is anybody's, what it imports."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launching import HERE, ROOT, config, make_runs

from europa_exp.config.schema import Executor
from europa_exp.launch import job_folder, slurm_rank, slurm_start
from europa_exp.runs.folder import RunFolder

ENTRY = """
import json, os, sys
def train(cfg, run, runtime):
    (run.path / "modules.json").write_text(json.dumps(sorted(sys.modules)))
"""


@pytest.fixture
def taken(monkeypatch):
    """What tasks were told to do: (paths of runs, entry)."""
    found: list[tuple[list[str], str]] = []
    monkeypatch.setattr(
        slurm_rank, "work", lambda runs, entry: found.append(([str(r.path) for r in runs], entry))
    )
    return found


def folder_of(tmp_path: Path, *marks: str) -> Path:
    job_folder.write_tasks(tmp_path, [((f"/r/{i}a", f"/r/{i}b"), f"module:entry{i}") for i in range(3)])
    for job in marks:
        job_folder.mark(tmp_path, job).touch()
    return tmp_path


def test_each_task_of_an_array_has_runs_of_its_own(tmp_path, taken):
    folder = folder_of(tmp_path, "70_2", "70_0", "9")
    slurm_start.main(folder, {"SLURM_JOB_ID": "72", "SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "2"})
    slurm_start.main(folder, {"SLURM_JOB_ID": "70", "SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "0"})
    slurm_start.main(folder, {"SLURM_JOB_ID": "9"})
    assert taken == [
        (["/r/2a", "/r/2b"], "module:entry2"),
        (["/r/0a", "/r/0b"], "module:entry0"),
        (["/r/0a", "/r/0b"], "module:entry0"),
    ]


def test_a_job_whose_submission_broke_off_does_nothing(tmp_path, taken, monkeypatch):
    monkeypatch.setattr(slurm_start, "_WAIT_S", 0.0)
    with pytest.raises(SystemExit, match="whoever submitted job 71 was gone"):
        slurm_start.main(folder_of(tmp_path, "70"), {"SLURM_JOB_ID": "71"})
    assert taken == []


def one_task(
    tmp_path: Path, entry: str, preexec=None, *, rank: int = 0
) -> tuple[subprocess.CompletedProcess[str], RunFolder]:
    """The last task of a job, as Slurm starts it, to its end; ``entry`` is a module with a function ``train``."""
    cfg = config(rank + 1, executor=Executor.slurm, network_interface="lo")
    cfg.cluster.preload = False
    [run] = make_runs(tmp_path / "runs", cfg)
    (tmp_path / "light.py").write_text(entry)
    job = tmp_path / "job"
    job.mkdir()
    job_folder.write_tasks(job, [((str(run.path),), "light:train")])
    job_folder.mark(job, "77").touch()
    slurm = {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "127.0.0.1", "SLURMD_NODENAME": "127.0.0.1"}
    slurm |= {
        "SLURM_NTASKS": str(rank + 1),
        "SLURM_NODEID": "0",
        **dict.fromkeys(("SLURM_PROCID", "SLURM_LOCALID"), str(rank)),
    }
    done = subprocess.run(
        [sys.executable, "-m", "europa_exp.launch.slurm_start", str(job)],
        env={**os.environ, **slurm, "PYTHONPATH": f"{ROOT}:{HERE}:{tmp_path}"},
        preexec_fn=preexec,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done, run


@pytest.mark.parametrize(("rank", "state"), [(0, "completed"), (1, "queued")])
def test_a_rank_starts_light(rank, state, tmp_path):
    """Hundreds of ranks start at once, and a file system brings each import to each of them."""
    done, run = one_task(tmp_path, ENTRY, rank=rank)
    assert (done.returncode, run.status().state) == (0, state), done.stdout + done.stderr
    modules = set(json.loads((run.path / "modules.json").read_text()))
    heavy = {"submitit", "numpy", "asyncio", "omegaconf", "hydra", "torch", "wandb", "importlib.metadata"}
    assert modules & heavy == set()
    assert "europa_exp.launch.slurm_rank" in modules
    # Only the first task decides what comes next, and has to know of nodes and of the queue.
    assert ({"europa_exp.launch.slurm_first", "europa_exp.launch.squeue"} <= modules) is (rank == 0)


ASKED = """
import os, sys, time
def train(cfg, run, runtime):
    end = time.monotonic() + 30
    while not runtime["stop"]() and time.monotonic() < end:
        time.sleep(0.05)
    masks = [line for line in open("/proc/self/status") if line.startswith("SigBlk")]
    masks += [line for line in open(f"/proc/{os.getppid()}/status") if line.startswith("SigBlk")]
    (run.path / "asked.json").write_text(f'[{str(runtime["stop"]()).lower()}, {[int(m.split()[1], 16) for m in masks]}]')
"""


def asked_before_it_began() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2, signal.SIGTERM})
    os.kill(os.getpid(), signal.SIGUSR2)


def test_a_signal_that_came_first_asks_the_rank(tmp_path):
    """As the job script starts it: signals wait for it. Once it takes them, neither it nor the rank holds any back."""
    done, run = one_task(tmp_path, ASKED, asked_before_it_began)
    assert (done.returncode, run.status().state) == (0, "completed"), done.stdout + done.stderr
    assert json.loads((run.path / "asked.json").read_text()) == [True, [0, 0]]


LOOK = """
import os, signal
from pathlib import Path
found = signal.pthread_sigmask(signal.SIG_BLOCK, ())
Path(__file__).with_name("mask").write_text(" ".join(sorted(signal.Signals(number).name for number in found)))
os._exit(0)
"""


@pytest.mark.parametrize("module", ["json", "tempfile"])
def test_signals_wait_before_anything_is_imported(tmp_path, module):
    (tmp_path / f"{module}.py").write_text(LOOK)
    command = [sys.executable, "-m", "europa_exp.launch.slurm_start", str(tmp_path)]
    paths = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    subprocess.run(command, env={**os.environ, **paths}, cwd=tmp_path, timeout=60, check=True)
    assert (tmp_path / "mask").read_text() == "SIGTERM SIGUSR2"
