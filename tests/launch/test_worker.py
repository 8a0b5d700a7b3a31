"""A rank's own process: output, records, exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from launching import config, environ, make_runs, mentioning, until

from europa_exp.launch.worker import RankSpec
from europa_exp.runs.folder import RunFolder

pytestmark = pytest.mark.timeout(100)

ENTRIES = """
import os, sys, warnings
class Odd(BaseException): pass
def fine(cfg, run, runtime): print("out"); print("err", file=sys.stderr); os.write(2, b"raw")
def raises(cfg, run, runtime):
    try: 1 / 0
    except ZeroDivisionError as error: raise LookupError("nothing there") from error
def base(cfg, run, runtime): raise Odd("odd")
def exit_text(cfg, run, runtime): sys.exit("no way")
def exit_zero(cfg, run, runtime): sys.exit(0)
def exit_big(cfg, run, runtime): sys.exit(256 + 3)
def unicode(cfg, run, runtime): print("\\udcff \\u2713"); raise ValueError("\\udcff")
def rewrites(cfg, run, runtime): run.write_runtime({**runtime, "device": "cpu"})
def no_folder(cfg, run, runtime):
    import shutil; shutil.rmtree(run.path); raise ValueError("late")
"""


@pytest.fixture
def run(tmp_path) -> RunFolder:
    (tmp_path / "entries.py").write_text(ENTRIES)
    return make_runs(tmp_path / "runs", config())[0]


def be_rank(
    run: RunFolder, entry: str, rank: int = 1, parent: int | None = None
) -> subprocess.CompletedProcess:
    spec = RankSpec(
        str(run.path), rank, 12345, parent or os.getpid(), notes=["a note"], entry=f"entries:{entry}"
    )
    path = os.pathsep.join([str(run.path.parents[1]), environ()["PYTHONPATH"]])
    return subprocess.run(
        [sys.executable, "-m", "europa_exp.launch.worker", spec.to_json()],
        env=environ(PYTHONPATH=path, PYTHONIOENCODING="utf-8"),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def error(run: RunFolder, rank: int = 1) -> dict:
    return json.loads(run.error_file(rank).read_text())


def test_all_output_goes_to_the_log(run):
    done = be_rank(run, "fine")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert set(run.log(1).read_text().split()) == {"out", "err", "raw"}
    assert not run.error_file(1).exists()


def test_an_exception_is_recorded_whole(run):
    assert be_rank(run, "raises").returncode == 1
    record = error(run)
    assert (record["rank"], record["type"], record["message"]) == (1, "LookupError", "nothing there")
    assert "ZeroDivisionError" in record["traceback"]
    assert "worker.py" not in record["traceback"].partition("direct cause")[2]
    assert record["time"]
    assert "LookupError: nothing there" in run.log(1).read_text()


@pytest.mark.parametrize(
    ("entry", "code", "kind"),
    [
        ("base", 1, "Odd"),
        ("exit_text", 1, "SystemExit"),
        ("exit_big", 3, "SystemExit"),
        ("unicode", 1, "ValueError"),
    ],
)
def test_every_way_to_fail(run, entry, code, kind):
    assert be_rank(run, entry).returncode == code
    assert error(run)["type"] == kind


def test_exit_zero_is_success(run):
    assert be_rank(run, "exit_zero").returncode == 0
    assert not run.error_file(1).exists()


def test_an_entry_that_is_not_there(run):
    assert be_rank(run, "nowhere").returncode == 1
    assert error(run)["type"] == "AttributeError"


def test_rank_0_records_its_environment_and_training_adds_to_it(run):
    assert be_rank(run, "fine", rank=0).returncode == 0
    runtime = run.runtime()
    assert runtime["environment"]["MASTER_PORT"] == "12345"
    assert (runtime["world_size"], runtime["preloaded"], runtime["notes"]) == (2, False, ["a note"])
    assert be_rank(run, "rewrites", rank=0).returncode == 0
    assert run.runtime() == {**runtime, "device": "cpu"}


def test_other_ranks_leave_the_record_alone(run):
    be_rank(run, "fine", rank=1)
    assert run.runtime() == {}


def test_nccl_writes_into_the_run_folder_when_it_is_to_be_recorded(tmp_path, run):
    assert "NCCL_DEBUG_FILE" not in environment_of(run)
    cfg = config()
    cfg.nccl.record = True
    run = make_runs(tmp_path / "recorded", cfg)[0]
    run.nccl_log(0).write_text("of an earlier attempt")
    found = environment_of(run)
    assert (found["NCCL_DEBUG"], found["NCCL_DEBUG_FILE"]) == ("INFO", str(run.nccl_log(0)))
    assert not run.nccl_log(0).exists()


def environment_of(run: RunFolder) -> dict[str, str]:
    assert be_rank(run, "fine", rank=0).returncode == 0
    return run.runtime()["environment"]


def test_a_folder_that_is_gone(run):
    assert be_rank(run, "no_folder").returncode == 1
    done = be_rank(run, "fine")
    assert done.returncode == 1
    assert "can't be written" in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_an_exit_code_not_a_hang(run):
    run.log(1).symlink_to("/dev/full")
    assert be_rank(run, "raises").returncode == 1
    assert error(run)["type"] == "LookupError"


def test_a_rank_whose_parent_is_gone_does_not_begin(run):
    assert be_rank(run, "fine", parent=1).returncode == 1
    assert not run.log(1).exists()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal")
def test_a_rank_dies_with_its_parent(tmp_path):
    [run] = make_runs(tmp_path / "runs", config())
    code = (
        "import os, sys, subprocess\nfrom europa_exp.launch.worker import RankSpec\n"
        "spec = RankSpec(sys.argv[1], 0, 1, os.getpid(), entry='rank_targets:sleep_for_ever')\n"
        "subprocess.Popen([sys.executable, '-m', 'europa_exp.launch.worker', spec.to_json()])\n"
        "sys.stdin.read()"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(run.path)],
        env=environ(EUROPA_TEST=str(tmp_path)),
        stdin=subprocess.PIPE,
    )
    until(lambda: (run.path / "up_0").exists())
    parent.kill()
    parent.wait()
    parent.stdin.close()
    until(lambda: not mentioning(str(tmp_path)), 10)
