"""Verbs that follow runs and step in: status, logs, why, cancel."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from europa_exp.cli.base import ABSENT, RUNS, RunsDir, Sweep, command, print_table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from rich.console import Group
    from rich.table import Table

    from europa_exp.launch.standing import Standing, Survey
    from europa_exp.runs.folder import RunFolder
    from europa_exp.runs.slurm_record import Answer

Runs = Annotated[
    list[str] | None,
    typer.Argument(metavar="RUN", help="Folders, names, unique prefixes, or hashes (all runs of it)."),
]
Run = Annotated[str, typer.Argument(metavar="RUN", help="A folder, a name, a unique prefix, or a hash.")]

HEADER = ["run", "state", "job", "nodes", "try", "step", "loss", "tok/s/rank", "progress"]
STYLES = {
    "running": "cyan",
    "loading": "blue",
    "completed": "green",
    "failed": "red",
    "lost": "red",
    "unknown": "red",
    "cancelled": "yellow",
}
_DISPENSABLE = ("nodes", "progress", "tok/s/rank", "try", "loss", "job")
_SHORTEST_NAME = 24
_LOSS = "loss/global_avg"
_SPEED = "throughput/tokens_per_second_per_gpu"
_REDRAW_S = 1.0
# Every call of squeue takes a lock of the controller, which a thousand people share.
_ASK_SLURM_S = 15.0
_REPORT_S = 60.0


@command()
def status(
    runs: Runs = None,
    runs_dir: RunsDir = RUNS,
    sweep: Sweep = None,
    watch: Annotated[
        bool,
        typer.Option("--watch", "-w", help="Show it until all runs have ended; Ctrl-C stops the view only."),
    ] = False,
) -> None:
    """Tell where runs stand: the newest call and whatever is still open, or the given runs.

    The state is that of the run's own record, held against squeue and sacct (or the process) while it claims to go on.
    Exit code 1 if a run failed or was lost, else 0.
    """
    from europa_exp.launch.standing import survey
    from europa_exp.runs import commands

    chosen, left_out = _chosen(runs_dir, runs or [], sweep)
    if not chosen:
        print(f"No runs in {runs_dir.absolute()}.", file=sys.stderr)
        return
    found = _watch(chosen) if watch else survey(chosen)
    if not watch:
        _print(found)
    if not runs and not watch:
        _print_without_folder(runs_dir, chosen)
    if left_out and not watch:
        print(f"{left_out} older runs that have ended are left out; `europa list` shows them.")
    if runs and not watch:
        _print_checkpoints(chosen)
    bad = [s for s in found.standings if s.bad]
    if bad:
        print(f"Next: {commands.about(bad[0].run, 'why')}")
        raise typer.Exit(1)


def _print_without_folder(runs_dir: Path, chosen: "Sequence[RunFolder]") -> None:
    """Of the sweeps that are shown: runs that Slurm was given and whose folders are gone."""
    from europa_exp.launch.slurm_runs import without_folder

    sweeps = dict.fromkeys(run.provenance().get("sweep") for run in chosen)
    for sweep in sweeps:
        if isinstance(sweep, str) and (line := without_folder(runs_dir, sweep)) is not None:
            print(f"! {line}")


def _print_checkpoints(chosen: "Sequence[RunFolder]") -> None:
    """Of runs that were named: where their checkpoints lie, and what is left of them."""
    from europa_exp.runs import checkpoints

    for run in chosen:
        if (saved := checkpoints.describe(run)) is not None:
            print(f"checkpoints of {run.name}: {saved}")


def _print(found: "Survey") -> None:
    lines, notes = _table(found)
    if not sys.stdout.isatty():
        print_table(HEADER, lines, notes, STYLES)
        return
    from rich.console import Console

    console = Console(highlight=False)
    console.print(_terminal_table(lines, console.width))
    print("\n".join(f"! {note}" for note in notes), end="\n" if notes else "")


def _chosen(runs_dir: Path, texts: "Sequence[str]", sweep: str | None) -> tuple[list["RunFolder"], int]:
    """The runs to show, and how many were left out because nobody asked for them."""
    from europa_exp.runs.lookup import entries, named

    if texts or sweep is not None:
        return named(runs_dir, texts, sweep), 0
    known = entries(runs_dir)
    newest = known[-1].sweep if known else None
    shown = [e for e in known if not e.status.ended or e is known[-1] or (newest and e.sweep == newest)]
    return [e.run for e in shown], len(known) - len(shown)


def _table(found: "Survey") -> tuple[list[list[str]], list[str]]:
    from europa_exp.runs.cells import number

    lines, notes = [], []
    now = time.time()
    for s in found.standings:
        loss, speed = s.metrics.get(_LOSS), s.metrics.get(_SPEED)
        lines.append(
            [
                s.run.name,
                s.state,
                s.job_id or ABSENT,
                shortened_nodes(s.nodes) or ABSENT,
                str(s.attempt or ABSENT),
                ABSENT if s.step is None else f"{s.step}/{s.steps}" if s.steps else str(s.step),
                number(loss) if isinstance(loss, int | float) else ABSENT if loss is None else str(loss),
                f"{speed:,.0f}" if isinstance(speed, int | float) else ABSENT,
                ABSENT if s.progressed_at is None else ago(now - s.progressed_at),
            ]
        )
        if s.note:
            source = "" if s.source == "record" or s.source in s.note else f" [{s.source}]"
            notes.append(f"{s.run.name}: {s.note}{source}")
    notes += [f"{text}; states are those of the runs' own records" for text in found.silent]
    return lines, notes


def shortened_nodes(nodes: str, longest: int = 24) -> str:
    """Slurm's list of nodes, or how many there are and the first."""
    if len(nodes) <= longest:
        return nodes
    from europa_exp.runs.slurm_record import node_names

    names = node_names(nodes)
    return f"{len(names)}: {names[0]}, ..." if names else nodes[: longest - 3] + "..."


