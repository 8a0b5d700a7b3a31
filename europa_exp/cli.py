"""The console script ``europa``: what was run, how it went, how it compares, and what can be set."""

# Typer reads the annotations at run time, and `europa --help` must not wait for anything else: each command imports its own.

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from europa_exp.runs.folder import RunFolder
    from europa_exp.runs.lookup import Entry

app = typer.Typer(
    name="europa",
    help="Look at recorded runs. They are started with `python launch.py`.",
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


def _command(name: str | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
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


@_command("list")
def list_command(
    runs_dir: RunsDir = RUNS,
    sweep: Sweep = None,
    state: Annotated[
        str | None,
        typer.Option(
            "--state",
            help="Only runs in this state: created, queued, running, completed, failed, cancelled, lost, unknown.",
        ),
    ] = None,
) -> None:
    """List the runs, the newest last, with what is wrong where something is."""
    from europa_exp.runs.lookup import LookupFailed, entries, find_sweep
    from europa_exp.runs.status import State

    states = [*(str(s) for s in State), "lost"]
    if state is not None and state not in states:
        raise LookupFailed(f"state={state}: must be one of {', '.join(states)}")
    found = entries(runs_dir)
    if sweep is not None:
        _, runs = find_sweep(runs_dir, sweep)
        found = [e for e in found if e.run in set(runs)]
    total = len(found)
    found = [e for e in found if state is None or e.state == state]
    if not found:
        where = f"in {runs_dir.absolute()}"
        print(
            f"No runs {where}." if not total else f"None of the {total} runs {where} is {state}.",
            file=sys.stderr,
        )
        return
    _print_table(
        ["run", "state", "started", "took", "step", "loss", "sweep"],
        [_listed(e) for e in found],
        [f"{e.name}: {problem}" for e in found for problem in e.problems()],
        styles={"completed": "green", "failed": "red", "lost": "red", "unknown": "red", "running": "cyan"},
    )


def _listed(entry: "Entry") -> list[str]:
    from europa_exp.runs.table import number

    row, _ = entry.last
    status = entry.status
    started = status.started_at or entry.created_at
    loss = row.get("loss/global_avg")
    return [
        entry.name,
        entry.state,
        started[:16].replace("T", " ") or ABSENT,
        _duration(status.started_at, status.ended_at),
        str(row["step"]) if "step" in row else ABSENT,
        number(loss) if isinstance(loss, int | float) else ABSENT if loss is None else str(loss),
        entry.sweep or ABSENT,
    ]


@_command()
def show(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A folder, a name, a unique prefix, or a hash.")],
    runs_dir: RunsDir = RUNS,
) -> None:
    """Show one run: state, what was asked for, where it comes from, what it measured."""
    from europa_exp.runs.lookup import Entry, find

    entry = Entry(find(runs_dir, run))
    lines: list[str] = [entry.name, ""]
    for title, section in (
        ("State", _state(entry)),
        ("Asked for", _asked(entry)),
        ("Comes from", _origin(entry)),
        ("Measured", _measured(entry.run)),
        ("Files", _files(entry.run)),
    ):
        if section:
            width = max((len(label) for label, _ in section), default=0)
            lines.append(title)
            lines += [f"  {label.ljust(width)}  {text}".rstrip() for label, text in section]
            lines.append("")
    try:
        text = entry.run.config_text()
        lines += ["Configuration", *(f"  {line}" for line in text.rstrip().split("\n"))]
    except Exception as error:
        lines.append(str(error))
    print("\n".join(lines))


def _state(entry: "Entry") -> list[tuple[str, str]]:
    status = entry.status
    found = [("state", entry.state)]
    for label, moment in (
        ("created", entry.created_at),
        ("started", status.started_at),
        ("ended", status.ended_at),
    ):
        if moment:
            found.append((label, moment[:19].replace("T", " ") + " UTC"))
    if status.started_at and status.ended_at:
        found.append(("took", _duration(status.started_at, status.ended_at)))
    bad = {rank: code for rank, code in status.exit_codes.items() if code != 0}
    if bad:
        found.append(("exit codes", ", ".join(f"rank {rank}: {code}" for rank, code in sorted(bad.items()))))
    if status.error:
        error = status.error
        rank = "" if error.get("rank") is None else f" (rank {error['rank']})"
        found.append(("error", f"{error.get('type') or 'error'}: {error.get('message') or ''}{rank}"))
        trace = str(error.get("traceback") or "").rstrip()
        found += [("", line) for line in trace.split("\n")[-15:]] if trace else []
    return found + [("wrong", problem) for problem in entry.problems(deep=True)]


def _asked(entry: "Entry") -> list[tuple[str, str]]:
    from europa_exp.runs.compare import field_changes
    from europa_exp.runs.table import field_text

    origin = entry.provenance
    found = [
        ("hash", entry.identity or ABSENT),
        ("sweep", entry.sweep or ABSENT),
        ("overrides", " ".join(entry.run.overrides()) or "none"),
    ]
    if origin.get("repeat"):
        found.append(("repeat", str(origin["repeat"])))
    if parent := origin.get("parent"):
        found.append(("parent", str(parent)))
        changed = field_changes(entry.run, str(parent))
        if changed is not None:
            texts = [f"{k}: {field_text(a)} -> {field_text(b)}" for k, (a, b) in changed.items()]
            found.append(("changed since", "; ".join(texts) or "nothing"))
    try:
        from europa_exp.runs.compare import switched_on

        on = switched_on(entry.run)
        found.append(("switched on", " ".join(f"{k}={field_text(v)}" for k, v in on.items()) or "nothing"))
    except Exception:  # the problem is told under "wrong"
        pass
    return found


def _origin(entry: "Entry") -> list[tuple[str, str]]:
    origin, runtime = entry.provenance, entry.run.runtime()
    found: list[tuple[str, str]] = []
    code = origin.get("code")
    if isinstance(code, dict):
        commit = str(code.get("commit") or "no commit")[:12]
        branch = f" on {code['branch']}" if code.get("branch") else ""
        found.append(
            ("code", commit + branch + (" with uncommitted changes (code.diff)" if code.get("dirty") else ""))
        )
    command = origin.get("command")
    if isinstance(command, list):
        import shlex

        found.append(("command", shlex.join(str(part) for part in command)))
    for name in ("host", "cluster", "python", "platform", "data_fingerprint"):
        if origin.get(name):
            found.append((name.replace("_", " "), str(origin[name])))
    packages = origin.get("packages")
    if isinstance(packages, dict):
        wanted = ("torch", "torchtitan", "hydra-core", "omegaconf", "wandb")
        found.append(("packages", ", ".join(f"{p} {packages[p]}" for p in wanted if p in packages)))
    for name in ("device", "device_name", "backend"):
        if runtime.get(name):
            found.append((name.replace("_", " "), str(runtime[name])))
    notes = runtime.get("notes")
    found += [("note", str(note)) for note in notes] if isinstance(notes, list) else []
    return found


def _measured(run: "RunFolder") -> list[tuple[str, str]]:
    from europa_exp.runs.quantities import Value, quantity
    from europa_exp.runs.statistics import estimate, sample, warmup_steps
    from europa_exp.runs.table import value_text

    try:
        rows = run.metrics()
    except Exception:  # the problem is told under "wrong"
        return []
    if not rows:
        return [("steps", "none logged")]
    warm = warmup_steps(len(rows))
    found = [
        (
            "steps",
            f"{len(rows)} logged, the last is step {max(int(r['step']) for r in rows)}; warm-up: {warm} of them",
        )
    ]
    keys = dict.fromkeys(key for row in rows for key in row if key not in ("step", "time"))
    words = {Value.median: "median", Value.peak: "peak", Value.total: "total", Value.end: "at the end"}
    for key in keys:
        what = quantity(key)
        found.append((key, f"{value_text(estimate([sample(rows, what)], what))}  ({words[what.value]})"))
    return found


def _files(run: "RunFolder") -> list[tuple[str, str]]:
    found = [("folder", str(run.path))]
    for label, path in (("metrics", run.metrics_file), ("log", run.log(0)), ("launcher", run.launcher_log)):
        if path.exists():
            found.append((label, str(path.relative_to(run.path))))
    for path in sorted(run.path.glob("logs/rank_*.error.json")):
        found.append(("error", str(path.relative_to(run.path))))
    found += [("checkpoints", "checkpoints/")] if run.checkpoints.is_dir() else []
    return found + ([("W&B", "wandb/")] if run.wandb_dir.is_dir() else [])


@_command()
def compare(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN",
            help="Folders, names, unique prefixes, or hashes (all runs of it). Without any: a sweep.",
        ),
    ] = None,
    runs_dir: RunsDir = RUNS,
    sweep: Annotated[
        str | None,
        typer.Option("--sweep", help="All runs of this sweep; without RUN the default is the latest."),
    ] = None,
    by: Annotated[
        str,
        typer.Option("--by", help="Fields or groups that make the columns, by commas: comm,nccl.max_ctas."),
    ] = "",
    metrics: Annotated[
        str, typer.Option("--metrics", help="Keys of metrics.jsonl or parts of them, by commas; or all.")
    ] = "",
    baseline: Annotated[
        str | None, typer.Option("--baseline", metavar="RUN", help="What differences refer to.")
    ] = None,
    warmup: Annotated[
        int | None, typer.Option("--warmup", min=0, help="Logged steps to leave out. Default: max(2, 10%).")
    ] = None,
    each: Annotated[bool, typer.Option("--each", help="A row for every run, repeats too.")] = False,
    format: Annotated[str, typer.Option("--format", help="table, markdown, csv or json.")] = "table",
) -> None:
    """Put runs side by side: what differs, medians, and which differences are more than noise.

    A row is one experiment; runs that differ in nothing but a seed are its repeats.
    """
    from europa_exp.runs import compare as comparing
    from europa_exp.runs.lookup import find_all, find_many, find_sweep
    from europa_exp.runs.table import FORMATS
    from europa_exp.runs.table import show as show_table

    if format not in FORMATS:
        raise comparing.CompareError(f"format={format}: must be one of {', '.join(FORMATS)}")
    title, chosen = "", find_many(runs_dir, runs or [])
    if sweep is not None or not runs:
        name, members = find_sweep(runs_dir, sweep)
        title = f"sweep {name}"
        chosen = list(dict.fromkeys([*chosen, *members]))
    found = comparing.compare(
        chosen,
        by=by.split(","),
        metrics=metrics.split(","),
        baseline=find_all(runs_dir, baseline) if baseline is not None else (),
        warmup=warmup,
        each=each,
        title=title,
    )
    show_table(found, format)


