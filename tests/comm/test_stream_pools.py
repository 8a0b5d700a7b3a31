"""All-gathers from the compute stream: asynchronous, one unit ahead, the same numbers; on a GPU, from its memory pool."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import gathers_on_ranks
import numpy as np
import pools_on_gpu
import pytest
import torch
from compose import composed
from gathers_on_ranks import Gather
from parity import train_plain
from pools_on_gpu import GATHERED, LAYERS, MESSAGE, REDUCED, Mechanisms, Pools
from ranks import run_ranks
from sharded_moe import Case
from torch import nn

from europa_exp.comm.compute_stream_gather import apply_compute_stream_gather
from europa_exp.config import io

ON = "allocator.all_gather_on_compute_stream=true"


def all_asynchronous(gathers: list[Gather]) -> bool:
    """Every gather returned a handle, and FSDP waited for each once."""
    return bool(gathers) and all(gather.asynchronous and gather.waits == 1 for gather in gathers)


def issued_after(gathers: list[Gather]) -> dict[str, str]:
    """For each FSDP unit: the unit whose forward was the last to begin when its forward gathers were issued."""
    forward = [gather for gather in gathers if not gather.backward and gather.name]
    found = {gather.name: gather.after for gather in forward}
    assert all(gather.after == found[gather.name] for gather in forward)  # dense and experts together
    return found


def one_ahead(units: list[str]) -> dict[str, str]:
    """What `issued_after` is when each unit's gathers are issued before the unit before it computes."""
    before = ["", "", *units]
    return {unit: before[i] for i, unit in enumerate(units)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "others"),
    [
        (Case(), []),
        (Case(ep=0), []),
        (Case(offload=True), []),
        (Case(), ["node"]),
        (Case(), ["fp8"]),
        (Case(), ["fp8", "node"]),
    ],
    ids=["experts apart", "experts in the dense group", "offload", "node-local", "fp8", "fp8 and node-local"],
)
def test_all_gathers_are_asynchronous_one_unit_ahead_and_the_numbers_the_same_bits(
    case: Case, others: list[str]
) -> None:
    without = run_ranks(4, gathers_on_ranks.trained, case, others)
    within = run_ranks(4, gathers_on_ranks.trained, case, [*others, "stream"])
    for ours, theirs in zip(within, without, strict=True):
        assert not any(gather.asynchronous for gather in theirs.gathers)
        assert issued_after(theirs.gathers) == {"layers.0": "", "layers.1": "layers.0"}
        assert all_asynchronous(ours.gathers)
        assert issued_after(ours.gathers) == one_ahead(["layers.0", "layers.1"])
        facts = [
            sorted((g.name, g.role, g.ranks, g.nbytes, g.backward) for g in ran.gathers)
            for ran in (ours, theirs)
        ]
        assert facts[0] == facts[1]
        assert ours.losses == theirs.losses
        for name, grad in theirs.grads.items():
            assert np.array_equal(ours.grads[name], grad), name


@pytest.mark.slow
@pytest.mark.parametrize("public", [False, True])
def test_the_public_setter_is_taken_where_torch_has_one(public: bool) -> None:
    (called,) = run_ranks(1, gathers_on_ranks.setters_called, public)
    assert set(called) == {"public True" if public else "private True"}


def test_a_model_that_is_not_sharded_is_refused() -> None:
    with pytest.raises(ValueError, match="all_gather_on_compute_stream needs a model that is sharded"):
        apply_compute_stream_gather(nn.Linear(2, 2))


# ------------------------------------------------------------------------------------------------ torchtitan's trainer

