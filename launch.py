"""Compose, check and submit runs: ``python launch.py [-m] [group=option] [field=value]``.

With ``-m``, ``a=1,2 b=range(3)`` runs every combination, and ``+sweeps=NAME`` a file of sweeps/. ``launch.preview=true``
shows what would run; ``rerun=RUN`` runs a recorded configuration again; ``--help`` lists groups and options.
"""

import sys
from pathlib import Path

from europa_exp.launch.main import main

if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parent))
