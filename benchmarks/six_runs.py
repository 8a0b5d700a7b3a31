"""The six-run example from the command to its comparison, as a whole process.

    python benchmarks/six_runs.py

Target: 60 s on 2 cores.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """Run the example in an empty folder and print how long it took."""
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        subprocess.run(
            [sys.executable, str(ROOT / "launch.py"), "-m", "comm=fp8,bf16", "nccl.max_ctas=8,16,32"],
            check=True,
            cwd=folder,
        )
        print(
            f"six runs: {time.perf_counter() - begin:.1f} s (target 60 s), load before and now {os.getloadavg()[2]:.1f} {os.getloadavg()[0]:.1f}"
        )


if __name__ == "__main__":
    main()
