from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from making import CODE, config, make_run

from europa_exp.runs import folder
from europa_exp.runs.code import CodeState
from europa_exp.runs.folder import MAX_NAME, NewRun, RunFolder, RunFolderError, create_runs, list_runs
from europa_exp.runs.status import State


def entries(path: Path) -> set[str]:
    return {entry.name for entry in path.iterdir()}


def test_a_new_folder_holds_the_record_and_reads_back(tmp_path: Path) -> None:
    cfg = config("training.steps=7")
    run = make_run(tmp_path / "runs", cfg, sweep="six", parent="debug-old", overrides=["training.steps=7"])
    assert run.name == "debug-0123456789ab"
    assert {
        "config.yaml",
        "overrides.yaml",
        "provenance.json",
        "status.json",
        "code.diff",
        "logs",
    } == entries(run.path)
    assert run.config() == cfg
    assert run.overrides() == ["training.steps=7"]
    assert run.status().state is State.created
    origin = run.provenance()
    assert (origin["identity"], origin["sweep"], origin["parent"]) == ("0123456789ab", "six", "debug-old")
    assert origin["code"]["commit"] == CODE.commit
    assert (run.path / "code.diff").read_text() == CODE.diff
    assert run.metrics() == []


def test_clean_code_leaves_no_diff(tmp_path: Path) -> None:
    run = make_run(tmp_path, code=CodeState("2" * 40, "clean"))
    assert not (run.path / "code.diff").exists()


def test_taken_names_get_a_suffix_and_keep_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "a-1-r2").mkdir()  # somebody's own empty folder
    (tmp_path / "a-1-r3").write_text("somebody's file")
    runs = [make_run(tmp_path, name="a-1") for _ in range(3)]
    assert [run.name for run in runs] == ["a-1", "a-1-r4", "a-1-r5"]
    assert entries(tmp_path / "a-1-r2") == set()
    assert (tmp_path / "a-1-r3").read_text() == "somebody's file"


def test_the_suffix_of_a_long_name_keeps_length_and_hash(tmp_path: Path) -> None:
    name = "x" * (MAX_NAME - 13) + "-0123456789ab"
    make_run(tmp_path, name=name)
    second = make_run(tmp_path, name=name)
    assert len(second.name) == MAX_NAME
    assert second.name.endswith("-0123456789ab-r2")


def _create(place: str, barrier: multiprocessing.synchronize.Barrier) -> None:
    barrier.wait()
    create_runs(place, [NewRun(config(), "same-1", "1") for _ in range(5)], sweep=None, command=[], code=CODE)


def test_the_same_sweep_four_times_at_once_loses_nothing(tmp_path: Path) -> None:
    config()  # composed once, before the fork
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(4)
    workers = [context.Process(target=_create, args=(str(tmp_path / "runs"), barrier)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert [worker.exitcode for worker in workers] == [0] * 4
    runs = list_runs(tmp_path / "runs")
    assert {run.name for run in runs} == {"same-1"} | {f"same-1-r{n}" for n in range(2, 21)}
    assert len({run.provenance()["uid"] for run in runs}) == 20
    assert len(entries(tmp_path / "runs")) == 20


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "x" * (MAX_NAME + 1), "a\nb"])
def test_names_that_are_no_folder_names_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(RunFolderError, match="can't name a run folder"):
        make_run(tmp_path / "runs", name=name)
    assert entries(tmp_path) == set()


@pytest.mark.parametrize("failing", range(1, 12))
def test_a_disk_that_fills_up_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    """Whichever write of a sweep of two fails, no folder stays, not even the new runs folder."""
    real, count = folder.write_text, 0

    def write(path: Path, text: str) -> None:
        nonlocal count
        count += 1
        real(path, text)
        if count == failing:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(folder, "write_text", write)
    new = [NewRun(config(), "a-1", "1"), NewRun(config(), "b-2", "2")]
    if failing == 11:
        assert len(create_runs(tmp_path / "deep" / "runs", new, sweep="s", command=[], code=CODE)) == 2
        return
    with pytest.raises(RunFolderError, match=r"launch\.runs_dir=.*no space.*nothing was created"):
        create_runs(tmp_path / "deep" / "runs", new, sweep="s", command=[], code=CODE)
    assert entries(tmp_path) == set()


