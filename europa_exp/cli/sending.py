"""The verb that sends runs to W&B."""

import functools
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from europa_exp.cli.base import RUNS, RunsDir, Sweep, command

if TYPE_CHECKING:
    from europa_exp.runs.folder import RunFolder
    from europa_exp.runs.sync import Outcome


@command()
def sync(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN", help="Folders, names, unique prefixes, or hashes. Without any: all runs."
        ),
    ] = None,
    runs_dir: RunsDir = RUNS,
    sweep: Sweep = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Go on until all of them have ended and are sent.")
    ] = False,
    every: Annotated[int, typer.Option("--every", min=1, help="Seconds between two passes of --watch.")] = 60,
) -> None:
    """Send runs that were tracked offline to W&B, live or ended; what is there already is not sent again.

    For the login node of a cluster without internet. Exit code 1: some run could not be sent; 2: W&B can't be reached.
    """
    from europa_exp.runs.sync import WandbUnavailable, summary
    from europa_exp.runs.sync import sync as send

    first = True
    failed: set[RunFolder] = set()
    while True:
        chosen = _chosen(runs_dir, runs or [], sweep)
        try:
            tell = functools.partial(_told, first=first, named=bool(runs))
            outcomes = send(chosen, tell, _over(chosen))
        except WandbUnavailable as error:
            if first:
                raise
            # A network that is away for a while must not end a watch of many hours.
            print(f"europa: {error}", file=sys.stderr, flush=True)
            outcomes = []
        before, failed = failed, {o.run for o in outcomes if o.what == "failed"}
        ended = bool(outcomes or not chosen) and not any(o.live for o in outcomes)
        # What failed is tried again, and given up if it fails twice in turn with nothing else to wait for.
        last = not watch or (ended and failed <= before)
        if first or last or any(o.what in ("sent", "failed") for o in outcomes):
            print(summary(outcomes), flush=True)
        if last:
            break
        first = False
        time.sleep(every)
    if failed:
        raise typer.Exit(1)


def _chosen(runs_dir: "RunsDir", runs: list[str], sweep: str | None) -> "list[RunFolder]":
    from europa_exp.runs.lookup import entries, named

    if runs or sweep is not None:
        return named(runs_dir, runs, sweep)
    return [entry.run for entry in entries(runs_dir)]


def _over(chosen: "list[RunFolder]") -> "set[RunFolder]":
    """Runs on which nobody works any more, though their record may not know."""
    from europa_exp.launch.standing import survey

    return {standing.run for standing in survey(chosen).standings if standing.over}


def _told(outcome: "Outcome", first: bool, named: bool) -> None:
    """A line about a run: what was done with it, and at first what not. Where all are meant, none that is up to date."""
    if not (outcome.what in ("sent", "failed") or (first and (named or outcome.what == "nothing"))):
        return
    texts = {
        "sent": f"{outcome.rows} steps" + (", not ended yet" if outcome.live else ""),
        "current": "nothing new" + (", not ended yet" if outcome.live else ""),
    }
    label = {"current": "up to date", "nothing": "nothing"}.get(outcome.what, outcome.what)
    print(f"{label.ljust(10)}  {outcome.run.name}: {outcome.why or texts.get(outcome.what, '')}", flush=True)
    for note in outcome.notes:
        print(f"! {outcome.run.name}: {note}", flush=True)
