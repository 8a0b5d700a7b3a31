"""Is a difference between two experiments more than noise?

The rules, and why each is there:

- **Warm-up.** The first ``max(2, 10%)`` logged steps are left out: allocator, caches and connections settle there.
- **Value and spread.** The median and 1.4826 x the median absolute deviation (equal to the standard deviation for normal
  noise; Rousseeuw & Croux 1993, *Alternatives to the Median Absolute Deviation*). One hiccup of the machine moves neither.
- **Noise of one run.** Neighbouring steps are not independent, so the steps are cut into 6 consecutive blocks and the
  scatter of the blocks' medians is the error of the run's median ("batch means"; Law & Kelton, *Simulation Modeling and
  Analysis*), widened by (1 + r)/(1 - r) for the correlation r that is left between neighbouring blocks. If both runs saw
  the same data at the same steps, the blocks are compared in pairs: what the data does to both cancels.
- **Noise between runs.** Two runs of the same thing differ by more than their steps tell (placement, clocks, neighbours on
  the machine). With at least two runs on each side the error comes from the runs' values alone (Welch's t-test), and is
  never taken for smaller than what the steps tell. With repeats on one side only, the other side is taken to scatter alike.
- **Many questions.** A table asks one question a row. The confidence of each is raised (Bonferroni) so that one column
  holds a verdict that is luck in about 5% of the tables, however many rows it has.
- **Few steps.** Fewer than 12 steps after warm-up, or fewer than 5 independent ones (by their correlation), give no
  verdict.

What is assumed: a run does not drift beyond its warm-up; steps are correlated over a few steps, not over the whole run; the
noise of medians is near normal.

How well that holds, simulated with identical AR(1) runs, 18 to 270 steps, correlations r of neighbouring steps from 0 to 0.9
(1,000 pairs, 500 tables each; +-1 to 3 points): at the nominal 5%, 1.5 to 8% of single questions and 1 to 6% of tables with
five rows hold a verdict that is luck, up to 10% of tables for r = 0.7 and 18 steps. Short correlated runs mostly end as "too
few steps" (18 steps: 2% at r = 0, 23% at 0.3, 55% at 0.5, 86% at 0.7), which is what keeps those rates low: of the verdicts
that identical runs of 18 steps do get, 10% are wrong at r = 0.5 and over 20% at 0.7. From 90 steps on r up to 0.7 costs
nothing. The limit of 5 independent steps was chosen among 4, 5 and 6 in such a simulation, for few refusals at r = 0.3.

A verdict from single runs can't see the noise between runs, whatever the number of steps; the table says so, and
``launch.repeat=3`` is the way out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median, variance
from typing import Any

from europa_exp.runs.metrics import counted
from europa_exp.runs.quantities import Noise, Quantity, Value
from europa_exp.runs.students_t import t_quantile

ALPHA = 0.05
"""Nominal chance that a column of a table without real differences holds a verdict."""
BLOCKS = 6
MIN_STEPS = 12
MIN_INDEPENDENT = 5.0
_MAD = 1.4826


@dataclass(frozen=True)
class Sample:
    """One quantity of one run: its value, its spread over the steps, and the steps that it was taken from.

    ``value`` is None when the run never logged the quantity (or nothing is left after warm-up), NaN when a loss was not
    finite at the end. ``spread`` is None where there is none to tell (a peak, a total).
    """

    value: float | None
    spread: float | None = None
    used: tuple[tuple[int, float], ...] = ()
    """(step, value) of the finite values used."""
    dropped: int = 0
    """Logged steps left out as warm-up."""
    seed: object = None
    """What the randomness of the run hangs on; runs with equal seeds count once for a loss."""


@dataclass(frozen=True)
class Verdict:
    """The answer for one quantity of one row against the baseline.

    ``word`` is one of the quantity's words, ``equal``, ``within noise``, or why there is none: ``too few steps``,
    ``needs repeats``, ``needs seeds``. ``better`` is True, False, or None without a verdict or a better direction.
    ``difference`` is absolute, in the unit of the quantity; ``percent`` is relative to the baseline (None for a baseline
    of 0). ``margin`` is the half-width of the interval, in percent, that noise alone explains. ``basis`` says what the noise
    was taken from: ``steps``, ``paired steps``, ``runs``, ``seeds``, ``exact`` or None.
    """

    word: str
    difference: float | None = None
    percent: float | None = None
    margin: float | None = None
    better: bool | None = None
    basis: str | None = None

    @property
    def outside_noise(self) -> bool:
        return self.basis is not None and self.word not in ("within noise", "equal")


@dataclass(frozen=True)
class Estimate:
    """One quantity of one row of the table: a run, or the repeats of one experiment.

    ``value`` is the median for one run and the mean of the runs' medians for several; ``spread`` is over steps for one run
    (``over`` = ``steps``) and the standard deviation of the runs' values for several (``over`` = ``runs``).
    """

    samples: tuple[Sample, ...] = ()
    value: float | None = None
    spread: float | None = None
    over: str | None = None
    values: tuple[float, ...] = field(default=())
    missing: tuple[Sample, ...] = ()
    """Samples without a value: never logged, or (``dropped`` > 0) logged in the warm-up only."""


def sample(
    rows: Sequence[dict[str, Any]], what: Quantity, warmup: int | None = None, seed: object = None
) -> Sample:
    """Take one quantity from the logged steps of one run, in the order of writing; of what was done again the last counts.
    ``warmup`` is a number of logged steps; None is the rule above."""
    rows = counted(rows)
    series = _series(rows, what.key)
    if not series:
        return Sample(None, seed=seed)
    skip = warmup_steps(len(rows)) if warmup is None else warmup
    if what.value is Value.median:
        kept = [(s, v) for s, v in series if skip < len(rows) and s >= rows[skip]["step"]]
    elif what.value is Value.end:
        kept = series[-max(1, math.ceil(len(series) / 10)) :]
    else:
        kept = series
    finite = tuple((s, v) for s, v in kept if math.isfinite(v))
    dropped = len(series) - len(kept)
    if what.value is Value.end and len(finite) < len(kept):
        return Sample(math.nan, None, finite, dropped, seed)
    if not finite:
        return Sample(math.nan if kept else None, None, (), dropped, seed)
    numbers = [v for _, v in finite]
    if what.value is Value.peak:
        return Sample(max(numbers), None, finite, dropped, seed)
    if what.value is Value.total:
        return Sample(math.fsum(numbers), None, finite, dropped, seed)
    return Sample(median(numbers), spread(numbers), finite, dropped, seed)


def warmup_steps(logged: int) -> int:
    """Logged steps that are left out by default: max(2, 10%)."""
    return max(2, math.ceil(logged / 10))


def _series(rows: Sequence[dict[str, Any]], key: str) -> list[tuple[int, float]]:
    """(step, value) of the rows that hold a number under ``key``."""
    found = [(row["step"], row.get(key)) for row in rows]
    return [(s, float(v)) for s, v in found if isinstance(v, int | float) and not isinstance(v, bool)]


def spread(values: Sequence[float]) -> float | None:
    """1.4826 x the median absolute deviation; None for fewer than two values."""
    if len(values) < 2:
        return None
    middle = median(values)
    return _MAD * median(abs(v - middle) for v in values)


def estimate(samples: Sequence[Sample], what: Quantity) -> Estimate:
    """Put the repeats of one experiment together; for a loss, runs of one seed count once."""
    have = tuple(s for s in samples if s.value is not None)
    missing = tuple(s for s in samples if s.value is None)
    if not have:
        return Estimate(missing=missing)
    groups: dict[object, list[float]] = {}
    for index, s in enumerate(have):
        assert s.value is not None
        groups.setdefault(s.seed if what.noise is Noise.seeds else index, []).append(s.value)
    values = tuple(fmean(g) for g in groups.values())
    if len(values) == 1 and len(have) == 1:
        over = "steps" if have[0].spread is not None else None
        return Estimate(have, values[0], have[0].spread, over, values, missing)
    scatter = math.sqrt(variance(values)) if len(values) > 1 else None
    over = None if scatter is None else "seeds" if what.noise is Noise.seeds else "runs"
    return Estimate(have, fmean(values), scatter, over, values, missing)


def judge(
    what: Quantity, row: Estimate, base: Estimate, *, paired: bool = False, questions: int = 1
) -> Verdict | None:
    """Hold ``row`` against ``base``. None when one of them has no value.

    ``paired``: both sides saw the same data at the same steps. ``questions``: how many rows the table holds against the
    baseline.
    """
    if row.value is None or base.value is None:
        return None
    difference = row.value - base.value
    if not math.isfinite(difference):
        return Verdict("not finite")
    scale = abs(base.value)
    percent = 100 * difference / scale if scale else (0.0 if difference == 0 else None)
    noise = _noise(what, row, base, paired)
    if isinstance(noise, str):
        return Verdict("equal" if difference == 0 else noise, difference, percent)
    error, freedom, basis = noise
    reach = error * t_quantile(freedom, ALPHA / max(1, questions)) if error else 0.0
    margin = 100 * reach / scale if scale else None
    if difference == 0:
        word, better = "equal", None
    elif abs(difference) <= reach:
        word, better = "within noise", None
    else:
        word = what.words[0] if difference > 0 else what.words[1]
        better = None if what.higher_is_better is None else (difference > 0) == what.higher_is_better
    return Verdict(word, difference, percent, margin, better, basis)


def _noise(what: Quantity, row: Estimate, base: Estimate, paired: bool) -> tuple[float, float, str] | str:
    """(standard error of the difference, degrees of freedom, basis), or why there is none."""
    if what.noise is Noise.exact and _constant(row) and _constant(base):
        return 0.0, 1.0, "exact"
    repeats = min(len(row.values), len(base.values)), max(len(row.values), len(base.values))
    if repeats[1] >= 2 and (repeats[0] >= 2 or what.noise is not Noise.seeds):
        return _between_runs(what, row, base)
    if what.noise is Noise.seeds:
        return "needs seeds"
    if what.noise is Noise.runs:
        return "needs repeats"
    return _within_runs(row.samples[0], base.samples[0], paired)


def _constant(side: Estimate) -> bool:
    return len({v for s in side.samples for _, v in s.used}) <= 1 or (
        len(set(side.values)) == 1 and all(s.spread is None for s in side.samples)
    )


def _between_runs(what: Quantity, row: Estimate, base: Estimate) -> tuple[float, float, str]:
    basis = "seeds" if what.noise is Noise.seeds else "runs"
    small, large = sorted((row, base), key=lambda e: len(e.values))
    within = [_within_squared(what, e) for e in (small, large)]
    if len(small.values) == 1:
        # Would one more run of the repeated side have come out there?
        square = variance(large.values)
        parts = [max(square, within[0]), max(square / len(large.values), within[1])]
        return math.sqrt(sum(parts)), len(large.values) - 1, basis
    squares = [variance(e.values) / len(e.values) for e in (small, large)]
    total = sum(squares)
    freedom: float = len(small.values) + len(large.values) - 2
    if total > 0:
        freedom = total**2 / sum(
            q**2 / (len(e.values) - 1) for q, e in zip(squares, (small, large), strict=True)
        )
    return math.sqrt(max(total, sum(within))), freedom, basis


def _within_squared(what: Quantity, side: Estimate) -> float:
    """Squared error of the row's value as far as steps tell it; 0 where they don't."""
    if what.noise not in (Noise.steps, Noise.exact):
        return 0.0
    errors = [_block_error([v for _, v in s.used]) for s in side.samples if len(s.used) >= MIN_STEPS]
    return sum(e**2 for e in errors) / len(errors) / len(side.samples) if errors else 0.0


def _within_runs(row: Sample, base: Sample, paired: bool) -> tuple[float, float, str] | str:
    one, two = [v for _, v in row.used], [v for _, v in base.used]
    if min(independent(one), independent(two)) < MIN_INDEPENDENT or min(len(one), len(two)) < MIN_STEPS:
        return "too few steps"
    if paired and [s for s, _ in row.used] == [s for s, _ in base.used]:
        pairs = [a - b for a, b in zip(block_medians(one), block_medians(two), strict=True)]
        return _error(pairs), BLOCKS - 1, "paired steps"
    squares = [_block_error(one) ** 2, _block_error(two) ** 2]
    total = sum(squares)
    freedom = total**2 / (sum(q**2 for q in squares) / (BLOCKS - 1)) if total else 1.0
    return math.sqrt(total), freedom, "steps"


def block_medians(values: Sequence[float]) -> list[float]:
    """Medians of ``BLOCKS`` consecutive blocks of (nearly) equal length."""
    n = len(values)
    return [median(values[k * n // BLOCKS : (k + 1) * n // BLOCKS]) for k in range(BLOCKS)]


def _block_error(values: Sequence[float]) -> float:
    return _error(block_medians(values))


def _error(blocks: Sequence[float]) -> float:
    """Standard error of the mean of correlated blocks."""
    # The lag-1 correlation of b values is too small by ~1/b on average.
    r = min(max(lag1(blocks) + 1 / len(blocks), 0.0), 0.8)
    return math.sqrt(variance(blocks) / len(blocks) * (1 + r) / (1 - r))


def lag1(values: Sequence[float]) -> float:
    """Correlation of neighbours; 0 for a constant series."""
    mean = fmean(values)
    d = [v - mean for v in values]
    square = math.fsum(x * x for x in d)
    return math.fsum(a * b for a, b in itertools.pairwise(d)) / square if square > 0 else 0.0


def independent(values: Sequence[float]) -> float:
    """How many independent steps the correlated ones are worth (for the mean of an AR(1) series)."""
    n = len(values)
    if n < 3:
        return float(n)
    r = lag1(values)
    r = min(max(r + (1 + 3 * max(r, 0.0)) / n, 0.0), 0.99)
    return n * (1 - r) / (1 + r)