@_command()
def fields(
    name: Annotated[
        str | None,
        typer.Argument(metavar="GROUP", help="A group (nccl) or a field (nccl.max_ctas). Without it: all."),
    ] = None,
) -> None:
    """Explain what can be set: every field with its type, its off value, unit and source."""
    from europa_exp.config.fields import describe, groups

    found = describe(name)
    about = groups()
    if sys.stdout.isatty():
        import shutil

        width = min(max(shutil.get_terminal_size().columns, 40), 120)
    else:
        width = 10_000
    group = None
    for entry in found:
        head = entry.field.split(".")[0]
        if head != group:
            print(
                f"{'' if group is None else chr(10)}{_wrapped(f'{head}: {about[head]}' if head in about else 'top level', 0, width)}"
            )
            group = head if head in about else "top level"
        off = "required" if entry.off == "required" else f"off: {entry.off}"
        print(f"  {entry.field}  ({entry.type}; {off})")
        print(_wrapped(entry.doc, 6, width))


def _wrapped(text: str, indent: int, width: int) -> str:
    import textwrap

    space = " " * indent
    return textwrap.fill(
        text,
        width,
        initial_indent=space,
        subsequent_indent=space,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _duration(start: str | None, end: str | None) -> str:
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


def _print_table(header: list[str], rows: list[list[str]], notes: list[str], styles: dict[str, str]) -> None:
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


def main() -> None:
    """Run the command line. Every expected error is one message on standard error and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # A terminal without UTF-8 shows a question mark for a dash, which is better than nothing at all.
            stream.reconfigure(errors="replace")
    app()


if __name__ == "__main__":
    main()