def ago(seconds: float) -> str:
    """``12 s ago``; ``3 min ago``."""
    seconds = max(seconds, 0.0)
    if seconds < 100:
        return f"{seconds:.0f} s ago"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min ago"
    return f"{seconds / 3600:.0f} h ago" if seconds < 180_000 else f"{seconds / 86400:.0f} days ago"


# ------------------------------------------------------------------------------------------------------------ watching


def _watch(chosen: "Sequence[RunFolder]") -> "Survey":
    """Show the runs until all have ended, and return the last state. On a terminal a table that redraws itself."""
    from europa_exp.launch.follow import has_terminal
    from europa_exp.launch.standing import survey

    answer: Answer | None = None
    asked = 0.0

    def look() -> "Survey":
        nonlocal answer, asked
        from europa_exp.launch import squeue

        def ask(ids: "Sequence[str]") -> "Answer":
            nonlocal answer, asked
            if answer is None or time.monotonic() - asked > _ASK_SLURM_S:
                answer, asked = squeue.ask(ids), time.monotonic()
            return answer

        return survey(chosen, ask=ask)  # type: ignore[arg-type]

    try:
        return _watch_live(look) if has_terminal() else _watch_plainly(look)
    except KeyboardInterrupt:
        print("The view has ended; the runs go on. `europa cancel` stops runs.", file=sys.stderr)
        raise


def _watch_live(look: "Callable[[], Survey]") -> "Survey":
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False)
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            found = look()
            live.update(live_view(found, console.width, console.height), refresh=True)
            if all(s.over for s in found.standings):
                return found
            time.sleep(_REDRAW_S)


