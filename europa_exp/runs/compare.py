"""Runs side by side: what differs between them, what they measured, and which differences are more than noise.

One row is one experiment: a run, or its repeats. Repeats are runs with the same configuration, code and data; runs that
differ only in a seed (``training.seed``, ``data.shuffle_seed``) are repeats too, because a result that hangs on the seed is
luck. They get rows of their own when seeds are all that differs, when ``by`` names a seed, or with ``each=True``.

Numbers come from the completed runs of a row. A row without one shows what its unfinished runs logged so far, and no verdict.
"""

from __future__ import annotations

import difflib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from europa_exp.config.experiment import EXPERIMENT, experiment_of, typed
from europa_exp.runs import statistics
from europa_exp.runs.folder import RunFolder
from europa_exp.runs.lookup import Entry, brief
from europa_exp.runs.quantities import DEFAULT, QUANTITIES, Quantity, Value, quantity
from europa_exp.runs.statistics import ALPHA, Estimate, Verdict

SEEDS = ("training.seed", "data.shuffle_seed")
CODE = "code"
DATA = "data_fingerprint"
CLUSTER = "cluster.name"
_SAME_DATA = (
    "data.",
    "training.seq_len",
    "training.local_batch_size",
    "training.global_batch_size",
    "parallelism.nodes",
    "parallelism.gpus_per_node",
    "parallelism.data_parallel_",
)
_HARDWARE = ("device", "device_name", "torch", "backend")


class CompareError(Exception):
    """What was asked for can't be compared; the message says why and what can."""


@dataclass(frozen=True)
class Member:
    """One run with all that the comparison needs of it, read once."""

    entry: Entry
    fields: dict[str, Any] | None
    """Dotted field -> value, without what can't change a result (but with the cluster's name, code and data); None if unreadable."""
    rows: list[dict[str, Any]]
    problems: list[str]

    @property
    def completed(self) -> bool:
        return self.entry.state == "completed"

    @property
    def overrides(self) -> list[str]:
        """What was typed for the run; empty without a record of it."""
        found = self.entry.provenance.get("overrides")
        return [text for text in found if isinstance(text, str)] if isinstance(found, list) else []

    @property
    def experiment(self) -> str | None:
        return experiment_of(self.overrides)

    @property
    def seed(self) -> object:
        return tuple((self.fields or {}).get(name) for name in SEEDS)


@dataclass(frozen=True)
class Column:
    """One column of what differs: a field, or several fields of a group in one."""

    title: str
    fields: tuple[str, ...]


@dataclass(frozen=True)
class Row:
    """One experiment. ``fields`` holds the differing fields (None-valued where it has none), ``estimates`` and ``verdicts``
    go by the keys of the quantities; a verdict is None for the baseline itself and where a value is absent."""

    label: str
    members: tuple[Member, ...]
    fields: dict[str, Any]
    estimates: dict[str, Estimate] = field(default_factory=dict)
    verdicts: dict[str, Verdict | None] = field(default_factory=dict)
    baseline: bool = False

    @property
    def completed(self) -> int:
        return sum(m.completed for m in self.members)

    @property
    def used(self) -> tuple[Member, ...]:
        """The runs that the numbers come from."""
        return tuple(m for m in self.members if m.completed) or self.members

    @property
    def state(self) -> str:
        """``completed``, ``running``, ``2 completed, 1 failed``, ..."""
        count = Counter(m.entry.state for m in self.members)
        if len(count) == 1:
            return next(iter(count))
        return ", ".join(f"{n} {state}" for state, n in sorted(count.items()))


