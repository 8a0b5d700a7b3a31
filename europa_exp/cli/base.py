"""What every verb of the console script shares: the application, common options, how errors and tables are shown."""

# Typer reads the annotations at run time, and `europa --help` must not wait for anything else: each command imports its own.

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    name="europa",
    help="Follow and look at runs. They are started with `python launch.py`.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

RunsDir = Annotated[
    Path,
    typer.Option("--runs-dir", envvar="EUROPA_RUNS_DIR", help="Folder of the run folders.", metavar="DIR"),
]
Sweep = Annotated[
    str | None, typer.Option("--sweep", help="Only runs of this sweep (its name or a unique prefix).")
]
RUNS = Path("runs")
ABSENT = "–"


def command(name: str | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command whose expected errors are told in one message, without a traceback."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> None:
            try:
                function(*args, **kwargs)
                sys.stdout.flush()
            except BrokenPipeError:
                # The reader of the pipe has seen enough; without this Python complains when it flushes at exit.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            except KeyboardInterrupt:
                raise typer.Exit(130) from None
            except Exception as error:
                message = _message(error)
                if message is None:
                    raise
                print(f"europa: {message}", file=sys.stderr)
                raise typer.Exit(2) from None

        app.command(name)(guarded)
        return function

    return register


def _message(error: Exception) -> str | None:
    """What to tell of an error that was to be expected; None for one that is a fault of the program."""
    from europa_exp.config.errors import ConfigError
    from europa_exp.runs.compare import CompareError
    from europa_exp.runs.folder import RunFolderError
    from europa_exp.runs.lookup import LookupFailed, brief

    if isinstance(error, ConfigError):
        return brief(error) if len(error.problems) == 1 else str(error)
    return str(error) if isinstance(error, CompareError | RunFolderError | LookupFailed | OSError) else None


def duration(start: str | None, end: str | None) -> str:
    from datetime import UTC, datetime

    try:
        seconds = (
            (datetime.fromisoformat(end) if end else datetime.now(UTC)) - datetime.fromisoformat(start or "")
        ).total_seconds()
    except (ValueError, TypeError):
        return ABSENT
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def print_table(header: list[str], rows: list[list[str]], notes: list[str], styles: dict[str, str]) -> None:
    """As wide as the terminal, or plain when nobody looks."""
    if not sys.stdout.isatty():
        widths = [max(len(line[i]) for line in [header, *rows]) for i in range(len(header))]
        for line in [header, *rows]:
            print("  ".join(text.ljust(w) for text, w in zip(line, widths)).rstrip())
    else:
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
        for i, name in enumerate(header):
            table.add_column(name, overflow="fold", no_wrap=0 < i < len(header) - 1)
        for line in rows:
            table.add_row(*(Text(text, style=styles.get(text, "")) for text in line))
        Console(highlight=False).print(table)
    for note in notes:
        print(f"! {note}")
