"""Submit runs to a virtual cluster the way the command does, with small training entries instead of the real one.

As a script (``submitting.py RUNS_DIR ENTRY CONFIG.yaml...``) it is the process that the command line would be.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clusters import HERE, ROOT, Cluster, until
from compose import composed

from europa_exp.config import io
from europa_exp.config.identity import identity
from europa_exp.config.schema import Config
from europa_exp.runs.folder import RunFolder
from europa_exp.runs.status import State

TIMEOUT = 240
"""Seconds that a command of a test may take; a limit for what hangs, not an expectation."""

# What a virtual node needs to be told: one interface, no GPUs, a short wait for a signal.
SITE = (
    "cluster=slurm",
    "cluster.network_interface=lo",
    "cluster.time_limit='00:10:00'",
    "tracking.mode=disabled",
)


def config(nodes: int = 1, tasks: int = 2, *overrides: str) -> Config:
    """The default composition for ``nodes`` x ``tasks`` ranks on a virtual cluster."""
    ranks = nodes * tasks
    layout = (
        f"parallelism.nodes={nodes}",
        f"parallelism.gpus_per_node={tasks}",
        f"parallelism.data_parallel_shard_degree={ranks}",
        "parallelism.expert_parallel_degree=1",
    )
    return composed(*SITE, *layout, *overrides)


def environ(cluster: Cluster, root: Path = ROOT, **more: str) -> dict[str, str]:
    """The environment of a command; jobs inherit it and find the entries of ``slurm_targets``."""
    paths = [str(root), str(HERE), str(ROOT / "tests")]
    return cluster.environ(PYTHONPATH=os.pathsep.join(paths), OMP_NUM_THREADS="1", **more)


def start(
    cluster: Cluster, runs_dir: Path, entry: str, configs: Sequence[Config], *, root: Path = ROOT
) -> subprocess.Popen[str]:
    """Submit the configurations as one call, in a process of its own; run folders are run0, run1, ..."""
    runs_dir.parent.mkdir(parents=True, exist_ok=True)
    paths = []
    for i, cfg in enumerate(configs):
        path = runs_dir.parent / f"{runs_dir.name}-{i}.yaml"
        path.write_text(io.to_yaml(cfg))
        paths.append(str(path))
    return subprocess.Popen(
        [sys.executable, str(HERE / "submitting.py"), str(runs_dir), entry, *paths],
        env=environ(cluster, root),
        cwd=runs_dir.parent,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    """Everything that the process prints until it ends."""
    try:
        return process.communicate(timeout=TIMEOUT)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        print(process.communicate()[0])
        raise


def submit(
    cluster: Cluster, runs_dir: Path, entry: str, configs: Sequence[Config], *, root: Path = ROOT
) -> tuple[int, str]:
    """Submit and wait for the command; its exit code and output. With ``launch.detach`` jobs go on after that."""
    process = start(cluster, runs_dir, entry, configs, root=root)
    out = finish(process)
    return process.returncode, out


def launch(
    cluster: Cluster, cwd: Path, *arguments: str, root: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """``python launch.py ARGUMENTS``, the real command line, typed in ``cwd``."""
    return _call(cluster, cwd, root, str(root / "launch.py"), *arguments)


def europa(
    cluster: Cluster, cwd: Path, *arguments: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """``europa ARGUMENTS`` typed in ``cwd``, with more environment variables."""
    return _call(cluster, cwd, ROOT, "-m", "europa_exp.cli", *arguments, **variables)


def _call(
    cluster: Cluster, cwd: Path, root: Path, *arguments: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env=environ(cluster, root, COLUMNS="200", **variables),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )


def states(runs_dir: Path) -> dict[str, str]:
    """The state of each run as its own record has it."""
    return {p.name: RunFolder(p).status().state.value for p in sorted(runs_dir.glob("[!.]*")) if p.is_dir()}


def wait_for_state(run: Path, *wanted: State | str, seconds: float = TIMEOUT) -> str:
    """Wait until the record of a run has one of these states; which."""
    folder = RunFolder(run)

    until(lambda: folder.status().state in wanted, seconds, lambda: evidence(run.parent))
    return folder.status().state.value


def logged(run: Path) -> list[dict[str, Any]]:
    """Every line of metrics.jsonl as it was written, steps that ran twice included. A line cut by a kill is left out."""
    rows = []
    for line in RunFolder(run).metrics_file.read_text().splitlines():
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line))
    return rows


def evidence(runs_dir: Path) -> str:
    """What the runs left, for the message of a test that fails: states, logs, the errors of submitit."""
    text = ""
    for name in states(runs_dir):
        text += f"==== {name}: {RunFolder(runs_dir / name).status()}\n"
        for path in sorted((runs_dir / name / "logs").glob("*")):
            if "error" in path.name or "rank_" not in path.name or path.name in ("rank_0.log", "rank_1.log"):
                text += f"== {path.name}\n{path.read_text(errors='replace')[-3000:]}\n"
    for path in sorted(runs_dir.glob(".submitit/**/*.err"))[:20]:
        lines = [line for line in path.read_text(errors="replace").splitlines() if "rror" in line]
        text += f"== {path.name}\n" + "\n".join(lines[-10:]) + "\n"
    return text


def _main(runs_dir: str, entry: str, *paths: str) -> int:
    from europa_exp.launch.points import Point
    from europa_exp.launch.submit import submit

    points = []
    for i, path in enumerate(paths):
        cfg = io.load(Path(path))
        cfg.launch.runs_dir = runs_dir
        points.append(Point(cfg=cfg, overrides=[], delta={}, identity=identity(cfg), name=f"run{i}"))
    return submit(points, points[0].cfg.launch, sweep="s", command=["test"], entry=entry)


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