@dataclass(frozen=True)
class Comparison:
    """All of it as data; ``europa_exp.runs.table.render`` makes text of it."""

    title: str
    columns: tuple[Column, ...]
    quantities: tuple[Quantity, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    warmup: int | None
    implied: tuple[str, ...] = ()
    """Differing fields without a column of their own, because the experiment of a row says them."""

    @property
    def baseline(self) -> Row | None:
        return next((row for row in self.rows if row.baseline), None)


def compare(
    runs: Sequence[RunFolder],
    *,
    by: Sequence[str] = (),
    metrics: Sequence[str] = (),
    baseline: Sequence[RunFolder] = (),
    warmup: int | None = None,
    each: bool = False,
    title: str = "",
) -> Comparison:
    """Compare ``runs`` (the order of the rows is theirs).

    ``by``: fields, groups or unique ends of field names that make the columns; without them all fields that differ.
    ``metrics``: keys of ``metrics.jsonl`` or parts of keys, ``all`` for every one; without them the usual ones that the runs
    have. ``baseline``: the run (or repeats) that differences refer to; added if it is not among ``runs``. Without it, the row
    with most differing fields at their ``off`` value, the first of several. ``warmup``: logged steps to leave out; without
    it max(2, 10%). Raises CompareError.
    """
    wanted = list(dict.fromkeys([*(run for run in baseline if run not in set(runs)), *runs]))
    if not wanted:
        raise CompareError("there are no runs to compare")
    if warmup is not None and warmup < 0:
        raise CompareError(f"warmup={warmup}: must be at least 0, a number of logged steps")
    members = [_member(run) for run in wanted]
    known = [m for m in members if m.fields is not None]
    by = [token.strip() for token in by if token.strip()]
    differing = _differing(known)
    merged = set() if each else _merged_seeds(differing, by)
    implied = [] if by else _implied([n for n in differing if n not in merged], members)
    columns, hidden = _columns([n for n in differing if n not in implied], known, by, merged)
    if not by and len({m.experiment for m in members}) > 1:
        columns.insert(0, Column(EXPERIMENT, (EXPERIMENT,)))
    quantities = _quantities(members, metrics)
    shown = [name for column in columns for name in column.fields]
    rows = _labelled(_grouped(members, merged, each), [*shown, *implied])
    rows = [replace(row, estimates=_estimates(row, quantities, warmup)) for row in rows]
    index = _baseline(rows, [*shown, *implied], set(baseline))
    base = rows[index]
    rows = [replace(row, baseline=i == index) for i, row in enumerate(rows)]
    for q in quantities:
        questions = sum(
            1 for r in rows if not r.baseline and r.completed and r.estimates[q.key].value is not None
        )
        for row in rows:
            row.verdicts[q.key] = None if row.baseline else _verdict(q, row, base, questions)
    notes = _notes(rows, base, quantities, merged, hidden, differing)
    if implied:
        names = dict.fromkeys(name.split(".")[0] for name in implied)
        notes.insert(0, f"experiment stands for what its file sets; --by {','.join(names)} shows it.")
    return Comparison(
        title, tuple(columns), tuple(quantities), tuple(rows), tuple(notes), warmup, tuple(implied)
    )


# ------------------------------------------------------------------------------------------------------- reading


def _member(run: RunFolder) -> Member:
    from europa_exp.config.identity import flatten

    entry = Entry(run)
    problems = entry.problems()
    known: dict[str, Any] | None = None
    try:
        cfg = run.config()
        known = {**flatten(cfg), CLUSTER: cfg.cluster.name}
    except Exception as error:
        if not any("config.yaml" in p for p in problems):
            problems.append(f"config.yaml: {brief(error)}")
    if known is not None:
        code = entry.provenance.get("code")
        known[CODE] = _code(code) if isinstance(code, dict) else None
        known[DATA] = entry.provenance.get("data_fingerprint")
    rows: list[dict[str, Any]] = []
    try:
        read = run.read_metrics()
        rows = read.rows
        if read.skipped:
            problems.append(f"{len(read.skipped)} unreadable lines of metrics.jsonl are left out")
    except Exception as error:
        problems.append(str(error))
    return Member(entry, known, rows, problems)


def _code(code: dict[str, Any]) -> str | None:
    """Commit and, with uncommitted changes, the start of their fingerprint; equal only for equal code."""
    commit = str(code.get("commit") or "")[:8]
    mark = str(code.get("fingerprint") or "")[:6]
    if code.get("dirty") or not commit:
        return "+".join(part for part in (commit, mark) if part) or None
    return commit


def _differing(members: Sequence[Member]) -> list[str]:
    """Fields whose values differ, in the order of the schema; code and data last."""
    names = dict.fromkeys(name for m in members for name in m.fields or {})
    off = _off_values()

    def key(m: Member, name: str) -> str:
        assert m.fields is not None
        return json.dumps(m.fields.get(name, off.get(name)), sort_keys=True, default=str)

    found = [name for name in names if len({key(m, name) for m in members}) > 1]
    last = (CLUSTER, CODE, DATA)
    return [n for n in found if n not in last] + [n for n in last if n in found]


def _off_values() -> dict[str, Any]:
    """Dotted field -> off value as plain data, for the fields that have one."""
    from europa_exp.config.io import plain
    from europa_exp.config.schema import NEVER_OFF, Config

    found: dict[str, Any] = {}

    def walk(cls: Any, prefix: str) -> None:
        for f in fields(cls):
            if is_dataclass(f.default_factory):
                walk(f.default_factory, f"{prefix}{f.name}.")
            elif (off := f.metadata.get("off", NEVER_OFF)) != NEVER_OFF:
                found[f"{prefix}{f.name}"] = plain(off)

    walk(Config, "")
    return found


def _merged_seeds(differing: Sequence[str], by: Sequence[str]) -> set[str]:
    named = {n for n in SEEDS for token in by if _names(n, token) or n.endswith(f".{token}")}
    seeds = {name for name in differing if name in SEEDS} - named
    return seeds if set(differing) - seeds else set()


def _grouped(members: Sequence[Member], merged: set[str], each: bool) -> list[list[Member]]:
    groups: dict[str, list[Member]] = {}
    for m in members:
        if each or m.fields is None:
            key = str(m.entry.run.path)
        else:
            kept = {k: v for k, v in m.fields.items() if k not in merged}
            key = json.dumps(kept, sort_keys=True, default=str)
        groups.setdefault(key, []).append(m)
    return list(groups.values())


def _labelled(groups: Sequence[list[Member]], shown: Sequence[str]) -> list[Row]:
    """Rows with short names that differ: the hash where that is enough, else with the suffix of the folder, else the name."""
    off = _off_values()
    hashes = [g[0].entry.identity for g in groups]
    rows: list[Row] = []
    for group, found in zip(groups, hashes, strict=True):
        name = group[0].entry.name
        label = name
        if found:
            unique = hashes.count(found) == 1
            tail = name.rpartition(found)[2] if found in name else ""
            label = found if unique else f"{found}{tail}"
        values = group[0].fields
        known = {n: None if values is None else values.get(n, off.get(n)) for n in shown}
        if EXPERIMENT in known:
            named = dict.fromkeys(m.experiment for m in group if m.experiment is not None)
            known[EXPERIMENT] = ", ".join(named) or None
        rows.append(Row(label, tuple(group), known))
    seen = Counter(row.label for row in rows)
    return [replace(r, label=r.members[0].entry.name) if seen[r.label] > 1 else r for r in rows]


# ------------------------------------------------------------------------------------------------------- columns


def _names(name: str, token: str) -> bool:
    return name == token or name.startswith(f"{token}.")


def _columns(
    differing: Sequence[str], members: Sequence[Member], by: Sequence[str], merged: set[str]
) -> tuple[list[Column], list[str]]:
    """The columns, and the differing fields that they don't show."""
    shown = [name for name in differing if name not in merged]
    if not by:
        return _all_columns(shown), []
    every = list(dict.fromkeys(name for m in members for name in m.fields or {}))
    every += [name for name in _off_values() if name not in every]
    every += [EXPERIMENT] if any(m.experiment for m in members) else []
    columns: list[Column] = []
    for token in dict.fromkeys(by):
        fitting = [n for n in every if _names(n, token)] or [n for n in every if n.endswith(f".{token}")]
        if not fitting or (len(fitting) > 1 and not any(_names(n, token) for n in fitting)):
            raise CompareError(_no_field(token, fitting, every))
        differ = tuple(n for n in fitting if n in shown)
        if differ:
            columns.append(Column(token if len(differ) > 1 else _short(differ[0], shown), differ))
        else:
            # It was asked for, so it is shown, although it is the same everywhere; a group in one column.
            columns.append(Column(fitting[0] if len(fitting) == 1 else token, tuple(fitting)))
    named = {n for column in columns for n in column.fields}
    return columns, [n for n in shown if n not in named]


def _implied(differing: Sequence[str], members: Sequence[Member]) -> list[str]:
    """Differing fields that are told by the experiments: the same in all runs of one, and typed for none."""
    if not all(m.experiment for m in members):
        return []
    found: list[str] = []
    for name in differing:
        values: dict[str | None, set[str]] = {}
        for m in members:
            if m.fields is not None:
                value = json.dumps(m.fields.get(name), default=str)
                values.setdefault(m.experiment, set()).add(value)
        told = all(len(of_one) == 1 for of_one in values.values())
        if told and name not in (CLUSTER, CODE, DATA) and not any(typed(name, m.overrides) for m in members):
            found.append(name)
    return found


def _no_field(token: str, fitting: Sequence[str], every: Sequence[str]) -> str:
    if fitting:
        return f"by={token}: several fields end like that ({', '.join(fitting)}); name one of them"
    pool = list(
        dict.fromkeys([*(n.split(".")[0] for n in every), *every, *(n.split(".")[-1] for n in every)])
    )
    close = difflib.get_close_matches(token, pool, n=3)
    hint = f"did you mean {' or '.join(close)}?" if close else "`europa fields` lists them"
    return f"by={token}: there is no such field or group; {hint}"


def _all_columns(shown: Sequence[str]) -> list[Column]:
    """A column a field; a group with more than two differing fields shares one, or the table would be all configuration."""
    by_group: dict[str, list[str]] = {}
    for name in shown:
        by_group.setdefault(name.split(".")[0] if "." in name else name, []).append(name)
    columns: list[Column] = []
    for group, names in by_group.items():
        if len(names) > 2:
            columns.append(Column(group, tuple(names)))
        else:
            columns += [Column(_short(name, shown), (name,)) for name in names]
    return columns


def _short(name: str, among: Sequence[str]) -> str:
    leaf = name.rsplit(".", 1)[-1]
    unique = sum(n.rsplit(".", 1)[-1] == leaf for n in among) <= 1
    return leaf if unique and leaf not in ("name", "source") else name


def _quantities(members: Sequence[Member], wanted: Sequence[str]) -> list[Quantity]:
    present = dict.fromkeys(
        key
        for m in members
        for row in m.rows
        for key, value in row.items()
        if key not in ("step", "time") and isinstance(value, int | float)
    )
    tokens = [t.strip() for t in wanted if t.strip()]
    if not tokens:
        keys = [key for key in DEFAULT if key in present]
        if "memory/peak_reserved_gib" in keys and "memory/peak_host_gib" in keys:
            keys.remove("memory/peak_host_gib")
        return [quantity(key) for key in keys]
    chosen: list[str] = []
    for token in tokens:
        if token == "all":
            chosen += present
            continue
        pool = [*present, *(key for key in QUANTITIES if key not in present)]
        fitting = [k for k in pool if k == token] or [k for k in pool if _names(k.replace("/", "."), token)]
        fitting = fitting or [k for k in present if token in k]
        if not fitting:
            close = difflib.get_close_matches(token, pool, n=3, cutoff=0.4)
            hint = f"; did you mean {' or '.join(close)}?" if close else "."
            have = (
                f"These runs have {', '.join(present)}" if present else "These runs have logged nothing yet"
            )
            raise CompareError(f"metrics={token}: no such quantity{hint} {have}")
        chosen += fitting
    return [quantity(key) for key in dict.fromkeys(chosen)]


# ------------------------------------------------------------------------------------------------------- numbers


def _estimates(row: Row, quantities: Sequence[Quantity], warmup: int | None) -> dict[str, Estimate]:
    return {
        q.key: statistics.estimate([statistics.sample(m.rows, q, warmup, seed=m.seed) for m in row.used], q)
        for q in quantities
    }


def _baseline(rows: Sequence[Row], shown: Sequence[str], named: set[RunFolder]) -> int:
    for index, row in enumerate(rows):
        if named & {m.entry.run for m in row.members}:
            return index
    off = _off_values()

    def score(index: int) -> tuple[bool, int, int]:
        row = rows[index]
        at_off = sum(name in off and row.fields[name] == off[name] for name in shown)
        return bool(row.completed), at_off if row.members[0].fields is not None else -1, -index

    return max(range(len(rows)), key=score)


def _verdict(q: Quantity, row: Row, base: Row, questions: int) -> Verdict | None:
    one, two = row.estimates[q.key], base.estimates[q.key]
    found = statistics.judge(q, one, two, paired=_same_data(row, base), questions=questions)
    if found is None or (row.completed and base.completed):
        return found
    if q.value is not Value.median or found.difference is None:
        return Verdict("unfinished")  # an end, a peak or a total of half a run says nothing
    return Verdict("unfinished", found.difference, found.percent)


def _same_data(row: Row, base: Row) -> bool:
    one, two = row.used[0].fields, base.used[0].fields
    if one is None or two is None or one.get(DATA) != two.get(DATA):
        return False
    names = {n for n in {*one, *two} if n.startswith(_SAME_DATA)}
    return all(one.get(n) == two.get(n) for n in names)


def _notes(
    rows: Sequence[Row],
    base: Row,
    quantities: Sequence[Quantity],
    merged: set[str],
    hidden: Sequence[str],
    differing: Sequence[str],
) -> list[str]:
    notes: list[str] = []
    words = {v.word for row in rows for v in row.verdicts.values() if v}
    bases = {v.basis for row in rows for v in row.verdicts.values() if v and v.basis}
    if bases:
        rows_held = sum(1 for row in rows if not row.baseline)
        notes.append(
            f"± is the spread over steps (one run) or between runs (n > 1). A verdict means more than noise: about {ALPHA:.0%}"
            f" chance that a column of {rows_held} verdict{'s' if rows_held > 1 else ''} holds one that is luck."
        )
    if bases & {"steps", "paired steps"}:
        notes.append(
            "?: more than the noise between steps, but single runs can't see the noise between runs; "
            "launch.repeat=3 adds repeats."
        )
    if "needs repeats" in words:
        notes.append("needs repeats: steps don't show this quantity's noise, repeats do (launch.repeat=3).")
    if "needs seeds" in words:
        notes.append(
            "needs seeds: a loss differs from seed to seed; run each experiment with several (training.seed=0,1,2)."
        )
    if "too few steps" in words:
        notes.append(
            f"too few steps: fewer than {statistics.MIN_STEPS} steps after warm-up, or too alike from step to step."
        )
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
    if merged:
        notes.append(
            f"Runs that differ only in {' and '.join(sorted(merged))} are taken together; --by {sorted(merged)[0]} parts them."
        )
    if hidden:
        notes.append(f"Also different, but not shown: {', '.join(hidden)}.")
    if not differing and len(rows) == 1 and len(base.members) > 1:
        notes.append("All runs are repeats of one experiment; --each shows each of them.")
    notes += _hardware(rows)
    for row in rows:
        for m in row.members:
            notes += [f"{m.entry.name}: {problem}" for problem in m.problems]
            error = m.entry.status.error
            if m.entry.state == "failed" and error:
                text = " ".join(f"{error.get('type', 'error')}: {error.get('message', '')}".split())
                notes.append(f"{m.entry.name} failed: {text[:160]}")
    return notes


def _hardware(rows: Sequence[Row]) -> list[str]:
    """What differs around the runs and is no field of the configuration."""
    found: list[str] = []
    members = [m for row in rows for m in row.members]
    runtimes = [m.entry.run.runtime() for m in members]
    for name in _HARDWARE:
        values = list(dict.fromkeys(str(r[name]) for r in runtimes if r.get(name) is not None))
        if len(values) > 1:
            found.append(f"{name}: {', '.join(values[:4])}")
    hosts = list(
        dict.fromkeys(str(m.entry.provenance.get("host")) for m in members if m.entry.provenance.get("host"))
    )
    if len(hosts) > 1:
        found.append(f"launched on {', '.join(hosts[:4])}")
    return [f"Not all ran in the same place: {'; '.join(found)}."] if found else []


# --------------------------------------------------------------------------------------------------- for one run


def switched_on(run: RunFolder) -> dict[str, Any]:
    """The knobs of a run that are not at their ``off`` value. Raises what reading the configuration raises."""
    from europa_exp.config.identity import flatten

    off = _off_values()
    found = flatten(run.config())
    # An entry of a free dict (nccl.extra.NCCL_ALGO) has no off value of its own: it is there or it isn't.
    return {k: v for k, v in found.items() if (off[k] != v if k in off else k.rpartition(".")[0] in off)}


def field_changes(run: RunFolder, parent: str) -> dict[str, tuple[Any, Any]] | None:
    """Dotted field -> (value of the parent, value of the run); None if the parent is not beside the run any more."""
    from europa_exp.config.identity import flatten

    try:
        old, new = flatten(RunFolder(run.path.parent / Path(parent).name).config()), flatten(run.config())
    except Exception:
        return None
    return {k: (old.get(k), new.get(k)) for k in dict.fromkeys([*old, *new]) if old.get(k) != new.get(k)}