def live_view(found: "Survey", width: int, height: int) -> "Group":
    """Table and notes for a terminal: what goes on or went wrong stays in sight, the rest is counted."""
    from rich.console import Group
    from rich.text import Text

    lines, notes = _table(found)
    room = max(height - 4, 3)
    if len(lines) + len(notes) > room:
        notes = notes[: max(room // 4, 1)]
    room = max(room - len(notes), 1)
    shown = list(range(len(lines)))
    if len(lines) > room:
        order = {
            "running": 0,
            "loading": 0,
            "failed": 1,
            "lost": 1,
            "unknown": 1,
            "completed": 3,
            "cancelled": 3,
        }
        shown = sorted(sorted(shown, key=lambda i: (order.get(lines[i][1], 2), i))[:room])
    below = [f"{len(lines) - len(shown)} more: {counted(found.standings)}"] if len(shown) < len(lines) else []
    below += [f"! {note}" for note in notes]
    texts = [Text(text, no_wrap=True, overflow="ellipsis") for text in below]
    return Group(_terminal_table([lines[i] for i in shown], width), *texts)


def _terminal_table(lines: list[list[str]], width: int) -> "Table":
    """The table without the columns for which a narrow terminal has no room; the state is always whole."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    widths = [max(len(line[i]) for line in [HEADER, *lines]) for i in range(len(HEADER))]
    kept = list(range(len(HEADER)))
    for name in _DISPENSABLE:
        # The name of the run can be cut, but not to nothing.
        if min(widths[0], _SHORTEST_NAME) + sum(widths[i] + 3 for i in kept if i) <= width:
            break
        kept.remove(HEADER.index(name))
    out = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for i in kept:
        least = None if i == 0 else widths[i]
        out.add_column(HEADER[i], no_wrap=True, overflow="ellipsis", min_width=least)
    for line in lines:
        out.add_row(*(Text(line[i], style=STYLES.get(line[i], "")) for i in kept))
    return out


def counted(standings: "Sequence[Standing]") -> str:
    """``5 completed, 1 failed``."""
    counts: dict[str, int] = {}
    for s in standings:
        counts[s.state] = counts.get(s.state, 0) + 1
    return ", ".join(f"{n} {state}" for state, n in counts.items())


def _watch_plainly(look: "Callable[[], Survey]") -> "Survey":
    """A line at every change, and one for each run that goes on now and then."""
    said: dict[str, tuple[object, ...]] = {}
    spoke: dict[str, float] = {}
    silent: tuple[str, ...] = ()
    while True:
        found, now = look(), time.monotonic()
        if found.silent != silent:
            silent = found.silent
            for text in silent:
                print(f"! {text}; states are those of the runs' own records")
        for s in found.standings:
            name, news = s.run.name, (s.state, s.note, s.job_id, s.attempt)
            due = s.state == "running" and now - spoke.get(name, now) >= _REPORT_S
            if said.get(name) != news or due:
                said[name], spoke[name] = news, now
                print(_line(s), flush=True)
        if all(s.over for s in found.standings):
            print(counted(found.standings))
            return found
        time.sleep(_REDRAW_S)


def _line(s: "Standing") -> str:
    parts = [f"{s.run.name}: {s.state}"]
    parts += [f"job {s.job_id}"] if s.job_id else []
    parts += [f"attempt {s.attempt}"] if s.attempt > 1 else []
    parts += [f"step {s.step}/{s.steps}" if s.steps else f"step {s.step}"] if s.step is not None else []
    loss = s.metrics.get(_LOSS)
    parts += [f"loss {loss:.4f}"] if isinstance(loss, int | float) else []
    return "  ".join(parts) + (f"  ({s.note})" if s.note else "")


# ---------------------------------------------------------------------------------------------------------------- logs


@command()
def logs(
    run: Run,
    runs_dir: RunsDir = RUNS,
    rank: Annotated[int, typer.Option("--rank", "-r", help="The rank whose log it is.")] = 0,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the run ends, through requeues.")
    ] = False,
    launcher: Annotated[
        bool, typer.Option("--launcher", help="What the launcher and Slurm's job script wrote instead.")
    ] = False,
    lines: Annotated[
        int | None, typer.Option("--lines", "-n", min=0, help="Only this many lines at the end.")
    ] = None,
) -> None:
    """Show what a rank printed, in all attempts of the run."""
    from europa_exp.launch.slurm_runs import jobs_of
    from europa_exp.runs import log_files
    from europa_exp.runs.lookup import LookupFailed, find

    found = find(runs_dir, run)
    if launcher:
        # The jobs' own output first: one that goes on grows at the end of what is shown.
        paths = [*log_files.job_logs(found.status(), jobs_of(found, found.status())), found.launcher_log]
    else:
        _check_rank(found, rank)
        paths = [found.log(rank)]
    present = [path for path in paths if path.exists()]
    if not present and (not follow or found.status().ended):
        status = found.status()
        which = "launcher" if launcher else f"rank {rank}"
        raise LookupFailed(
            f"{found.name} is {status.state} and has no log of {which} yet; `europa status` tells why"
        )
    for path in present:
        if len(paths) > 1 and not (follow and path == paths[-1]):
            print(f"==> {path} <==", flush=True)
        if not (follow and path == paths[-1]):
            _copy(log_files.read(path), lines)
    if follow:
        if len(paths) > 1:
            print(f"==> {paths[-1]} <==", flush=True)
        _copy(log_files.follow(paths[-1], _over_test(found), skip_to_last=lines), None)


def _check_rank(run: "RunFolder", rank: int) -> None:
    from europa_exp.runs import log_files
    from europa_exp.runs.lookup import LookupFailed

    present = log_files.ranks(run)
    if rank in present:
        return
    world = None
    try:
        layout = run.config().parallelism
        world = layout.nodes * layout.gpus_per_node
    except Exception:  # a broken configuration; the logs are what there is to go by
        pass
    if world is not None and 0 <= rank < world:
        if present:
            raise LookupFailed(
                f"rank {rank} of {run.name} has no log; ranks with one: {log_files.spans(present)}"
            )
        return  # none has begun; the caller says so, or waits
    ranks = (
        f"it has the ranks 0-{world - 1}"
        if world
        else f"ranks with a log: {log_files.spans(present) or 'none'}"
    )
    raise LookupFailed(f"{run.name} has no rank {rank}; {ranks}")


def _over_test(run: "RunFolder") -> "Callable[[], bool]":
    """Whether a run has ended; its record is read each time, Slurm is asked now and then."""
    from europa_exp.launch.standing import survey

    asked = float("-inf")
    verdict = False

    def over() -> bool:
        nonlocal asked, verdict
        if run.status().ended:
            return True
        if not verdict and time.monotonic() - asked > _ASK_SLURM_S:
            asked, verdict = time.monotonic(), survey([run]).standings[0].over
        return verdict

    return over


def _copy(pieces: "Iterable[bytes]", lines: int | None) -> None:
    """Write pieces of a log to standard output, byte by byte as they are; or the last lines of it."""
    out = sys.stdout.buffer
    if lines is not None:
        text = b"".join(pieces)
        pieces = [b"".join(text.splitlines(keepends=True)[-lines:] if lines else [])]
    for piece in pieces:
        out.write(piece)
        out.flush()


# -------------------------------------------------------------------------------------------------------------- cancel


@command()
def cancel(runs: Runs = None, runs_dir: RunsDir = RUNS, sweep: Sweep = None) -> None:
    """Stop runs, wherever they run or wait, and mark them cancelled. Asks nothing; runs that have ended stay as they are.

    Exit code 1 if a run may go on all the same.
    """
    from europa_exp.launch.cancel import cancel as cancel_runs
    from europa_exp.runs.lookup import LookupFailed

    if not runs and sweep is None:
        raise LookupFailed("name the runs to cancel, or give --sweep; `europa status` shows what is open")
    done = cancel_runs(_chosen(runs_dir, runs or [], sweep)[0])
    idle = [d for d in done if d.ok and d.what.startswith("nothing to cancel")]
    for d in done:
        if len(idle) < 5 or d not in idle:
            print(f"{d.run.name}: {d.what}")
    if len(idle) >= 5:
        print(f"nothing to cancel: {len(idle)} runs have ended already")
    if not all(d.ok for d in done):
        raise typer.Exit(1)


# ----------------------------------------------------------------------------------------------------------------- why


@command()
def why(run: Run, runs_dir: RunsDir = RUNS) -> None:
    """Tell why a run ended as it did (or why it waits): the cause, rank and node, the lines that prove it, what to do."""
    from europa_exp.launch import squeue
    from europa_exp.launch.go_on import go_on_command
    from europa_exp.launch.slurm_runs import jobs_of
    from europa_exp.launch.standing import current_job, survey
    from europa_exp.runs.log_files import job_logs
    from europa_exp.runs.lookup import find
    from europa_exp.runs.why import explain

    found = find(runs_dir, run)
    jobs = jobs_of(found, found.status())
    answer = squeue.ask(jobs, steps=True) if jobs else None
    standing = survey([found], slurm=answer).standings[0]
    slurm = standing.slurm or (current_job(jobs, answer)[1] if answer is not None else None)
    verdict = explain(found, state=standing.state, slurm=slurm, job_logs=job_logs(found.status(), jobs))

    guess = "" if verdict.sure else "probably " if verdict.cause != "unknown" else ""
    print(f"{found.name} ({standing.state}): {guess}{verdict.title}")
    where = [] if verdict.rank is None else [f"rank {verdict.rank}"]
    where += [f"node {verdict.node}"] if verdict.node else []
    print(f"  cause: {verdict.cause}" + (f"  ({', '.join(where)})" if where else ""))
    if standing.note and standing.state != str(found.status().state):
        print(f"  {standing.note}")
    for entry in verdict.evidence:
        print(f"\n{entry.place}")
        print("\n".join(f"  | {line}" for line in entry.lines))
    again = go_on_command(found, standing.state)
    advice = [*verdict.advice, *([f"To go on from its newest checkpoint: {again}"] if again else [])]
    if advice:
        print()
        print("\n".join(f"Next: {text}" for text in advice))
    if answer is not None and answer.silent and not found.status().ended:
        print("\n".join(f"! {text}" for text in answer.silent))
