"""The verb that looks at the machine: doctor."""

from pathlib import Path
from typing import Annotated

import typer

from europa_exp.cli.base import command


@command("doctor")
def doctor(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[GROUP=OPTION|FIELD=VALUE]...", help="As for launch.py: cluster=jupiter."),
    ] = None,
) -> None:
    """Tell what a run would meet on this machine; exit code 1 if something that it needs is absent."""
    from europa_exp.launch.doctor import Health, examine
    from europa_exp.launch.slurm import ROOT

    here = Path("conf")
    conf = here.resolve() if (here / "config.yaml").is_file() else ROOT / "conf"
    width = max(len(h.name) for h in Health)
    absent = False
    for finding in examine(conf, overrides or []):
        absent = absent or finding.health is Health.missing
        print(f"{finding.health.name.ljust(width)}  {finding.subject}: {finding.text}", flush=True)
    if absent:
        raise typer.Exit(1)
