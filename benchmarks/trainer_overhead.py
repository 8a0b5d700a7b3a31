"""Our trainer against torchtitan's plain ``Trainer``: tokens/s on the same model, data and ranks, mechanisms off.

    python benchmarks/trainer_overhead.py [--pairs 5] [--steps 40] [override ...]

Runs come in pairs, one of each kind in turn, so that a slow moment of the machine meets both. The figure is the median
over the pairs of the ratio of median step times (after ten warm-up steps). Target: at least 0.98.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
WARM_UP = 10


def step_times(kind: str, frozen: str) -> list[float]:
    """Seconds of each step of this rank. ``kind``: "plain" or "europa"; ``frozen``: the configuration as YAML."""
    import torch
    from parity import plain_trainer

    from europa_exp.comm.accounting import step_metrics
    from europa_exp.config import io
    from europa_exp.training.assemble import build_trainer

    cfg = io.from_yaml(frozen)
    with tempfile.TemporaryDirectory() as folder:
        if kind == "europa":
            trainer, counter = build_trainer(cfg, Path(folder))
            trainer.metrics_processor.attach([], lambda: step_metrics(counter.take()))
        else:
            trainer = plain_trainer(
                frozen, folder, log_freq=cfg.training.log_every, disable_color_printing=True
            )
        times: list[float] = []
        train_step = trainer.train_step

        def timed(*args: Any) -> None:
            start = time.perf_counter()
            train_step(*args)
            times.append(time.perf_counter() - start)

        trainer.train_step = timed
        trainer.train()
        torch.distributed.barrier()
        return times


def main() -> None:
    """Run the pairs and print the table."""
    from compose import composed
    from ranks import run_ranks

    from europa_exp.config import io

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    cfg = composed(f"training.steps={arguments.steps}", *arguments.overrides)
    world = cfg.parallelism.nodes * cfg.parallelism.gpus_per_node
    tokens = cfg.training.seq_len * cfg.training.local_batch_size
    print(f"{'pair':>4}  {'plain tok/s/rank':>16}  {'ours tok/s/rank':>16}  {'ratio':>6}")
    ratios = []
    for pair in range(arguments.pairs):
        # The order alternates, so that neither kind always comes first.
        kinds = ["plain", "europa"] if pair % 2 == 0 else ["europa", "plain"]
        median = {
            kind: statistics.median(run_ranks(world, step_times, kind, io.to_yaml(cfg))[0][WARM_UP:])
            for kind in kinds
        }
        ratios.append(median["plain"] / median["europa"])
        print(
            f"{pair:>4}  {tokens / median['plain']:>16,.0f}  {tokens / median['europa']:>16,.0f}  {ratios[-1]:>6.3f}"
        )
    print(
        f"median ratio {statistics.median(ratios):.3f} (target 0.98), {world} ranks, {arguments.steps} steps"
    )


if __name__ == "__main__":
    main()
