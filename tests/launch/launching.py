"""What tests of the launcher share: configurations, run folders, the command as a process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import yaml

from europa_exp.config import io
from europa_exp.config.identity import identity
from europa_exp.config.schema import Config
from europa_exp.launch.points import Point
from europa_exp.runs.folder import NewRun, RunFolder, create_runs
from europa_exp.runs.provenance import CodeState
from europa_exp.runs.status import State

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CODE = CodeState(commit=None, fingerprint="code")


def config(ranks: int = 2, *, steps: int = 3, preload: bool = True, seed: int = 1, **cluster) -> Config:
    """The default composition, put together without Hydra, with ``ranks`` ranks."""
    choices = next(yaml.safe_load(p.read_text())["defaults"] for p in [ROOT / "conf" / "config.yaml"])
    data: dict = {}
    for entry in choices:
        if isinstance(entry, dict):
            [(group, option)] = entry.items()
            path = ROOT / "conf" / group / f"{option}.yaml"
            if path.is_file():
                data[group] = yaml.safe_load(path.read_text()) or {}
    cfg = io.from_dict(data)
    cfg.parallelism.nodes, cfg.parallelism.gpus_per_node = 1, ranks
    cfg.parallelism.data_parallel_shard_degree = ranks
    cfg.parallelism.expert_parallel_degree = 1
    cfg.training.steps, cfg.training.seed = steps, seed
    cfg.cluster.preload = preload
    for name, value in cluster.items():
        setattr(cfg.cluster, name, value)
    return cfg


def point(cfg: Config, name: str = "run", **fields) -> Point:
    return Point(cfg=cfg, overrides=[], delta={}, identity=identity(cfg), name=name, **fields)


def make_runs(runs_dir: Path, *configs: Config) -> list[RunFolder]:
    new = [NewRun(cfg, f"run{i}", identity(cfg)) for i, cfg in enumerate(configs)]
    runs = create_runs(runs_dir, new, sweep="s", command=["test"], code=CODE)
    for run in runs:
        run.set_state(State.queued)
    return runs


def environ(**more: str) -> dict[str, str]:
    """The environment of a test's processes: they can import the entries of ``rank_targets``."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE)]), **more}


def command(runs_dir: Path, entry: str, *configs: Config, preload: str = "", **env: str) -> subprocess.Popen:
    """``submit`` of these configurations in a process of its own session, as a terminal would start it."""
    runs_dir.parent.mkdir(parents=True, exist_ok=True)
    paths = []
    for i, cfg in enumerate(configs):
        path = runs_dir.parent / f"point{i}.yaml"
        path.write_text(io.to_yaml(cfg))
        paths.append(str(path))
    arguments = [str(runs_dir), f"rank_targets:{entry}", preload, *paths]
    return subprocess.Popen(
        [sys.executable, str(HERE / "submit_points.py"), *arguments],
        env=environ(**{"EUROPA_TEST": str(runs_dir.parent), **env}),
        cwd=runs_dir.parent,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait for a condition; fails after ``seconds``."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def mentioning(text: str) -> list[int]:
    """Living processes whose command line or environment holds ``text`` (the folder of the test)."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (entry / "stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                continue
            held = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
        except OSError:
            continue
        if text.encode() in held and int(entry.name) != os.getpid():
            found.append(int(entry.name))
    return found