TRAINER = {
    "experts apart": (),
    "experts in the dense group": ("parallelism.expert_parallel_degree=1",),
    "full recompute, loss in chunks": ("training.activation_checkpoint=full", "training.loss_chunks=4"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINER)
def test_the_trainer_computes_what_torchtitans_own_computes(tmp_path: Path, name: str) -> None:
    base = ("training.steps=3", *TRAINER[name])
    cfg = composed(*base, ON)
    plain = run_ranks(4, train_plain, io.to_yaml(composed(*base)), str(tmp_path))
    ours = run_ranks(4, gathers_on_ranks.train, io.to_yaml(cfg), str(tmp_path))
    assert len(plain[0].numbers) == 3
    assert ours[0].numbers == plain[0].numbers
    units = ["tok_embeddings", *(f"layers.{i}" for i in range(cfg.model.n_layers)), "norm"]
    for steps in ours:
        for step, gathers in enumerate(steps.gathers):
            # The loss in chunks gathers the LM head itself, once its first use has freed it: outside of FSDP's passes, where
            # FSDP is synchronous and on the compute stream in any case.
            asked_for = [gather for gather in gathers if gather.after == "norm" and not gather.backward]
            assert len(asked_for) == (1 if cfg.training.loss_chunks > 1 and step > 0 else 0)
            by_order = [gather for gather in gathers if gather not in asked_for]
            assert all_asynchronous(by_order)
            assert issued_after(by_order) == one_ahead(units)


@pytest.mark.slow
@pytest.mark.parametrize("others", [(), ("comm.node_local_reshard=true",)], ids=["alone", "node-local"])
def test_the_trainer_gathers_fp8_asynchronously_and_computes_the_same(
    tmp_path: Path, others: tuple[str, ...]
) -> None:
    base = ("training.steps=3", "comm=fp8", *others)
    sync, ours = (
        run_ranks(4, gathers_on_ranks.train, io.to_yaml(composed(*base, *more)), str(tmp_path))
        for more in ((), (ON,))
    )
    assert len(sync[0].numbers) == 3
    assert ours[0].numbers == sync[0].numbers
    assert all(all_asynchronous(gathers) for steps in ours for gathers in steps.gathers)
    assert not any(gather.asynchronous for steps in sync for gathers in steps.gathers for gather in gathers)


# --------------------------------------------------------------------------------------------------------------- pools


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip(
            "memory pools of streams exist on a GPU only; of a CPU's, the recorder of streams keeps account"
        )
    return request.param


def pools(device: str, *several: Mechanisms) -> list[Pools]:
    """The pools of a step with each of these mechanisms; on a GPU in a process of its own, as reserved memory stays."""
    spawn = multiprocessing.get_context("spawn")
    with spawn.Pool(1, maxtasksperchild=1 if device == "cuda" else None) as process:
        found = process.starmap(pools_on_gpu.step, [(device, one) for one in several], chunksize=1)
    assert all(pools.weights for pools in found)
    return found


@pytest.mark.slow
def test_no_gather_takes_memory_of_another_stream(device: str) -> None:
    default, ours = pools(device, Mechanisms(), Mechanisms(gather=True))
    assert default.forward >= GATHERED[device]
    assert ours.forward == 0
    # Reduced gradients stay in the reduce stream's pool.
    assert default.backward - ours.backward >= GATHERED[device]


@pytest.mark.slow
def test_the_receive_buffer_of_gradients_takes_no_memory_of_another_stream(device: str) -> None:
    default, ours = pools(
        device, Mechanisms(gather=True, receive=False), Mechanisms(gather=True, receive=True)
    )
    assert default.backward - ours.backward >= GATHERED[device]


@pytest.mark.slow
def test_a_lag_gives_reduced_gradients_back_to_the_reduce_stream(device: str) -> None:
    kept, *lagging = pools(device, *(Mechanisms(gather=True, norm=True, lag=lag) for lag in (None, 1, 2)))
    assert kept.backward >= LAYERS * REDUCED[device]
    for lag, ours in zip((1, 2), lagging, strict=True):
        # Those of `lag` layers, and the one that is being reduced.
        assert kept.backward - ours.backward >= (LAYERS - lag - 1) * REDUCED[device]


@pytest.mark.slow
def test_an_fp8_gather_takes_one_message_of_the_stream_that_it_is_called_on(device: str) -> None:
    default, sync, ours = pools(device, Mechanisms(), Mechanisms(fp8=True), Mechanisms(gather=True, fp8=True))
    assert sync.forward - default.forward >= MESSAGE[device]
    if device == "cuda":  # on a CPU, quantising needs memory of its own
        assert sync.forward - default.forward < 2 * MESSAGE[device]
    assert ours.forward == 0
