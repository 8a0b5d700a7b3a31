"""Training entries for tests of handing runs to Slurm; none needs torch."""

from __future__ import annotations

import os
import time

from slurm_targets import write_steps


def wait_for_go(cfg, run, runtime) -> None:
    """Stay until a file beside the runs folder says go; then log the steps."""
    (run.path / f"up_{os.environ['RANK']}").touch()
    while not (run.path.parent.parent / "go").exists():
        time.sleep(0.1)
    write_steps(cfg, run, runtime)


def count_starts(cfg, run, runtime) -> None:
    """Rank 0 leaves a line for each start of the run, with the job and the node."""
    if os.environ["RANK"] == "0":
        with open(run.path / "starts", "a") as file:
            file.write(f"{os.environ['SLURM_JOB_ID']} {os.environ['SLURMD_NODENAME']} {time.time()}\n")
    write_steps(cfg, run, runtime)


def crash_at_first(cfg, run, runtime) -> None:
    """A segmentation fault of rank 1 in the first job, while rank 0 waits for it; the next job is fine."""
    mark, job = run.path / "crashed", os.environ["SLURM_JOB_ID"]
    if not mark.exists() and os.environ["RANK"] == "1":
        import ctypes

        mark.write_text(job)
        ctypes.string_at(0)
    while not mark.exists() or mark.read_text() in ("", job):
        time.sleep(0.1)
    count_starts(cfg, run, runtime)


def crash_seed_2_at_first(cfg, run, runtime) -> None:
    """``crash_at_first`` in the run with seed 2; the others are fine. None ends before all of its chain is submitted."""
    while not run.status().extra.get("job_ids"):
        time.sleep(0.1)
    (crash_at_first if cfg.training.seed == 2 else count_starts)(cfg, run, runtime)
