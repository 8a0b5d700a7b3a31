"""What stands below the table: how to read it, what it leaves out, and what went wrong."""

from __future__ import annotations

from collections.abc import Sequence

from europa_exp.runs import statistics
from europa_exp.runs.compare.comparison import Column, Row
from europa_exp.runs.compare.fields import Differences
from europa_exp.runs.quantities import Quantity
from europa_exp.runs.statistics import ALPHA

_HARDWARE = ("device", "device_name", "torch", "backend")
_OF_WORDS = {
    "needs repeats": "needs repeats: steps don't show this quantity's noise, repeats do (launch.repeat=3).",
    "needs seeds": "needs seeds: a loss differs from seed to seed; run each experiment with several (training.seed=0,1,2).",
    "too few steps": f"too few steps: fewer than {statistics.MIN_STEPS} steps after warm-up, or too alike from step to step.",
}
"""Verdict that is none -> what it means."""


def notes_on(
    rows: Sequence[Row], columns: Sequence[Column], quantities: Sequence[Quantity], differ: Differences
) -> list[str]:
    """The notes, a sentence or two each."""
    return [
        *_on_experiments(differ),
        *_on_verdicts(rows, quantities),
        *_on_fields(rows, columns, differ),
        *_on_hardware(rows),
        *_on_problems(rows),
    ]


def _on_experiments(differ: Differences) -> list[str]:
    groups = dict.fromkeys(name.split(".")[0] for name in differ.implied)
    return [f"experiment stands for what its file sets; --by {','.join(groups)} shows it."] if groups else []


def _on_verdicts(rows: Sequence[Row], quantities: Sequence[Quantity]) -> list[str]:
    notes: list[str] = []
    verdicts = [v for row in rows for v in row.verdicts.values() if v is not None]
    words, bases = {v.word for v in verdicts}, {v.basis for v in verdicts if v.basis}
    if bases:
        held = sum(not row.baseline for row in rows)
        notes.append(
            f"± is the spread over steps (one run) or between runs (n > 1). A verdict means more than noise: about {ALPHA:.0%}"
            f" chance that a column of {held} verdict{'s' if held > 1 else ''} holds one that is luck."
        )
    if bases & {"steps", "paired steps"}:
        notes.append(
            "?: more than the noise between steps, but single runs can't see the noise between runs; "
            "launch.repeat=3 adds repeats."
        )
    notes += [note for word, note in _OF_WORDS.items() if word in words]
    gone = [
        q.title
        for q in quantities
        if any(s.value is None and s.dropped for r in rows for s in r.estimates[q.key].missing)
    ]
    if gone:
        notes.append(
            f"{', '.join(gone)}: where a run has no value, all its steps are warm-up; --warmup N leaves out fewer."
        )
    if "unfinished" in words:
        notes.append("unfinished: the row or the baseline has no completed run.")
    return notes


def _on_fields(rows: Sequence[Row], columns: Sequence[Column], differ: Differences) -> list[str]:
    notes: list[str] = []
    if merged := sorted(differ.merged):
        notes.append(
            f"Runs that differ only in {' and '.join(merged)} are taken together; --by {merged[0]} parts them."
        )
    named = {name for column in columns for name in column.fields}
    if hidden := [name for name in differ.shown if name not in named]:
        notes.append(f"Also different, but not shown: {', '.join(hidden)}.")
    if not differ.fields and len(rows) == 1 and len(rows[0].members) > 1:
        notes.append("All runs are repeats of one experiment; --each shows each of them.")
    return notes


def _on_hardware(rows: Sequence[Row]) -> list[str]:
    """What differs around the runs and is no field of the configuration."""
    found: list[str] = []
    members = [m for row in rows for m in row.members]
    runtimes = [m.entry.run.runtime() for m in members]
    for name in _HARDWARE:
        values = list(dict.fromkeys(str(r[name]) for r in runtimes if r.get(name) is not None))
        if len(values) > 1:
            found.append(f"{name}: {', '.join(values[:4])}")
    hosts = list(dict.fromkeys(str(host) for m in members if (host := m.entry.provenance.get("host"))))
    if len(hosts) > 1:
        found.append(f"launched on {', '.join(hosts[:4])}")
    return [f"Not all ran in the same place: {'; '.join(found)}."] if found else []


def _on_problems(rows: Sequence[Row]) -> list[str]:
    notes: list[str] = []
    for entry, problems in ((m.entry, m.problems) for row in rows for m in row.members):
        notes += [f"{entry.name}: {problem}" for problem in problems]
        if entry.state == "failed" and (error := entry.status.error):
            text = " ".join(f"{error.get('type', 'error')}: {error.get('message', '')}".split())
            notes.append(f"{entry.name} failed: {text[:160]}")
    return notes
