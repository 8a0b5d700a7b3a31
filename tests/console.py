"""The console script as a process, for tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def europa(*args: str, runs: Path, timeout: float = 60, **env: str) -> subprocess.CompletedProcess[str]:
    full = {**os.environ, "COLUMNS": "200", "EUROPA_RUNS_DIR": str(runs), **env}
    return subprocess.run(
        [sys.executable, "-m", "europa_exp.cli", *args],
        env=full,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
