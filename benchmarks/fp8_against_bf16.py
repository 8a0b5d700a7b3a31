"""FP8 expert gathers against bf16: bytes handed to the collectives, and the loss after ten steps.

    python benchmarks/fp8_against_bf16.py [override ...]

Same data, same initialisation, torchtitan's trainer on all ranks of the composition. Targets: at most 0.52 of the bytes of the
expert weights; losses within 0.01 (the post's figure).
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
STEPS = 10


def train(frozen: str, folder: str) -> tuple[list[float], int]:
    """Losses, and the bytes of expert weights that this rank handed to all-gathers in all steps."""
    from europa_exp.comm.accounting import Collective
    from europa_exp.config import io
    from europa_exp.training.assemble import build_trainer

    trainer, counter = build_trainer(io.from_yaml(frozen), Path(folder))
    losses: list[float] = []
    trainer.metrics_processor.attach([lambda metrics, step: losses.append(metrics["loss/global_avg"])], dict)
    trainer.train()
    experts = sum(
        traffic.handed_bytes
        for kind, traffic in counter.take().items()
        if kind.collective is Collective.all_gather and kind.role == "expert"
    )
    return losses, experts


def main() -> None:
    """Train both and print the table."""
    from compose import composed
    from ranks import run_ranks

    from europa_exp.config import io

    found = {}
    for comm in ("bf16", "fp8"):
        cfg = composed(f"training.steps={STEPS}", f"comm={comm}", *sys.argv[1:])
        world = cfg.parallelism.nodes * cfg.parallelism.gpus_per_node
        with tempfile.TemporaryDirectory() as folder:
            found[comm] = run_ranks(world, train, io.to_yaml(cfg), folder)[0]
    print(f"{'comm':<6} {'expert bytes a step and rank':>29} {'loss after ' + str(STEPS):>14}")
    for comm, (losses, experts) in found.items():
        print(f"{comm:<6} {experts / STEPS:>29,.0f} {losses[-1]:>14.5f}")
    (bf16, plain), (fp8, quantised) = found["bf16"], found["fp8"]
    print(
        f"bytes: {quantised / plain:.4f} of bf16 (target 0.52); loss differs by {abs(fp8[-1] - bf16[-1]):.5f} (target 0.01)"
    )


if __name__ == "__main__":
    main()
