"""Every field reaches its mechanism: what hangs on the trainer's parameter groups once it is built, on real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from compose import composed
from ranks import run_ranks

from europa_exp.config import io

pytestmark = pytest.mark.slow


def built(frozen: str, folder: str) -> dict[str, Any]:
    """By parameter group, "module role": the chains of communication objects. And the norm's lag."""
    from europa_exp.comm.bf16_all_to_all import BF16AllToAll
    from europa_exp.comm.fsdp_groups import chain, groups
    from europa_exp.training.assemble import build_trainer

    trainer, _ = build_trainer(io.from_yaml(frozen), Path(folder))
    found: dict[str, Any] = {
        "gathers": {},
        "reductions": {},
        "received on compute stream": set(),
        "lag": None,
    }
    for group in groups(trainer.model_parts[0]):
        name = f"{group.name} {group.role.value}"
        reductions = chain(group.reduce_scatter)
        found["gathers"][name] = [type(comm).__name__ for comm in chain(group.all_gather)]
        found["reductions"][name] = [type(comm).__name__ for comm in reductions]
        found["received on compute stream"] |= {
            comm._receive_on_compute_stream for comm in reductions if isinstance(comm, BF16AllToAll)
        }
    if trainer._norm is not None:
        found["lag"] = trainer._norm._buffers.lag
    trainer.close()
    return found


def built_with(folder: Path, *overrides: str) -> dict[str, Any]:
    return run_ranks(4, built, io.to_yaml(composed(*overrides)), str(folder))[0]


def with_an(name: str, comms: dict[str, list[str]]) -> set[str]:
    return {group for group, chain in comms.items() if name in chain}


def test_off_is_plain_fsdp_but_for_the_counter(tmp_path: Path) -> None:
    found = built_with(tmp_path)
    for comms in (found["gathers"], found["reductions"]):
        assert {len(chain) for chain in comms.values()} == {2}
        assert all(chain[0].startswith("_Counted") for chain in comms.values())
    assert not found["received on compute stream"]


def test_each_field_reaches_the_groups_that_it_is_about(tmp_path: Path) -> None:
    found = built_with(
        tmp_path,
        "comm=fp8_a2a",
        "allocator=stream_pools",
        "optimizer.grad_norm=in_backward",
        "comm.gradient_release_lag=3",
        "training.loss_chunks=4",
    )
    layers = {f"layers.{i} expert" for i in range(composed().model.n_layers)}
    every = set(found["reductions"])
    assert layers < every
    assert with_an("FP8AllGather", found["gathers"]) == layers
    assert with_an("BF16AllToAll", found["reductions"]) == every - {"norm dense"}, (
        "the head is in the norm's group"
    )
    assert found["received on compute stream"] == {True}
    assert found["lag"] == 3


def test_the_all_to_all_of_experts_leaves_dense_gradients_alone(tmp_path: Path) -> None:
    found = built_with(tmp_path, "comm.gradient_reduce=expert_bf16_all_to_all")
    layers = {f"layers.{i} expert" for i in range(composed().model.n_layers)}
    assert with_an("BF16AllToAll", found["reductions"]) == layers
    assert found["received on compute stream"] == {False}
