"""What is kept, where, and from what a run goes on: on real ranks, with real checkpoints."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from compose import composed
from ranks import run_ranks
from torch.distributed.checkpoint import FileSystemWriter
from torchtitan.tools.logging import logger

from europa_exp.config import io
from europa_exp.config.schema import Config
from europa_exp.runs import checkpoints
from europa_exp.runs.folder import RunFolder
from europa_exp.training.checkpointing import KeepingCheckpointManager, _damage, _step_of

pytestmark = pytest.mark.slow

TWO_RANKS = (
    "parallelism.nodes=1",
    "parallelism.gpus_per_node=2",
    "parallelism.data_parallel_shard_degree=2",
    "parallelism.expert_parallel_degree=2",
    "training.log_every=1",
)


def on_two(*overrides: str) -> Config:
    return composed(*TWO_RANKS, *overrides)


def train(
    frozen: str, folder: str, after_step: Callable[..., None] | None, stop_at: int | None
) -> dict[str, Any]:
    """Train; ``after_step(step, place, manager)`` is called on rank 0 once a step is done and saved. What this rank saw."""
    warned: list[str] = []
    heard = logging.Handler(logging.WARNING)
    heard.emit = lambda record: warned.append(record.getMessage())
    logger.addHandler(heard)
    from europa_exp.training.assemble import build_trainer
    from europa_exp.training.stopping import Stopped

    cfg, run = io.from_yaml(frozen), RunFolder(folder)
    trainer, _ = build_trainer(cfg, run.path)
    losses: dict[int, float] = {}
    trainer.metrics_processor.attach(
        [lambda metrics, step: losses.__setitem__(step, metrics["loss/global_avg"])], dict
    )
    trainer.stop_when(lambda: stop_at is not None and trainer.step >= stop_at)
    goes_on = trainer.should_continue_training

    def between_steps() -> bool:
        if after_step is not None and trainer.step and os.environ["RANK"] == "0":
            place = checkpoints.place(run, cfg.cluster.checkpoint_dir)
            after_step(trainer.step, place, trainer.checkpointer)
        return goes_on()

    trainer.should_continue_training = between_steps
    with contextlib.suppress(Stopped):
        trainer.train()
    trainer.close()
    return {"losses": losses, "step": trainer.step, "warned": warned}


def on_ranks(
    cfg: Config, folder: Path, after_step: Callable[..., None] | None = None, stop_at: int | None = None
) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    world = cfg.parallelism.nodes * cfg.parallelism.gpus_per_node
    return run_ranks(world, train, io.to_yaml(cfg), str(folder), after_step, stop_at)[0]


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# ------------------------------------------------------------------------------------------------------------- the rule


LOOKED_AT = threading.Event()


def as_the_rule_says(step: int, place: Path, manager: KeepingCheckpointManager) -> None:
    """With one saved at every step: at any time the newest of them is whole, and one more is there than the rule keeps."""
    there = checkpoints.found(place)
    whole = [c.step for c in there if c.whole]
    assert step < 2 or {step, step - 1} & set(whole), (step, there)
    assert len([c for c in there if c.step % 5 and c.step <= step]) <= 3, (step, there)
    if manager.save_future is None:
        return
    if step == 1:
        write_last_file = FileSystemWriter.finish

        def slowly(writer: FileSystemWriter, *args: Any, **kwargs: Any) -> None:
            # Longer than the steps in between, as where checkpoints are large; the third as long as this test looks at it.
            time.sleep(0.1)
            assert Path(writer.path).name != "step-3" or LOOKED_AT.wait(60)
            write_last_file(writer, *args, **kwargs)

        FileSystemWriter.finish = slowly
    if step == 3:
        while not (place / "step-3").is_dir():
            time.sleep(0.01)
        manager._purge_stale_checkpoints()
        assert [(c.step, c.whole) for c in checkpoints.found(place)] == [(1, True), (2, True), (3, False)]
        LOOKED_AT.set()


@pytest.mark.parametrize("mode", ["false", "true"], ids=["sync", "async"])
def test_newest_and_every_nth_are_kept_through_a_stop(tmp_path: Path, mode: str) -> None:
    cfg = on_two(
        f"training.checkpoint_async={mode}",
        "training.steps=10",
        "training.checkpoint_every=1",
        "training.checkpoint_keep=2",
        "training.checkpoint_keep_every=5",
    )
    place = tmp_path / "checkpoints"
    first = on_ranks(cfg, tmp_path, as_the_rule_says, stop_at=7)
    assert first["step"] in (7, 8)
    before = names(place)
    assert before == {"step-5"} | {f"step-{first['step'] - back}" for back in (0, 1)}

    # What a killed job leaves: one cut before, one cut at a step that comes again, one half removed.
    for cut in ("step-2", "step-9", ".removed-1-abcdef"):
        (place / cut).mkdir()
        (place / cut / "__1_0.distcp").write_bytes(b"cut")
    second = on_ranks(cfg, tmp_path, as_the_rule_says)
    assert min(second["losses"]) == first["step"] + 1
    assert names(place) == {"step-5", "step-9", "step-10"}
    assert all(c.whole for c in checkpoints.found(place))
    assert checkpoints.newest_saved(RunFolder(tmp_path)) == 10


def test_cut_checkpoints_push_no_whole_one_out(tmp_path: Path) -> None:
    cfg = on_two("training.steps=4", "training.checkpoint_every=1", "training.checkpoint_keep=2")
    place = tmp_path / "checkpoints"
    on_ranks(cfg, tmp_path)
    for step in (5, 6, 7):
        (place / f"step-{step}").mkdir()
    longer = on_two("training.steps=5", "training.checkpoint_every=5", "training.checkpoint_keep=2")
    assert min(on_ranks(longer, tmp_path)["losses"]) == 5, "none that is cut is gone on from"
    assert {"step-4", "step-5"} <= names(place)


def clean_scratch_after_3(step: int, place: Path, manager: Any) -> None:
    if step == 3:
        place.rename(place.with_name("cleaned"))


def refuse_to_remove(step: int, place: Path, manager: Any) -> None:
    def refuse(checkpoint: Any) -> Path:
        raise PermissionError(13, "Permission denied", str(checkpoint.path))

    checkpoints.set_aside = refuse


@pytest.mark.parametrize("trouble", [clean_scratch_after_3, refuse_to_remove])
def test_trouble_with_removing_stops_no_training(tmp_path: Path, trouble: Callable[..., None]) -> None:
    cfg = on_two(
        "training.steps=6",
        "training.checkpoint_every=1",
        "training.checkpoint_keep=2",
        f"cluster.checkpoint_dir={tmp_path / 'scratch'}",
    )
    assert on_ranks(cfg, tmp_path / "run", trouble)["step"] == 6
    assert {"step-5", "step-6"} <= names(tmp_path / "run" / "checkpoints")


# ------------------------------------------------------------------------------------------------------ somewhere else


def test_on_scratch_it_goes_on_and_refuses_to_begin_again_when_that_was_cleaned(tmp_path: Path) -> None:
    cfg = on_two(
        "training.steps=4", "training.checkpoint_every=2", f"cluster.checkpoint_dir={tmp_path / 'scratch'}"
    )
    run, place = tmp_path / "run", tmp_path / "scratch" / "run"
    first = on_ranks(cfg, run, stop_at=1)
    assert (run / "checkpoints").resolve() == place
    assert names(place) == {"run", f"step-{first['step']}"}
    assert (place / "run").resolve() == run
    second = on_ranks(cfg, run)
    assert sorted(second["losses"]) == list(range(first["step"] + 1, 5))

    shutil.rmtree(place.parent)
    with pytest.raises(AssertionError, match=rf"RunFolderError: {place}: run has saved step 4 there"):
        on_ranks(cfg, run)
    assert not place.parent.exists() or checkpoints.newest(place) is None


# ------------------------------------------------------------------------------------------------- when files are gone


def lose_one(checkpoint: Path) -> str:
    next(checkpoint.glob("__1_*.distcp")).unlink()
    return "lacks 1 of its 2 data files"


def lose_all(checkpoint: Path) -> str:
    for data in checkpoint.glob("*.distcp"):
        data.unlink()
    return "lacks 2 of its 2 data files"


def cut_metadata(checkpoint: Path) -> str:
    os.truncate(checkpoint / ".metadata", 100)
    return "can't be read ("


def saving(*overrides: str) -> Config:
    return on_two("training.checkpoint_every=2", "optimizer.warmup_steps=0", *overrides)


def test_goes_on_from_the_newest_whose_files_are_all_there(tmp_path: Path) -> None:
    first = on_ranks(saving("training.steps=8", "training.checkpoint_keep=4"), tmp_path)
    place = tmp_path / "checkpoints"
    assert names(place) == {"step-2", "step-4", "step-6", "step-8"}
    what = {8: lose_one(place / "step-8"), 6: cut_metadata(place / "step-6")}

    second = on_ranks(saving("training.steps=8", "training.checkpoint_keep=2"), tmp_path)
    assert second["losses"] == {step: first["losses"][step] for step in (5, 6, 7, 8)}
    (warning,) = [text for text in second["warned"] if str(place) in text]
    assert warning.endswith("going on from step 4")
    left_out = names(place) - {"step-6", "step-8"}
    assert sorted(name.rpartition("-")[0] for name in left_out) == ["damaged-6", "damaged-8"]
    for name in left_out:
        step = int(name.split("-")[1])
        assert f"step-{step} {what[step]}" in warning
        assert f"is left out as {name}" in warning
        assert _damage(place / name).startswith(what[step]), "its step was saved again, and not into it"
    assert not any(_damage(place / f"step-{step}") for step in (6, 8))

    third = on_ranks(saving("training.steps=9", "training.checkpoint_keep=2"), tmp_path)
    assert sorted(third["losses"]) == [9]
    assert not [text for text in third["warned"] if str(place) in text], "it is told once"
    assert left_out < names(place)


def two_good_ones_as_soon_as_there_are(step: int, place: Path, manager: KeepingCheckpointManager) -> None:
    good = [c.step for c in checkpoints.found(place) if c.whole and not _damage(c.path)]
    assert good == {2: [2], 3: [2], 4: [2, 4], 5: [2, 4], 6: [4, 6]}[step]


def test_the_last_good_one_outlives_a_damaged_one_that_is_newer(tmp_path: Path) -> None:
    on_ranks(saving("training.steps=4"), tmp_path)
    lose_all(tmp_path / "checkpoints" / "step-4")
    longer = saving("training.steps=6", "training.checkpoint_keep=2")
    assert min(on_ranks(longer, tmp_path, two_good_ones_as_soon_as_there_are)["losses"]) == 3


def test_none_whole_is_one_clear_error_and_nothing_is_moved(tmp_path: Path) -> None:
    cfg = saving("training.steps=4")
    on_ranks(cfg, tmp_path)
    place = tmp_path / "checkpoints"
    what = {step: lose(place / f"step-{step}") for step, lose in ((4, lose_all), (2, lose_one))}
    with pytest.raises(AssertionError) as caught:
        on_ranks(cfg, tmp_path)
    said = str(caught.value)
    assert f"RunFolderError: {place}: {tmp_path.name} has saved step 4 there" in said
    assert f"that of step 4 {what[4]}; that of step 2 {what[2]}" in said
    assert f"rerun={tmp_path.name}" in said
    assert names(place) == {"step-2", "step-4"}


# ---------------------------------------------------------------------------------------------- an initial checkpoint


def test_an_initial_checkpoint_of_any_name_on_another_layout(tmp_path: Path) -> None:
    """Two ranks train three steps, four ranks in another layout go on; or it is said why they can't."""
    rows = (
        "training.global_batch_size=8",
        "training.local_batch_size=2",
        "training.param_precision=float32",
        "optimizer.warmup_steps=0",
        "training.log_every=1",
    )
    unbroken = on_ranks(on_two(*rows, "training.steps=5", "training.checkpoint_every=3"), tmp_path / "a")
    start = (tmp_path / "a" / "checkpoints" / "step-3").rename(tmp_path / "start")
    replicated = (
        "parallelism.data_parallel_replicate_degree=2",
        "parallelism.data_parallel_shard_degree=2",
        f"training.initial_checkpoint={start}",
    )
    four = composed(*rows, *replicated, "training.steps=5")
    assert four.parallelism.nodes * four.parallelism.gpus_per_node == 4
    went_on = on_ranks(four, tmp_path / "b")["losses"]
    assert sorted(went_on) == [4, 5]
    assert went_on == pytest.approx({step: unbroken["losses"][step] for step in (4, 5)}, rel=1e-4)

    next(start.glob("__1_*.distcp")).rename(tmp_path / "away")
    with pytest.raises(
        AssertionError, match=rf"RunFolderError: {start}: .*Give another training.initial_checkpoint"
    ):
        on_ranks(on_two(*rows, f"training.initial_checkpoint={start}", "training.steps=5"), tmp_path / "d")
    for steps in (2, 3):
        too_short = on_two(*rows, f"training.initial_checkpoint={start}", f"training.steps={steps}")
        with pytest.raises(AssertionError) as caught:
            on_ranks(too_short, tmp_path / "c")
        assert (
            f"training.steps={steps}: training.initial_checkpoint={start} has trained 3 steps already, and steps count "
            "from there. Give training.steps=<more than 3>"
        ) in str(caught.value)


def test_the_step_of_a_checkpoint_is_read_without_the_rest(tmp_path: Path) -> None:
    saved = {"train_state": {"step": 7, "ntokens_seen": 1}, "weight": torch.zeros(4)}
    dcp.save(saved, checkpoint_id=tmp_path / "whole", no_dist=True)
    assert _step_of(str(tmp_path / "whole")) == 7
    dcp.save({"weight": torch.zeros(4)}, checkpoint_id=tmp_path / "weights alone", no_dist=True)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / ".metadata").write_bytes(b"no pickle")
    for name in ("weights alone", "broken", "none"):
        assert _step_of(str(tmp_path / name)) == -1
