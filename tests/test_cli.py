"""The console script as people call it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from recorded import log_steps, record


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("cli")
    log_steps(record(place, "comm=bf16", sweep="pair"), seed=1)
    log_steps(record(place, "comm=fp8", sweep="pair"), seed=2, tokens_per_second=3600)
    log_steps(record(place, "nccl.max_ctas=16", sweep="other", state="failed"), steps=4)
    return place


def europa(*args: str, runs: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    full = {**os.environ, "COLUMNS": "100", **env}
    full.pop("EUROPA_RUNS_DIR", None)
    if runs is not None:
        full["EUROPA_RUNS_DIR"] = str(runs)
    command = [sys.executable, "-m", "europa_exp.cli", *args]
    return subprocess.run(command, env=full, capture_output=True, text=True, timeout=60)


def test_list(runs: Path) -> None:
    done = europa("list", runs=runs)
    lines = done.stdout.strip().split("\n")
    assert done.returncode == 0
    assert lines[0].split() == ["run", "state", "started", "took", "step", "loss", "sweep"]
    assert len(lines) == 4
    assert "failed" in europa("list", "--state", "failed", runs=runs).stdout
    assert len(europa("list", "--sweep", "pair", runs=runs).stdout.strip().split("\n")) == 3
    assert europa("list", "--runs-dir", str(runs)).stdout == done.stdout


def test_list_of_nothing(tmp_path: Path) -> None:
    done = europa("list", "--runs-dir", str(tmp_path / "none"))
    assert (done.returncode, done.stdout) == (0, "")
    assert "No runs in" in done.stderr


def test_list_with_broken_folders(tmp_path: Path) -> None:
    broken = record(tmp_path)
    (broken.path / "config.yaml").unlink()
    (broken.path / "status.json").write_bytes(b"\xff{")
    done = europa("list", runs=tmp_path)
    assert done.returncode == 0
    assert f"! {broken.name}: config.yaml is missing" in done.stdout
    assert "unknown" in done.stdout
    assert europa("show", broken.name, runs=tmp_path).returncode == 0
    assert europa("compare", broken.name, runs=tmp_path).returncode == 0


def test_show(runs: Path) -> None:
    done = europa("show", "max_ctas", runs=runs)
    assert done.returncode == 0
    for text in (
        "failed",
        "RuntimeError: loss is not finite (rank 3)",
        "rank 3: 1",
        "nccl.max_ctas=16",
        "torch 2.",
        "warm-up",
        "max_ctas: 16",
    ):
        assert text in done.stdout


def test_show_tells_what_changed_since_the_parent(tmp_path: Path) -> None:
    parent = record(tmp_path)
    record(tmp_path, "comm=fp8", parent=parent.name)
    assert "comm.expert_all_gather: bf16 -> fp8" in europa("show", "expert", runs=tmp_path).stdout


def test_compare(runs: Path) -> None:
    latest = europa("compare", runs=runs)
    assert latest.returncode == 0
    assert latest.stdout.startswith("sweep other")
    data = json.loads(
        europa("compare", "--sweep", "pair", "--format", "json", "--metrics", "step_s", runs=runs).stdout
    )
    assert [r["metrics"]["time/step_s"]["verdict"] for r in data["rows"]] == [None, "faster"]
    swapped = europa("compare", "default", "--baseline", "expert", "--metrics", "step_s", runs=runs).stdout
    assert "slower" in swapped


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("show", "nothing"), "no run 'nothing'"),
        (("show", ""), "an empty name"),
        (("compare", "nothing"), "no run 'nothing'"),
        (("compare", "--sweep", "nothing"), "no sweep 'nothing'"),
        (("compare", "--by", "nothing"), "by=nothing"),
        (("compare", "--metrics", "nothing"), "metrics=nothing"),
        (("compare", "--baseline", "nothing"), "no run 'nothing'"),
        (("compare", "--format", "xml"), "format=xml: must be one of table"),
        (("compare", "--warmup", "-1"), "--warmup"),
        (("list", "--state", "done"), "state=done: must be one of"),
        (("fields", "ncl"), "Did you mean nccl?"),
        (("frobnicate",), "No such command"),
    ],
)
def test_errors_are_one_message_and_exit_code_2(runs: Path, args: tuple[str, ...], message: str) -> None:
    done = europa(*args, runs=runs)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_fields() -> None:
    done = europa("fields", "nccl")
    assert done.returncode == 0
    assert "nccl.max_ctas  (a whole number, 1 to 64, or null; off: null)" in done.stdout
    assert "Source: 16 gave +7%" in done.stdout
    assert "training." not in done.stdout
    everything = europa("fields").stdout
    assert "training.seq_len" in everything
    assert everything.count("top level\n") == 1


def test_a_closed_pipe_is_silent(runs: Path) -> None:
    # Nobody reads: the pipe is closed before the command writes.
    reader, writer = os.pipe()
    os.close(reader)
    env = {**os.environ, "EUROPA_RUNS_DIR": str(runs)}
    for args in (["fields"], ["list"], ["compare"]):
        command = [sys.executable, "-m", "europa_exp.cli", *args]
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, env=env, timeout=60)
        assert done.stderr == b""
    os.close(writer)


def test_a_terminal_without_unicode_is_no_error(runs: Path) -> None:
    done = europa("compare", runs=runs, PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("args", [["--help"], ["list"], ["compare", "--sweep", "pair"], ["fields"]])
def test_nothing_heavy_is_imported(runs: Path, args: list[str]) -> None:
    script = (
        "import sys\n"
        f"sys.argv = ['europa', *{args!r}]\n"
        "from europa_exp.cli import main\n"
        "try:\n    main()\nexcept SystemExit as leave:\n    assert not leave.code\n"
        "heavy = {'torch', 'torchtitan', 'wandb', 'hydra', 'numpy', 'submitit'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "if sys.argv[1:] == ['--help']:\n"
        "    assert not {'yaml', 'omegaconf'} & set(sys.modules)\n"
    )
    env = {**os.environ, "EUROPA_RUNS_DIR": str(runs)}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
