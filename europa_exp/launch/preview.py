"""What ``launch.preview`` prints: the table of points and their cost, or the job scripts. Nothing is submitted or written."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from europa_exp.config.effects import notes
from europa_exp.config.errors import show as shown
from europa_exp.config.experiment import EXPERIMENT, experiment_of
from europa_exp.config.schema import Executor, Preview
from europa_exp.launch.fields import schema_order

if TYPE_CHECKING:
    from europa_exp.launch.expand import Plan
    from europa_exp.launch.points import Point

COLUMNS = ("name", "hash", "what differs", "ranks", "runs")
_WIDEST = 120
SLURM_COLUMNS = ("nodes", "node-hours")
"""Beside `COLUMNS` where a point goes to Slurm; the hours of a row are those of all its runs, one attempt each."""


def show(plan: Plan, stream: TextIO | None = None) -> None:
    """Print one row a point, a table in a terminal and plain lines elsewhere; or the scripts, if those are asked for."""
    stream = stream or sys.stdout
    if plan.points[0].cfg.launch.preview is Preview.script:
        _scripts(plan, stream)
        if lacking := without_account(plan.points):
            print(lacking, file=sys.stderr)
        return
    rows = table(plan)
    once = [p for p in plan.points if p.repeat == 0]
    led = {experiment_of(p.overrides) for p in once}
    common = _words({**_experiment(once[0] if len(led) == 1 else None), **_common(once)})
    columns = COLUMNS + (SLURM_COLUMNS if _on_slurm(plan) else ())
    if stream.isatty():
        _rich(columns, rows, stream)
    else:
        _plain(columns, rows, stream)
    if len(rows) > 1 and common:
        print(f"all: {common}", file=stream)
    left_out = f", {plan.excluded} left out by the sweep file" if plan.excluded else ""
    runs = "1 run" if len(plan.points) == 1 else f"{len(plan.points)} runs"
    sweep = f" of sweep {plan.sweep}" if plan.sweep else ""
    for line in [*cost(plan.points), *notes([p.cfg for p in plan.points])]:
        print(line, file=stream)
    print(f"Preview of {runs}{sweep}{left_out}; nothing was submitted.", file=stream)


def cost(points: list[Point]) -> list[str]:
    """What these points cost on Slurm and what stands in their way there, in lines; nothing for runs on this machine."""
    from europa_exp.launch import slurm

    lines = []
    for group in slurm.by_shape([p for p in points if p.cfg.cluster.executor is Executor.slurm]):
        cfg, hours = group[0].cfg, slurm.node_hours(group)
        if cfg.cluster.inside_allocation:
            lines.append(f"{cfg.cluster.name}: in the allocation of this shell, one run after the other")
            continue
        jobs = slurm.n_jobs(group)
        many = f"{jobs} jobs of" if jobs > 1 else "1 job of"
        nodes = f"{cfg.parallelism.nodes} node{'s' if cfg.parallelism.nodes > 1 else ''}"
        limit = f" for at most {cfg.cluster.time_limit}" if cfg.cluster.time_limit else ""
        line = f"{cfg.cluster.name}: {many} {nodes}{limit}, {hours_text(hours)} node-hours"
        tries = max(point.cfg.cluster.max_attempts for point in group)
        if tries > 1:
            run = " a run" if len(group) > 1 else ""
            line += f"; at most {tries} attempts{run}: {hours_text(slurm.most_node_hours(group))} node-hours"
        lines.append(line)
    if len(lines) > 1:
        once, most = slurm.node_hours(points), slurm.most_node_hours(points)
        further = f"; with all attempts {hours_text(most)}" if most > once else ""
        lines.append(f"in all {hours_text(once)} node-hours{further}")
    problem = slurm.too_expensive(points)
    if problem is not None:
        lines.append(f"This call would be refused: {problem}")
    if lacking := without_account(points):
        lines.append(lacking)
    return lines


def without_account(points: list[Point]) -> str:
    """A line about the clusters that need an account which these points don't give; empty if there are none."""
    from europa_exp.config.rules.cluster import lacks_account

    names = sorted({p.cfg.cluster.name for p in points if lacks_account(p.cfg)})
    return f"cluster.account is missing, and {' and '.join(names)} takes no job without one." if names else ""


def hours_text(hours: float) -> str:
    """Node-hours with as many digits as matter."""
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:.3g}"


def _on_slurm(plan: Plan) -> bool:
    return any(p.cfg.cluster.executor is Executor.slurm for p in plan.points)


