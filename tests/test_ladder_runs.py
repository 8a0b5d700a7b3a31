"""The communication rungs of the ladder on real ranks: the same training, fewer bytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent


def test_rungs_9_to_13_together_train_as_rung_8_does(tmp_path: Path) -> None:
    rungs = ["ladder/08_fp8_gather", "ladder/13_nccl_ctas"]
    words = f"-m experiment={','.join(rungs)} nccl.record=true training.steps=3 training.log_every=1 tracking=disabled"
    done = subprocess.run(
        [sys.executable, ROOT / "launch.py", *words.split()],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if not name.startswith("EUROPA_")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    runs = {}
    for run in (tmp_path / "runs").glob("[!.]*"):
        experiment = json.loads((run / "provenance.json").read_text())["overrides"][0]
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        runs[experiment.removeprefix("experiment=")] = rows
        notes = json.loads((run / "runtime.json").read_text())["notes"]
        assert any(note.endswith("nccl.record=true recorded nothing") for note in notes)
    eighth, last = (runs[rung] for rung in rungs)
    assert len(eighth) == len(last) == 3
    for before, after in zip(eighth, last, strict=True):
        # Sums of the same bf16 gradients in another order.
        assert after["loss/global_avg"] == pytest.approx(before["loss/global_avg"], rel=1e-4)
        assert after["grad_norm"] == pytest.approx(before["grad_norm"], rel=1e-3)
        assert after["comm/reduce_sent_gib"] == pytest.approx(before["comm/reduce_sent_gib"] / 2, rel=1e-6)
