"""Verbs that look at what was recorded: list, show, compare, and fields, which explains what can be set."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from europa_exp.cli.base import ABSENT, RUNS, RunsDir, Sweep, command, duration, print_table

if TYPE_CHECKING:
    from europa_exp.runs.folder import RunFolder
    from europa_exp.runs.lookup import Entry


@command("list")
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
    print_table(
        ["run", "state", "started", "took", "step", "loss", "sweep"],
        [_listed(e) for e in found],
        [f"{e.name}: {problem}" for e in found for problem in e.problems()],
        styles={"completed": "green", "failed": "red", "lost": "red", "unknown": "red", "running": "cyan"},
    )


def _listed(entry: "Entry") -> list[str]:
    from europa_exp.runs.cells import number

    row, _ = entry.last
    status = entry.status
    started = status.started_at or entry.created_at
    loss = row.get("loss/global_avg")
    return [
        entry.name,
        entry.state,
        started[:16].replace("T", " ") or ABSENT,
        duration(status.started_at, status.ended_at),
        str(row["step"]) if "step" in row else ABSENT,
        number(loss) if isinstance(loss, int | float) else ABSENT if loss is None else str(loss),
        entry.sweep or ABSENT,
    ]


@command()
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
        ("Files", _files(entry.run, entry.state)),
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
        found.append(("took", duration(status.started_at, status.ended_at)))
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
    from europa_exp.runs.cells import field_text
    from europa_exp.runs.compare.fields import field_changes

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
        from europa_exp.runs.compare.fields import switched_on

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
    from europa_exp.runs.cells import value_text
    from europa_exp.runs.metrics import counted
    from europa_exp.runs.quantities import Value, quantity
    from europa_exp.runs.statistics import estimate, sample, warmup_steps

    try:
        rows = counted(run.metrics())
    except Exception:  # the problem is told under "wrong"
        return []
    if not rows:
        return [("steps", "none logged")]
    warm = warmup_steps(len(rows))
    found = [
        (
            "steps",
            f"{len(rows)} logged, the last is step {rows[-1]['step']}; warm-up: {warm} of them",
        )
    ]
    keys = dict.fromkeys(key for row in rows for key in row if key not in ("step", "time"))
    words = {Value.median: "median", Value.peak: "peak", Value.total: "total", Value.end: "at the end"}
    for key in keys:
        what = quantity(key)
        found.append((key, f"{value_text(estimate([sample(rows, what)], what))}  ({words[what.value]})"))
    return found


def _files(run: "RunFolder", state: str) -> list[tuple[str, str]]:
    from europa_exp.runs.collectives import collectives_file

    found = [("folder", str(run.path))]
    for label, path in (
        ("metrics", run.metrics_file),
        ("collectives", collectives_file(run)),
        ("log", run.log(0)),
        ("launcher", run.launcher_log),
    ):
        if path.exists():
            found.append((label, str(path.relative_to(run.path))))
    for path in sorted(run.path.glob("logs/rank_*.error.json")):
        found.append(("error", str(path.relative_to(run.path))))
    from europa_exp.runs import checkpoints

    if (saved := checkpoints.describe(run)) is not None:
        found.append(("checkpoints", saved))
    from europa_exp.launch.go_on import go_on_command

    if (again := go_on_command(run, state)) is not None:
        found.append(("to go on", f"from the newest: {again}"))
    return found + ([("W&B", "wandb/")] if run.wandb_dir.is_dir() else [])


@command()
def compare(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN",
            help="Folders, names, unique prefixes, or hashes (all runs of it). Without any: the latest sweep or repeats.",
        ),
    ] = None,
    runs_dir: RunsDir = RUNS,
    sweep: Annotated[
        str | None,
        typer.Option("--sweep", help="All runs of this sweep."),
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
    from europa_exp.runs.lookup import find_all, find_many, find_sweep, latest_group
    from europa_exp.runs.table import FORMATS
    from europa_exp.runs.table import show as show_table

    if format not in FORMATS:
        raise comparing.CompareError(f"format={format}: must be one of {', '.join(FORMATS)}")
    title, chosen = "", find_many(runs_dir, runs or [])
    if sweep is not None:
        name, members = find_sweep(runs_dir, sweep)
        title = f"sweep {name}"
        chosen = list(dict.fromkeys([*chosen, *members]))
    elif not runs:
        title, chosen = latest_group(runs_dir)
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


@command()
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
        first = entry.field.split(".")[0]
        head = f"{first}: {about[first]}" if first in about else "top level"
        if head != group:
            print(f"{'' if group is None else chr(10)}{_wrapped(head, 0, width)}")
            group = head
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
