"""Dense weights that stay in the node after forward, on real gloo ranks: nodes of two."""

from __future__ import annotations

from pathlib import Path

import gathers_on_ranks
import numpy as np
import pytest
from compose import composed
from gathers_on_ranks import Gather, Ran
from parity import train_plain
from ranks import run_ranks
from sharded_moe import Case
from torch import nn

from europa_exp.comm.node_local_reshard import apply_node_local_reshard
from europa_exp.config import counts, io

ALL, NODES, EXPERTS = (0, 1, 2, 3), ((0, 1), (2, 3)), ((0, 2), (1, 3))
UNEVEN = {
    "width": 18,
    "hidden": 36,
    "experts": 6,
}  # 18 rows on 4 ranks: 5, 5, 5, 3; in a node: 10 and 10, of 9 and 9
NARROW = {"width": 3, "hidden": 8, "experts": 4}  # fewer rows than ranks

CASES = {
    "plain": (4, Case(), 1),
    "uneven": (4, Case(**UNEVEN), 1),
    "fewer rows than ranks": (4, Case(**NARROW), 1),
    "offload": (4, Case(offload=True), 1),
    "fp32 weights": (4, Case(param_dtype=None), 1),
    "gradient accumulation": (4, Case(), 2),
    "two replicas": (8, Case(replicas=2), 1),
}


