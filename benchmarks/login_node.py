"""What a login node waits for: composing one run, and checking 48 points before anything is submitted.

    python benchmarks/login_node.py [--times 5]

Whole processes, start of Python included; the median of several. Neither imports torch (a test holds that).
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CALLS = {
    "--cfg job": (["--cfg", "job"], 1.0),
    "preview of 48 points": (["-m", "training.steps=range(1,49)", "launch.preview=true"], 4.0),
}


def main() -> None:
    """Time the calls and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=5)
    arguments = parser.parse_args()
    print(f"{'call':<22} {'median':>8} {'fastest':>8} {'slowest':>8} {'target':>8}")
    for name, (options, target) in CALLS.items():
        seconds = []
        for _ in range(arguments.times):
            begin = time.perf_counter()
            subprocess.run(
                [sys.executable, str(ROOT / "launch.py"), *options], check=True, stdout=subprocess.DEVNULL
            )
            seconds.append(time.perf_counter() - begin)
        print(
            f"{name:<22} {statistics.median(seconds):>6.2f} s {min(seconds):>6.2f} s {max(seconds):>6.2f} s {target:>6.1f} s"
        )


if __name__ == "__main__":
    main()
