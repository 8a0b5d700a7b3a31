"""What Slurm costs: submitting 48 points, the status of a sweep, a requeue in the middle of a run, 384 ranks that start.

    python benchmarks/slurm_submit.py [--times 3]

Needs root and Slurm's packages (tests/slurm/cluster.sh install); the cluster is virtual, its controller real. Whole
processes, start of Python included; the median of several. CPU seconds are those of the command itself, or of one rank: they
hardly depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
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
from submitting import SITE, config, europa, launch, logged, submit  # noqa: E402

from europa_exp.runs.folder import RunFolder, list_runs  # noqa: E402

HELD = ("launch.detach=true", "+cluster.sbatch_args.hold='true'")
ONE_NODE = ("parallelism.nodes=1", "parallelism.data_parallel_shard_degree=2")
LONG = ("training.steps=20000", "training.checkpoint_every=10", "training.checkpoint_keep=2")
LINE = "{:<46} {:>9} {:>9} {:>9} {:>8} {:>9}"


def main() -> None:
    """Measure on a cluster of four nodes and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=3)
    times = parser.parse_args().times
    reason = why_not()
    if reason:
        sys.exit(reason)
    print(LINE.format("what", "median", "fastest", "slowest", "target", "CPU"))
    cluster = Cluster(nodes=4)
    try:
        with tempfile.TemporaryDirectory() as folder:
            submit_48(cluster, Path(folder), times)
            beside_500_others(cluster, Path(folder) / "submit0", times)
            status_of_100(cluster, Path(folder) / "hundred", times)
            requeue(cluster, Path(folder) / "requeue", times)
    finally:
        cluster.stop()
    large = Cluster(nodes=96)
    try:
        with tempfile.TemporaryDirectory() as folder:
            start_of_384_ranks(large, Path(folder), times)
    finally:
        large.stop()


def row(name: str, seconds: list[float], target: str = "", cpu: list[float] | None = None) -> None:
    values = [f"{value:.2f} s" for value in (statistics.median(seconds), min(seconds), max(seconds))]
    used = f"{statistics.median(cpu):.2f} s" if cpu else ""
    print(LINE.format(name, *values, target, used), flush=True)


def timed(call: Callable[[], subprocess.CompletedProcess[str]]) -> float:
    return timed_with_cpu(call)[0]


def timed_with_cpu(call: Callable[[], subprocess.CompletedProcess[str]]) -> tuple[float, float]:
    """Seconds, and CPU seconds of the process and its own children."""
    begin, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = call()
    seconds, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        sys.exit(f"{done.args}: {done.stdout}")
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def points(n: int, *more: str) -> tuple[str, ...]:
    return ("-m", *SITE, *HELD, f"training.seed=range({n})", *more)


def submit_48(cluster: Cluster, folder: Path, times: int) -> None:
    """All of the command, and what is left of it without composing and checking, which the preview does as well."""
    whole, preview, cpu = [], [], []
    for i in range(times):
        place = folder / f"submit{i}"
        place.mkdir()
        preview.append(timed(lambda place=place: launch(cluster, place, *points(48), "launch.preview=true")))
        seconds, used = timed_with_cpu(lambda place=place: launch(cluster, place, *points(48)))
        whole.append(seconds)
        cpu.append(used)
        if len(cluster.queue()) != 48:
            sys.exit(f"Slurm has {len(cluster.queue())} jobs, not 48")
        cluster.clear()
    row("48 points: compose, submit, all in Slurm", whole, cpu=cpu)
    row("  of that after composing", [max(a - b, 0.0) for a, b in zip(whole, preview)], "5 s")


def beside_500_others(cluster: Cluster, folder: Path, times: int) -> None:
    """Submitting 48 points, and the status of these, in a runs folder that holds 500 runs of other points, all over."""
    for run in list_runs(folder / "runs"):
        run.set_state("completed")
        text = json.dumps({"step": 1, "loss/global_avg": 1.0, "time": "2026-01-01T00:00:00.000+00:00"}) + "\n"
        run.metrics_file.write_text(text * 1000)
    olds = list_runs(folder / "runs")
    for number in range(500 - len(olds)):
        shutil.copytree(olds[number % len(olds)].path, folder / "runs" / f"old{number}")
    submits, statuses = [], []
    for i in range(times):
        call = points(48, f"launch.sweep_name=new{i}", f"training.steps={1000 + i}")
        submits.append(timed_with_cpu(lambda call=call: launch(cluster, folder, *call)))
        asked = ("status", "--sweep", f"new{i}")
        statuses.append(timed_with_cpu(lambda asked=asked: europa(cluster, folder, *asked)))
        cluster.clear()
    row("48 points beside 500 other runs", [s for s, _ in submits], cpu=[c for _, c in submits])
    row("  their status", [s for s, _ in statuses], "1 s", [c for _, c in statuses])


def start_of_384_ranks(cluster: Cluster, folder: Path, times: int) -> None:
    """From the command until every rank of 96 nodes has reported, and the CPU seconds of a rank until then."""
    seconds, cpu = [], []
    options = ("cluster.cpus_per_task=4", "cluster.numa_binding=cpu_and_memory", "training.steps=1")
    for i in range(times):
        runs = folder / f"many{i}"
        begin = time.time()
        code, out = submit(cluster, runs, "slurm_targets:report_environment", [config(96, 4, *options)])
        if code:
            sys.exit(out)
        run = RunFolder(runs / "run0")
        cluster.wait_until_over(run.status().extra["job_id"])
        reports = list((run.path / "ranks").glob("*.json"))
        if len(reports) != 384:
            sys.exit(f"{len(reports)} ranks reported, not 384")
        seconds.append(max(path.stat().st_mtime for path in reports) - begin)
        used = [json.loads(json.loads(path.read_text())["cpu"]) for path in reports]
        cpu.append(statistics.mean(u["user"] + u["system"] for u in used))
    row("384 ranks on 96 nodes of this machine report", seconds, "60 s", cpu)


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
