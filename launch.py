"""Compose, check and submit runs: ``python launch.py [-m] [group=option] [field=value]``.

With ``-m``, ``a=1,2 b=range(3)`` runs every combination, and ``+sweeps=NAME`` a file of sweeps/. ``launch.preview=true``
shows what would run; ``rerun=RUN`` runs a recorded configuration again; ``--help`` lists groups and options.
"""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent

if __name__ == "__main__":
    if importlib.util.find_spec("hydra") is None:
        here = ROOT / ".venv" / "bin"
        way_out = f"source {here}/activate" if here.exists() else "make setup, then source .venv/bin/activate"
        sys.exit(f"{sys.executable} does not have the packages of europa_exp. Type: {way_out}")

    from europa_exp.launch.main import main

    sys.exit(main(ROOT))
