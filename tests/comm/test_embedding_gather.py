"""The embedding table that backward does not gather, on real gloo ranks."""

from __future__ import annotations

from pathlib import Path

import gathers_on_ranks
import numpy as np
import pytest
from compose import composed
from gathers_on_ranks import Gather
from parity import train_plain
from ranks import run_ranks
from torch import nn

from europa_exp.comm.embedding_gather import skip_embedding_gather_in_backward
from europa_exp.config import io


def facts(gathers: list[Gather]) -> list[tuple[str, str, int, bool]]:
    return [(gather.name, gather.role, gather.nbytes, gather.backward) for gather in gathers]


def fewer(with_gather: list[Gather], without: list[Gather]) -> list[tuple[str, str, int, bool]]:
    """What the first step gathered and the second did not; the second must have gathered nothing else."""
    left = facts(with_gather)
    for fact in facts(without):
        left.remove(fact)
    return left


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_one_gather_a_pass_is_gone_and_gradients_are_the_same_bits(micro_batches: int) -> None:
    for with_gather, without in run_ranks(2, gathers_on_ranks.read_both, micro_batches):
        table = ("tok_embeddings", "dense", 25 * 16 * 2, True)
        assert fewer(with_gather.gathers, without.gathers) == [table] * micro_batches
        assert without.losses == with_gather.losses
        for name, grad in with_gather.grads.items():
            assert np.array_equal(without.grads[name], grad), name
        assert np.abs(without.grads["tok_embeddings.weight"]).max() > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("units", "words"),
    [
        ("alone", ""),
        ("tied", "also lm_head.weight"),
        ("together", "together with other modules"),
        ("root", "a unit of its own"),
    ],
)
def test_an_embedding_whose_unit_needs_its_weights_is_refused(units: str, words: str) -> None:
    for said in run_ranks(2, gathers_on_ranks.embedding_refusal, units):
        assert (words in said) if words else said == ""
        assert said == "" or said.startswith("comm.embedding_gather_in_backward=false")


def test_a_model_that_is_not_sharded_is_refused() -> None:
    with pytest.raises(ValueError, match="tok_embeddings sharded with FSDP"):
        skip_embedding_gather_in_backward(gathers_on_ranks.Reader(tied=False))
    with pytest.raises(ValueError, match="tok_embeddings sharded with FSDP"):
        skip_embedding_gather_in_backward(nn.Linear(2, 2))


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("parallelism.expert_parallel_degree=1",),
        ("training.global_batch_size=16",),
        ("offload.fsdp_cpu=true", "training.activation_checkpoint=full"),
    ],
    ids=" ".join,
)
def test_the_trainer_computes_what_torchtitans_own_computes(
    tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    base = ("training.steps=3", *overrides)
    plain = run_ranks(4, train_plain, io.to_yaml(composed(*base)), str(tmp_path))
    default, skipped = (
        run_ranks(4, gathers_on_ranks.train, io.to_yaml(composed(*base, f"comm.embedding_gather_in_backward={on}")),
                  str(tmp_path))
        for on in ("true", "false")
    )  # fmt: skip
    assert len(plain[0].numbers) == 3
    assert skipped[0].numbers == default[0].numbers == plain[0].numbers
    passes = 2 if "training.global_batch_size=16" in overrides else 1
    table = ("tok_embeddings", "dense", 320 * 64 * 2 // 4, True)
    for theirs, ours in zip(default, skipped, strict=True):
        for with_gather, without in zip(theirs.gathers, ours.gathers, strict=True):
            assert fewer(with_gather, without) == [table] * passes
