"""The whole way as a user walks it: the command line, real ranks, the record, the comparison, the rerun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent


def command(cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("EUROPA_")}
    return subprocess.run(
        [sys.executable, *words], cwd=cwd, env=environ, capture_output=True, text=True, timeout=400
    )


def launch(cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return command(cwd, str(ROOT / "launch.py"), *words)


def europa(cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return command(cwd, "-m", "europa_exp.cli", *words)


def metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def recorded(run: Path, name: str) -> dict:
    return json.loads((run / name).read_text())


def test_two_runs_their_comparison_and_an_exact_rerun(tmp_path: Path) -> None:
    swept = launch(tmp_path, "-m", "comm=fp8,bf16", "nccl.max_ctas=8", "training.steps=4")
    assert swept.returncode == 0, swept.stdout + swept.stderr
    runs = {recorded(run, "provenance.json")["identity"]: run for run in (tmp_path / "runs").glob("[!.]*")}
    assert len(runs) == 2
    for run in runs.values():
        assert recorded(run, "status.json")["state"] == "completed"
        assert [line["step"] for line in metrics(run)] == [1, 2, 3, 4]
        runtime = recorded(run, "runtime.json")
        assert runtime["environment"]["NCCL_MAX_CTAS"] == "8"
        assert any("no effect" in note for note in runtime["notes"])
        assert sorted(log.name for log in (run / "logs").glob("rank_*.log")) == [
            f"rank_{r}.log" for r in range(4)
        ]
        assert list((run / "wandb").rglob("*.wandb")), "the offline W&B run is missing"

    compared = europa(tmp_path, "compare", "--format", "json")
    assert compared.returncode == 0, compared.stderr
    rows = json.loads(compared.stdout)["rows"]
    assert sorted(row["fields"]["comm.expert_all_gather"] for row in rows) == ["bf16", "fp8"]

    again = launch(tmp_path, "-m", "comm=fp8,bf16", "nccl.max_ctas=8", "training.steps=4")
    assert again.returncode == 0
    assert again.stdout.count("skipped") == 2

    identity, first = next(iter(runs.items()))
    rerun = launch(tmp_path, f"rerun={identity}")
    assert rerun.returncode == 0, rerun.stdout + rerun.stderr
    [second] = [
        run
        for run in (tmp_path / "runs").glob("[!.]*")
        if run not in runs.values() and recorded(run, "provenance.json")["identity"] == identity
    ]
    assert recorded(second, "provenance.json")["parent"] == first.name
    same = ("loss/global_avg", "loss/global_max", "grad_norm")
    assert [[line[key] for key in same] for line in metrics(second)] == [
        [line[key] for key in same] for line in metrics(first)
    ]


def test_an_exception_in_training_is_told_and_the_other_run_completes(tmp_path: Path) -> None:
    # A checkpoint that is none: right as far as can be checked without opening it, wrong when it is read.
    (tmp_path / "nothing").mkdir()
    (tmp_path / "nothing" / ".metadata").write_bytes(b"no pickle")
    swept = launch(
        tmp_path,
        "-m",
        f"training.initial_checkpoint=null,{tmp_path / 'nothing'}",
        "training.steps=2",
        "trust=true",
    )
    assert swept.returncode == 1, swept.stdout + swept.stderr
    states = {recorded(run, "status.json")["state"]: run for run in (tmp_path / "runs").glob("[!.]*")}
    assert sorted(states) == ["completed", "failed"]
    error = recorded(states["failed"], "status.json")["error"]
    assert error["traceback"]
    assert error["type"] in swept.stdout + swept.stderr
    log = (states["failed"] / "logs" / f"rank_{error['rank']}.log").read_text()
    assert "Traceback" in log
