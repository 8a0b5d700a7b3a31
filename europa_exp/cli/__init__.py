"""The console script ``europa``: what was run, how it goes and went, how it compares, and what can be set.

One module a group of verbs; importing it registers them, in the order in which ``europa --help`` lists them.
"""

import sys

from europa_exp.cli import doctor, following, looking, measuring, sending  # noqa: F401
from europa_exp.cli.base import app


def main() -> None:
    """Run the command line. Every expected error is one message on standard error and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # A terminal without UTF-8 shows a question mark for a dash, which is better than nothing at all.
            stream.reconfigure(errors="replace")
    app()