def test_a_rename_that_fails_takes_the_whole_sweep_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path, name="before-1")
    real = os.rename

    def rename(source: Path, target: Path) -> None:
        if Path(target).name == "b-2":
            raise OSError(errno.EACCES, "Permission denied", str(target))
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    new = [NewRun(config(), "a-1", "1"), NewRun(config(), "b-2", "2")]
    with pytest.raises(RunFolderError, match="can't be written"):
        create_runs(tmp_path, new, sweep="s", command=[], code=CODE)
    assert entries(tmp_path) == {"before-1"}


def test_a_file_in_the_way_of_the_runs_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(RunFolderError, match="a file is in the way"):
        make_run(tmp_path / "runs")
    with pytest.raises(RunFolderError, match="a file is in the way"):
        make_run(tmp_path / "runs" / "deeper")
    assert (tmp_path / "runs").read_text() == ""


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_unwritable_runs_folder_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir(mode=0o555)
    with pytest.raises(RunFolderError, match="can't be written"):
        make_run(tmp_path / "runs")


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("mount") is None, reason="mounting a small disk needs root"
)
def test_a_really_full_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    place = tmp_path / "small"
    place.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=32k", "tmpfs", str(place)], capture_output=True
    )
    if made.returncode != 0:
        pytest.skip("no right to mount")
    try:
        new = [NewRun(config(), f"a-{n}", str(n)) for n in range(8)]
        with pytest.raises(RunFolderError, match="no space"):
            create_runs(place / "runs", new, sweep="s", command=[], code=CODE)
        assert entries(place) == set()
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_an_interrupt_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(folder, "sync_folder", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make_run(tmp_path / "runs")
    assert entries(tmp_path) == set()


def test_no_secret_of_the_command_line_is_recorded(tmp_path: Path) -> None:
    secret = "hf_" + "aB3" * 12
    command = ["launch.py", f"+cluster.env.HF_TOKEN={secret}", "--password", "hunter2"]
    run = make_run(tmp_path, command=command, overrides=command[1:2])
    for path in run.path.rglob("*"):
        if path.is_file():
            assert secret not in path.read_text()
            assert "hunter2" not in path.read_text()
    assert run.overrides()[0].startswith("+cluster.env.HF_TOKEN=[redacted")
    assert any("argument 2" in line for line in run.provenance()["redacted"])


def test_bytes_that_are_no_utf8_pass(tmp_path: Path) -> None:
    odd = os.fsdecode(b"caf\xe9")
    code = CodeState("1" * 40, "f", diff=f"diff --git a/{odd} b/{odd}\n")
    run = make_run(tmp_path, command=["launch.py", odd], overrides=[f"tracking.notes={odd}"], code=code)
    assert b"caf\xe9" in (run.path / "code.diff").read_bytes()
    assert run.provenance()["command"][1] == odd


def test_broken_records_read_as_empty_and_a_missing_config_is_named(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    (tmp_path / "provenance.json").write_text('{"cut')
    (tmp_path / "overrides.yaml").write_text("[a")
    assert run.provenance() == {}
    assert run.overrides() == []
    with pytest.raises(RunFolderError, match="no run folder"):
        run.config()


def test_half_made_and_foreign_folders_are_no_runs(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    (tmp_path / ".new-0123").mkdir()
    (tmp_path / ".new-0123" / "config.yaml").write_text("")
    (tmp_path / "notes").mkdir()
    assert list_runs(tmp_path) == [run]
    assert list_runs(tmp_path / "absent") == []
