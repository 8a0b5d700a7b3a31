"""What Slurm costs: submitting 48 points, the status of a sweep of 100 runs, and a requeue in the middle of a run.

    python benchmarks/slurm_submit.py [--times 3]

Needs root and Slurm's packages (tests/slurm/cluster.sh install); the cluster is virtual, its controller real. Whole
processes, start of Python included; the median of several.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "slurm"), str(ROOT / "tests")]

from clusters import Cluster, until, why_not  # noqa: E402
from submitting import SITE, europa, launch, logged  # noqa: E402

from europa_exp.runs.folder import list_runs  # noqa: E402

HELD = ("launch.detach=true", "+cluster.sbatch_args.hold='true'")
ONE_NODE = ("parallelism.nodes=1", "parallelism.data_parallel_shard_degree=2")
LONG = ("training.steps=20000", "training.checkpoint_every=10", "training.checkpoint_keep=2")
LINE = "{:<46} {:>9} {:>9} {:>9} {:>8}"


def main() -> None:
    """Measure on a cluster of four nodes and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=3)
    times = parser.parse_args().times
    reason = why_not()
    if reason:
        sys.exit(reason)
    print(LINE.format("what", "median", "fastest", "slowest", "target"))
    cluster = Cluster(nodes=4)
    try:
        with tempfile.TemporaryDirectory() as folder:
            submit_48(cluster, Path(folder), times)
            status_of_100(cluster, Path(folder) / "hundred", times)
            requeue(cluster, Path(folder) / "requeue", times)
    finally:
        cluster.stop()


def row(name: str, seconds: list[float], target: str = "") -> None:
    values = [f"{value:.2f} s" for value in (statistics.median(seconds), min(seconds), max(seconds))]
    print(LINE.format(name, *values, target), flush=True)


def timed(call: Callable[[], subprocess.CompletedProcess[str]]) -> float:
    begin = time.perf_counter()
    done = call()
    seconds = time.perf_counter() - begin
    if done.returncode:
        sys.exit(f"{done.args}: {done.stdout}")
    return seconds


def points(n: int, *more: str) -> tuple[str, ...]:
    return ("-m", *SITE, *HELD, f"training.seed=range({n})", *more)


def submit_48(cluster: Cluster, folder: Path, times: int) -> None:
    """All of the command, and what is left of it without composing and checking, which the preview does as well."""
    whole, preview = [], []
    for i in range(times):
        place = folder / f"submit{i}"
        place.mkdir()
        preview.append(timed(lambda place=place: launch(cluster, place, *points(48), "launch.preview=true")))
        whole.append(timed(lambda place=place: launch(cluster, place, *points(48))))
        if len(cluster.queue()) != 48:
            sys.exit(f"Slurm has {len(cluster.queue())} jobs, not 48")
        cluster.clear()
    row("48 points: compose, submit, all in Slurm", whole)
    row("  of that after composing", [max(a - b, 0.0) for a, b in zip(whole, preview)], "5 s")


def status_of_100(cluster: Cluster, folder: Path, times: int) -> None:
    folder.mkdir()
    timed(lambda: launch(cluster, folder, *points(100), "launch.sweep_name=hundred"))
    call = ("status", "--sweep", "hundred")
    row(
        "status of 100 queued runs",
        [timed(lambda: europa(cluster, folder, *call)) for _ in range(times)],
        "1 s",
    )
    cluster.script("kill-dbd")
    row(
        "  the same without accounting", [timed(lambda: europa(cluster, folder, *call)) for _ in range(times)]
    )
    cluster.script("start-dbd")
    cluster.clear()
    row("  the same, all of them over", [timed(lambda: europa(cluster, folder, *call)) for _ in range(times)])


def requeue(cluster: Cluster, folder: Path, times: int) -> None:
    """From `scontrol requeue` until the next attempt trains; Slurm's own wait depends on the site."""
    folder.mkdir()
    waited, started, lost = [], [], []
    for i in range(times):
        place = folder / str(i)
        place.mkdir()
        timed(lambda place=place: launch(cluster, place, *SITE, *ONE_NODE, *LONG, "launch.detach=true"))
        [run] = list_runs(place / "runs")
        until(lambda run=run: len(run.metrics()) > 35, 120)
        asked = time.time()
        cluster.run("scontrol", "requeue", run.status().extra["job_id"])
        until(lambda run=run: len(run.status().extra.get("attempts", [])) > 1, 120)
        begun = run.status().extra["attempts"][1]["started_at"]
        until(lambda run=run, begun=begun: logged(run.path)[-1]["time"] > begun, 120)
        rows = logged(run.path)
        again = next(row for row in rows if row["time"] > begun)
        last = [row for row in rows if row["time"] <= begun][-1]
        waited.append(datetime.fromisoformat(begun).timestamp() - asked)
        started.append(
            (datetime.fromisoformat(again["time"]) - datetime.fromisoformat(begun)).total_seconds()
        )
        lost.append(last["step"] + 1 - again["step"])
        cluster.clear()
    row("requeue: until Slurm starts the job again", waited)
    row("  from then until the first step is logged", started)
    print(f"  steps that ran twice, with a checkpoint each 10: {', '.join(map(str, lost))}")


if __name__ == "__main__":
    main()
