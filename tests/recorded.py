"""Run folders for tests, made by the code that makes the real ones."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from compose import composed

from europa_exp.config.identity import delta, identity, run_name
from europa_exp.config.schema import Config
from europa_exp.runs.code import CodeState
from europa_exp.runs.folder import RunFolder, create_run
from europa_exp.runs.metrics import MetricsWriter

CODE = CodeState(commit="0123456789abcdef0123456789abcdef01234567", fingerprint="f" * 16)


@cache
def _composed(*overrides: str) -> Config:
    return composed(*overrides)


def ar1(rng: random.Random, n: int, mean: float, deviation: float, rho: float = 0.3) -> list[float]:
    """Correlated noise around ``mean``, from its stationary distribution on; ``deviation`` is that of one value."""
    x = rng.gauss(0, 1)
    found = []
    for _ in range(n):
        found.append(mean + deviation * x)
        x = rho * x + (1 - rho * rho) ** 0.5 * rng.gauss(0, 1)
    return found


def record(
    runs_dir: Path,
    *overrides: str,
    sweep: str | None = "ladder",
    repeat: int = 0,
    code: CodeState = CODE,
    state: str = "completed",
    parent: str | None = None,
) -> RunFolder:
    """A run folder of ``python launch.py OVERRIDES`` in the given state, without metrics."""
    cfg, base = copy.deepcopy(_composed(*overrides)), _composed()
    found = identity(cfg)
    run = create_run(
        runs_dir,
        cfg,
        overrides=list(overrides),
        name=run_name(delta(cfg, base), found),
        identity=found,
        sweep=sweep,
        repeat=repeat,
        parent=parent,
        command=["python", "launch.py", *overrides],
        code=code,
        data_fingerprint="d" * 12,
    )
    if state != "created":
        run.set_state("running")
    if state in ("completed", "cancelled", "queued"):
        run.set_state(state, exit_codes={"0": 0})
    if state == "failed":
        error = {
            "rank": 3,
            "type": "RuntimeError",
            "message": "loss is not finite",
            "traceback": "Traceback\n  x\nRuntimeError",
        }
        run.set_state("failed", error=error, exit_codes={"0": 0, "3": 1})
    return run


def log_steps(
    run: RunFolder,
    *,
    steps: int = 60,
    tokens_per_second: float = 3000.0,
    noise: float = 0.01,
    seed: int = 0,
    gather_gib: float = 0.5,
    loss_end: float = 2.5,
    more: Callable[[int], dict[str, Any]] = lambda step: {},
) -> None:
    """Steps as rank 0 logs them on a CPU: no quantity that only an accelerator has."""
    rng = random.Random(seed)
    speed: Sequence[float] = ar1(rng, steps, 1.0, noise)
    with MetricsWriter(run.metrics_file) as writer:
        for step in range(1, steps + 1):
            slow = 3.0 if step == 1 else 1.0
            rate = tokens_per_second * speed[step - 1] / slow
            loss = loss_end + 3.0 * 0.9**step + rng.gauss(0, 0.01)
            row = {
                "loss/global_avg": loss,
                "loss/global_max": loss + 0.2,
                "grad_norm": 1.0 + rng.random(),
                "throughput/tokens_per_second_per_gpu": rate,
                "time/step_s": 512 / rate,
                "time/data_s": 0.001,
                "memory/peak_host_gib": 0.9,
                "comm/all_gather_sent_gib": gather_gib,
                "comm/reduce_sent_gib": 0.25,
                "tokens_seen": 2048 * step,
            }
            writer.write({**row, **more(step)}, step)