def held_bytes(case: Case, world: int) -> int:
    """Half of each of the two layers' dense weight, with FSDP's padding to whole shards."""
    shards = world // case.replicas
    rows = -(-case.width // shards) * shards
    return 2 * rows * case.width * (2 if case.param_dtype else 4) // 2


def same_numbers(ours: Ran, theirs: Ran) -> bool:
    return ours.losses == theirs.losses and all(
        np.array_equal(ours.grads[name], theirs.grads[name]) for name in theirs.grads
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_the_same_bits_and_the_held_memory_is_that_of_the_shapes(name: str) -> None:
    world, case, micro_batches = CASES[name]
    for theirs, ours in run_ranks(world, gathers_on_ranks.both, case, ["node"], micro_batches):
        assert same_numbers(ours, theirs)
        assert ours.held - theirs.held == held_bytes(case, world)


@pytest.mark.slow
def test_only_the_backward_gathers_of_dense_layers_stay_in_the_node() -> None:
    for rank, ran in enumerate(run_ranks(4, gathers_on_ranks.trained, Case(), ["node"])):
        layers = [gather for gather in ran.gathers if gather.name]
        assert len(layers) == 2 * 2 * 2  # layers, roles, forward and backward
        for gather in layers:
            if gather.role == "expert":
                assert gather.ranks == EXPERTS[rank % 2]
            elif gather.backward:
                assert gather.ranks == NODES[rank // 2]
                assert gather.nbytes == 64 * 64 * 2 // 2
            else:
                assert gather.ranks == ALL
                assert gather.nbytes == 64 * 64 * 2 // 4
        assert {gather.ranks for gather in ran.gathers if not gather.name} == {ALL}  # the head, in the root


@pytest.mark.slow
def test_a_checkpoint_between_forward_and_backward_goes_back_to_full_shards() -> None:
    """FSDP gives up what is kept when it saves; backward then gathers over all ranks, and is right."""
    for theirs, ours in run_ranks(4, gathers_on_ranks.both, Case(), ["node"], 1, True):
        assert same_numbers(ours, theirs)
        assert {gather.ranks for gather in ours.gathers if gather.role == "dense"} == {ALL}


REFUSED = {
    "nodes of one": (Case(), 1, "2 ranks or more"),
    "one node": (Case(), 4, "nothing to gain"),
    "no whole nodes": (Case(), 3, "no multiple of the 3 ranks of a node"),
    "experts in the dense group": (Case(ep=0), 2, "expert_parallel_degree=2 or more"),
    "nothing is freed": (Case(reshard=False), 2, "reshard_after_forward=default"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_a_sharding_that_does_not_fit_is_refused(name: str) -> None:
    case, ranks_per_node, words = REFUSED[name]
    for said in run_ranks(4, gathers_on_ranks.refusal, case, ranks_per_node):
        assert said.startswith("comm.node_local_reshard")
        assert words in said


@pytest.mark.slow
def test_layers_that_are_sharded_in_columns_are_refused() -> None:
    for said in run_ranks(4, gathers_on_ranks.refusal_of_columns):
        assert said.startswith(
            "comm.node_local_reshard: weights of layers.0 are sharded along another dimension"
        )


def test_a_model_that_is_not_sharded_is_refused() -> None:
    with pytest.raises(ValueError, match=r"comm\.node_local_reshard needs .* sharded with FSDP"):
        apply_node_local_reshard(nn.Linear(4, 4), 2)


# ------------------------------------------------------------------------------------------------ torchtitan's trainer

UNEVEN_MODEL = (
    "model.n_experts=6",
    "model.n_heads=3",
    "model.n_kv_heads=1",
    "model.head_dim=14",
)  # 6 and 70 rows
TRAINER = {
    "default": (),
    "always, loss in chunks": ("parallelism.reshard_after_forward=always", "training.loss_chunks=4"),
    "offload, full recompute": ("offload.fsdp_cpu=true", "training.activation_checkpoint=full"),
    "uneven, gradient accumulation": (*UNEVEN_MODEL, "training.global_batch_size=16"),
    "two replicas": (
        "parallelism.nodes=4",
        "parallelism.data_parallel_replicate_degree=2",
        "parallelism.data_parallel_shard_degree=4",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINER)
def test_the_trainer_computes_what_torchtitans_own_computes(tmp_path: Path, name: str) -> None:
    overrides = ("training.steps=3", *TRAINER[name])
    cfg = composed(*overrides, "comm.node_local_reshard=true")
    world = cfg.parallelism.nodes * cfg.parallelism.gpus_per_node
    plain = run_ranks(world, train_plain, io.to_yaml(composed(*overrides)), str(tmp_path))
    ours = run_ranks(world, gathers_on_ranks.train, io.to_yaml(cfg), str(tmp_path))
    assert len(plain[0].numbers) == 3
    assert ours[0].numbers == plain[0].numbers
    passes = 2 if "global_batch" in "".join(overrides) else 1
    for rank, steps in enumerate(ours):
        for gathers in steps.gathers:
            check_step(gathers, rank, cfg.model.n_layers * passes)


def check_step(gathers: list[Gather], rank: int, layers: int) -> None:
    """Dense weights of layers: forward over all ranks of a replica, backward in the node; the rest as ever."""
    replica = tuple(range(rank // 4 * 4, rank // 4 * 4 + 4))
    node = tuple(range(rank // 2 * 2, rank // 2 * 2 + 2))
    dense = [gather for gather in gathers if gather.role == "dense" and gather.name.startswith("layers.")]
    forward = [gather for gather in dense if not gather.backward]
    backward = [gather for gather in dense if gather.backward]
    assert len(forward) == len(backward) == layers
    assert {gather.ranks for gather in forward} == {replica}
    assert {gather.ranks for gather in backward} == {node}
    assert sum(gather.nbytes for gather in backward) == 2 * sum(gather.nbytes for gather in forward)
    others = [gather for gather in gathers if gather not in dense]
    assert {gather.ranks for gather in others if gather.role == "dense"} == {replica}
    assert len({gather.ranks for gather in others if gather.role == "expert"} - {node, replica}) == 1


@pytest.mark.slow
def test_the_held_bytes_of_the_decoder_are_those_of_the_plan(tmp_path: Path) -> None:
    cfg = composed("training.steps=1", "comm.node_local_reshard=true")
    (gathers,) = run_ranks(4, gathers_on_ranks.train, io.to_yaml(cfg), str(tmp_path))[0].gathers
    held = sum(gather.nbytes for gather in gathers if gather.ranks == NODES[0])
    norms = cfg.model.n_layers * 2 * cfg.model.dim * 2 / 2  # left out of the closed form
    assert held == counts.node_local_bytes(cfg.model, cfg.parallelism) + norms


@pytest.mark.slow
def test_goes_on_from_a_checkpoint_bitwise(tmp_path: Path) -> None:
    same = ("comm.node_local_reshard=true", "optimizer.warmup_steps=0", "training.checkpoint_every=2")

    def losses(folder: str, steps: int) -> list[tuple[float, float]]:
        frozen = io.to_yaml(composed(f"training.steps={steps}", *same))
        return run_ranks(4, gathers_on_ranks.train, frozen, str(tmp_path / folder))[0].numbers

    unbroken = losses("a", 4)
    assert losses("b", 2) + losses("b", 4) == unbroken
