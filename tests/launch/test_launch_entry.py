"""`launch.py` with an interpreter that lacks its packages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_an_interpreter_without_the_packages_gets_one_line() -> None:
    # -S leaves out site-packages, -I what the environment adds.
    done = subprocess.run(
        [sys.executable, "-S", "-I", "launch.py", "comm=fp8"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert "does not have the packages of europa_exp" in line
    assert "activate" in line
