"""How long a collective may take, read from every process group that real ranks are in."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from compose import composed
from ranks import run_ranks
from torch.distributed.distributed_c10d import _world

from europa_exp.config import io

pytestmark = pytest.mark.slow

INIT, TRAIN = timedelta(seconds=1234), timedelta(seconds=321)
NODE = "mesh_node"
"""What torch calls the groups of a mesh dimension that is called node."""


def timeouts() -> dict[str, timedelta]:
    """Description and number of each of this rank's groups that can carry collectives, and the time-out of its backend."""
    cpu = torch.device("cpu")
    backends = {f"{pg.group_desc} {pg.group_name}": pg._get_backend(cpu) for pg in _world.pg_map}
    return {name: b.options._timeout for name, b in backends.items() if b.name() == "gloo"}


def train(frozen: str, folder: str) -> tuple[dict[str, timedelta], dict[str, timedelta], list[timedelta]]:
    """The time-outs before training and after it, and that of the node's group at each step's begin."""
    from europa_exp.training.assemble import build_trainer

    trainer, _ = build_trainer(io.from_yaml(frozen), Path(folder))
    before, at_steps = timeouts(), []
    train_step = trainer.train_step

    def watched(batches) -> None:
        at_steps.extend(timeout for name, timeout in timeouts().items() if name.startswith(f"{NODE} "))
        train_step(batches)

    trainer.train_step = watched
    trainer.train()
    trainer.close()
    return before, timeouts(), at_steps


def on_ranks(folder: Path, *overrides: str) -> list[tuple[dict[str, timedelta], dict[str, timedelta], list]]:
    cfg = composed(
        "training.steps=3",
        f"training.init_timeout_s={INIT.seconds}",
        f"training.train_timeout_s={TRAIN.seconds}",
        *overrides,
    )
    world = cfg.parallelism.nodes * cfg.parallelism.gpus_per_node
    return run_ranks(world, train, io.to_yaml(cfg), str(folder))


LAYOUTS = {
    "one replica": (),
    "two replicas": ("parallelism.nodes=4", "parallelism.data_parallel_replicate_degree=2"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_group_has_the_init_time_out_and_then_the_train_time_out(tmp_path: Path, layout: str) -> None:
    for before, after, of_node in on_ranks(tmp_path, "comm.node_local_reshard=true", *LAYOUTS[layout]):
        assert before.keys() == after.keys()
        assert {name.split()[0] for name in before} >= {"default_pg", "mesh_ep", "mesh_efsdp", NODE}
        assert set(before.values()) == {INIT}, before
        assert set(after.values()) == {TRAIN}, after
        assert of_node == [INIT, TRAIN, TRAIN]


def test_a_resumed_run_lowers_it_after_its_own_first_step(tmp_path: Path) -> None:
    same = ("comm.node_local_reshard=true", "training.checkpoint_every=2")
    on_ranks(tmp_path, *same, "training.steps=2")
    for before, _, of_node in on_ranks(tmp_path, *same, "training.steps=4"):
        assert set(before.values()) == {INIT}, before
        assert of_node == [INIT, TRAIN]


def test_writing_a_checkpoint_in_the_background_may_take_longer_than_a_collective(tmp_path: Path) -> None:
    for _, after, _ in on_ranks(tmp_path, "training.checkpoint_every=1", "training.checkpoint_async=true"):
        (background,) = (timeout for name, timeout in after.items() if name.startswith("undefined "))
        assert background == dist.default_pg_timeout
