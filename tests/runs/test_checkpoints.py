"""Checkpoints on disk, without torch: where they lie, which may go, and what is said of them when they are gone."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from making import make_run

from europa_exp.runs import checkpoints
from europa_exp.runs.checkpoints import Checkpoint, stale
from europa_exp.runs.folder import RunFolder, RunFolderError


def put(folder: Path, *steps: int, cut: bool = False) -> None:
    for step in steps:
        (folder / f"step-{step}").mkdir(parents=True)
        (folder / f"step-{step}" / "__0_0.distcp").write_bytes(b"x")
        if not cut:
            (folder / f"step-{step}" / ".metadata").touch()


def of(*steps: int) -> list[Checkpoint]:
    """Checkpoints of these steps; negative ones were cut."""
    return [Checkpoint(abs(step), Path(f"step-{abs(step)}"), step > 0) for step in steps]


@pytest.mark.parametrize(
    ("there", "keep", "every", "writing", "gone"),
    [
        ((10, 20, 30, 40), 2, 0, 40, {10, 20}),
        ((10, 20, 30, 40), 0, 0, 40, set()),
        ((10, 20, 30, 40, 50), 2, 20, 50, {10, 30}),
        ((10, 20), 3, 0, 20, set()),
        # The one that is being written is none of the newest two.
        ((10, 20, 30, -40), 2, 0, 40, {10}),
        # Cut ones push no whole one out, and go; those from the saved step on may be in the hands of another rank.
        ((10, -20, 30, -40, 50, -60), 2, 0, 50, {10, 20, 40}),
        ((10, 20, -30, -40, -60), 2, 0, 50, {30, 40}),
        ((10, -20, 30, -40), 0, 0, None, {20, 40}),
        # A cut one is not kept for good.
        ((10, -20, 30, 40, 50), 2, 20, 50, {10, 20, 30}),
        ((9, 10, 100), 2, 0, 100, {9}),
    ],
)
def test_the_rule(there: tuple[int, ...], keep: int, every: int, writing: int | None, gone: set[int]) -> None:
    assert {c.step for c in stale(of(*there), keep=keep, keep_every=every, writing=writing)} == gone


def test_what_is_there(tmp_path: Path) -> None:
    assert checkpoints.newest(tmp_path / "none") is None
    assert checkpoints.found(tmp_path / "none") == []
    put(tmp_path, 9, 10)
    put(tmp_path, 20, cut=True)
    put(tmp_path / "step-30.tmp", 40)
    assert checkpoints.newest(tmp_path) == 10
    assert [(c.step, c.whole) for c in checkpoints.found(tmp_path)] == [(9, True), (10, True), (20, False)]


def test_cut_ones_are_removed_with_what_a_removal_left(tmp_path: Path) -> None:
    put(tmp_path, 9, 10)
    put(tmp_path, 20, cut=True)
    aside = checkpoints.set_aside(checkpoints.found(tmp_path)[0])
    assert aside.is_dir()
    assert checkpoints.newest(tmp_path) == 10
    put(tmp_path, 9)  # the same step again, while the old one is being removed
    assert checkpoints.half_removed(tmp_path) == [aside]
    assert checkpoints.remove_cut(tmp_path) == ["step-20"]
    assert {p.name for p in tmp_path.iterdir()} == {"step-9", "step-10"}
    assert checkpoints.remove_cut(tmp_path / "none") == []


@pytest.mark.parametrize("away", [checkpoints.set_aside, checkpoints.leave_out])
def test_nothing_that_is_out_of_the_way_is_taken_for_a_checkpoint(
    tmp_path: Path, away: Callable[[Checkpoint], Path]
) -> None:
    put(tmp_path, 5)
    aside = away(checkpoints.found(tmp_path)[0])
    assert not re.search(r"step-(\d+)", aside.name), "CheckpointManager._find_load_step looks for this"
    assert checkpoints.found(tmp_path) == []


def test_a_damaged_one_is_kept_and_its_step_can_be_damaged_again(tmp_path: Path) -> None:
    kept = set()
    for _ in range(2):
        put(tmp_path, 5)
        kept.add(checkpoints.leave_out(checkpoints.found(tmp_path)[0]))
    put(tmp_path, 6)
    assert checkpoints.half_removed(tmp_path) == []
    assert checkpoints.remove_cut(tmp_path) == []
    assert len(kept) == 2
    assert all((path / ".metadata").is_file() and path.name.startswith("damaged-5-") for path in kept)
    assert checkpoints.newest(tmp_path) == 6


# ------------------------------------------------------------------------------------------------------- where they lie


def test_in_the_run_folder(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs")
    folder = checkpoints.place(run, None)
    assert folder == run.path / "checkpoints"
    checkpoints.make_place(run, folder)
    assert list(folder.iterdir()) == []
    assert checkpoints.place(run, "/scratch") == folder, "a run that has begun stays where it is"


def test_elsewhere_with_links_both_ways(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs")
    folder = checkpoints.place(run, str(tmp_path / "scratch" / "me"))
    assert not folder.exists()
    checkpoints.make_place(run, folder)
    assert folder.parent == tmp_path / "scratch" / "me"
    assert folder.name.startswith(f"{run.name}-")
    assert os.readlink(run.checkpoints) == str(folder)
    assert (folder / "run").resolve() == run.path
    checkpoints.make_place(run, folder)
    assert checkpoints.place(run, None) == checkpoints.place(run, "/other") == folder
    moved = run.path.rename(tmp_path / "moved")
    assert checkpoints.place(RunFolder(moved), str(tmp_path / "scratch" / "me")) == folder


def test_runs_of_one_name_do_not_meet(tmp_path: Path) -> None:
    """Two runs folders, and a run in the place of one that was removed."""
    first, second = (make_run(tmp_path / name, name="same") for name in ("a", "b"))
    places = {checkpoints.place(run, str(tmp_path / "scratch")) for run in (first, second)}
    shutil.rmtree(first.path)
    again = make_run(tmp_path / "a", name="same")
    places.add(checkpoints.place(again, str(tmp_path / "scratch")))
    assert len(places) == 3


def test_a_place_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs")
    (tmp_path / "file").touch()
    with pytest.raises(RunFolderError, match=r"cluster\.checkpoint_dir") as caught:
        checkpoints.make_place(run, checkpoints.place(run, str(tmp_path / "file")))
    assert str(tmp_path / "file") in str(caught.value)
    assert not os.path.lexists(run.checkpoints)


# ------------------------------------------------------------------------------------------------------------ going on


def test_a_run_that_saved_nothing_starts_and_one_whose_checkpoints_are_gone_does_not(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs")
    folder = checkpoints.place(run, str(tmp_path / "scratch"))
    assert checkpoints.resume_step(run, folder) is None
    assert checkpoints.describe(run) is None
    checkpoints.make_place(run, folder)
    put(folder, 10, cut=True)
    assert checkpoints.resume_step(run, folder) is None, "killed while it wrote its first one"
    assert checkpoints.describe(run) == f"none yet, in {folder}"
    put(folder, 20, 30)
    for step in (20, 30):
        checkpoints.note_saved(run, step)
    assert checkpoints.resume_step(run, folder) == 30
    assert checkpoints.describe(run) == f"2, the newest of step 30, in {folder}"
    assert checkpoints.resume_step(run, folder, {30: "lacks 1 of its 2 data files"}) == 20
    with pytest.raises(RunFolderError) as caught:
        checkpoints.resume_step(run, folder, {30: "lacks one", 20: "lacks two"})
    for part in (
        "saved step 30",
        "that of step 30 lacks one; that of step 20 lacks two",
        f"rerun={run.name}",
    ):
        assert part in str(caught.value)
    (folder / "step-30" / ".metadata").unlink()
    assert checkpoints.resume_step(run, folder) == 20
    assert "the newest of step 20, but step 30 is gone" in str(checkpoints.describe(run))
    put(folder, 25)
    checkpoints.note_saved(run, 25)
    assert checkpoints.describe(run) == f"2, the newest of step 25, in {folder}", "30 is not missed any more"
    checkpoints.note_saved(run, 30)
    shutil.rmtree(folder.parent)
    assert run.checkpoints.is_symlink()
    assert checkpoints.place(run, None) == folder
    with pytest.raises(RunFolderError) as caught:
        checkpoints.resume_step(run, folder)
    for part in (str(folder), "step 30", f"rerun={run.name}"):
        assert part in str(caught.value)
    assert str(checkpoints.describe(run)).startswith(f"gone: step 30 was saved in {folder}")
