"""``submit`` as a command: RUNS_DIR ENTRY PRELOAD CONFIG.yaml... (run by tests, not a test itself)."""

import sys
from pathlib import Path

from launching import point

from europa_exp.config import io
from europa_exp.launch.submit import submit

if __name__ == "__main__":
    runs_dir, entry, preload, *paths = sys.argv[1:]
    points = []
    for i, path in enumerate(paths):
        cfg = io.load(Path(path))
        cfg.launch.runs_dir = runs_dir
        points.append(point(cfg, f"run{i}"))
    sys.exit(submit(points, points[0].cfg.launch, sweep="s", command=["test"], entry=entry, preload=preload))
