"""Recomputation runs a layer's forward pass twice; expert loads must be counted once all the same."""

from __future__ import annotations

import pytest
from layouts import trainer_of
from ranks import run_ranks

pytestmark = pytest.mark.slow


def loads_and_biases(mode: str) -> tuple[list[list[float]], list[list[float]]]:
    """Loads after one step's forward and backward pass, and the biases that the optimizer step makes of them."""
    from europa_exp.model.load import expert_loads

    trainer = trainer_of(
        [
            "parallelism.nodes=1",
            "parallelism.gpus_per_node=2",
            "parallelism.data_parallel_shard_degree=2",
            "parallelism.expert_parallel_degree=2",
            "training.seq_len=64",
            f"training.activation_checkpoint={mode}",
        ]
    )
    seen: list[list[list[float]]] = []
    trainer.optimizers.register_step_pre_hook(lambda *_: None)
    step = trainer.optimizers.step
    trainer.optimizers.step = lambda: (seen.append(expert_loads(trainer.model_parts[0]).tolist()), step())
    data = trainer.batch_generator(trainer.dataloader)
    trainer.train_step(data)
    biases = [layer.moe.expert_bias_E.tolist() for layer in trainer.model_parts[0].layers.values()]
    return seen[0], biases


def test_recomputation_counts_every_token_once() -> None:
    results = {mode: run_ranks(2, loads_and_biases, mode) for mode in ("none", "selective", "full")}
    for loads, _ in results["none"]:
        # Two rows of 64 tokens a rank, two experts a token.
        assert [sum(layer) for layer in loads] == [2 * 64 * 2] * 4
    assert results["selective"] == results["none"]
    assert results["full"] == results["none"]
    _, biases = results["none"][0]
    assert any(bias != 0 for layer in biases for bias in layer)