def _scripts(plan: Plan, stream: TextIO) -> None:
    """The job script of every shape and size of array; a single one without a word, so that it can be put into a file."""
    from europa_exp.launch import arrays, slurm, slurm_exclude

    scripts: list[tuple[str, str]] = []
    sizes: list[int] = []
    for group in slurm.by_shape(plan.points):
        first, most = group[0], arrays.most_tasks(group[0].cfg.launch)
        names = ", ".join(dict.fromkeys(p.name for p in group))
        n_jobs = 1 if first.cfg.cluster.inside_allocation else slurm.n_jobs(group)
        name = plan.sweep or first.name
        bad = slurm_exclude.listed(slurm_exclude.place(Path(first.cfg.launch.runs_dir), name))
        # A sweep of more jobs than an array may have makes several arrays; all but the last are of one size.
        chunks = [min(most, n_jobs - i) for i in range(0, n_jobs, most)]
        sizes += chunks
        for size in dict.fromkeys(chunks):
            text = slurm.script_text(first.cfg, first.cfg.launch, name=name, n_jobs=size, bad_nodes=bad)
            scripts.append((names, text))
    for i, (names, text) in enumerate(scripts, start=1):
        if len(scripts) > 1:
            print(f"# ======== script {i} of {len(scripts)}, for {names}", file=stream)
        print(text, file=stream)
    throttle = plan.points[0].cfg.launch.throttle
    if (turn := arrays.turns(sizes, throttle)[-1]) > 0:
        how = "the next one gets --dependency=afterany with the arrays of the one before"
        print(f"# launch.throttle={throttle}: {len(sizes)} arrays in {turn + 1} turns; {how}", file=stream)


def table(plan: Plan) -> list[tuple[str, ...]]:
    """Rows of `COLUMNS`, and of `SLURM_COLUMNS` if a point goes there. What differs is relative to the other points, for a single point to the default composition."""
    points = [p for p in plan.points if p.repeat == 0]
    common = _common(points) if len(points) > 1 else {}
    names = {k for p in points for k in p.delta if k not in common}
    fields = sorted(names, key=schema_order)
    rows: list[tuple[str, ...]] = []
    on_slurm = _on_slurm(plan)
    led = len(points) == 1 or len({experiment_of(p.overrides) for p in points}) > 1
    for point in points:
        differs = {k: point.delta.get(k, _value(point, k)) for k in fields}
        differs = {**_experiment(point if led else None), **differs}
        p = point.cfg.parallelism
        rows.append(
            (
                point.name,
                point.identity,
                _words(differs) or "nothing (the default composition)",
                str(p.nodes * p.gpus_per_node),
                str(point.cfg.launch.repeat),
                *(_slurm_cells(point) if on_slurm else ()),
            )
        )
    return rows


def _slurm_cells(point: Point) -> tuple[str, str]:
    from europa_exp.launch import slurm

    launch, nodes = point.cfg.launch, str(point.cfg.parallelism.nodes)
    if point.cfg.cluster.inside_allocation:
        return nodes, "-"
    return nodes, hours_text(slurm.hours_per_job(point.cfg) * launch.repeat / launch.points_per_job)


def _experiment(point: Point | None) -> dict[str, Any]:
    """The experiment that a point was started with, as the first of what differs; nothing without one."""
    chosen = experiment_of(point.overrides) if point else None
    return {EXPERIMENT: chosen} if chosen else {}


def _common(points: list[Point]) -> dict[str, Any]:
    """What all points have in common that the default composition doesn't have."""
    first = points[0].delta
    return {k: v for k, v in first.items() if all(k in p.delta and p.delta[k] == v for p in points)}


def _value(point: Point, dotted: str) -> Any:
    value: Any = point.cfg
    for part in dotted.split("."):
        value = value.get(part) if isinstance(value, dict) else getattr(value, part)
    return value


def _words(fields: dict[str, Any]) -> str:
    """Fields as they would be typed, as many as fit in `_WIDEST`; a model's name stands for its fields."""
    if "model.flavor" in fields:
        fields = {k: v for k, v in fields.items() if k == "model.flavor" or not k.startswith("model.")}
    words = [f"{k}={v if isinstance(v, str) else shown(v)}" for k, v in fields.items()]
    for n in range(len(words), 1, -1):
        rest = len(words) - n
        text = " ".join(words[:n]) + (f" and {rest} more" if rest else "")
        if len(text) <= _WIDEST:
            return text
    return " ".join(words[:1]) + (f" and {len(words) - 1} more" if len(words) > 1 else "")


def _plain(columns: tuple[str, ...], rows: list[tuple[str, ...]], stream: TextIO) -> None:
    lines = [columns, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    for line in lines:
        print("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip(), file=stream)


def _rich(columns: tuple[str, ...], rows: list[tuple[str, ...]], stream: TextIO) -> None:
    from rich.console import Console
    from rich.table import Table

    out = Table()
    for column in columns:
        out.add_column(column, overflow="fold", justify="left" if column in COLUMNS[:3] else "right")
    for row in rows:
        out.add_row(*(cell.replace("[", r"\[") for cell in row))
    Console(file=stream).print(out)
