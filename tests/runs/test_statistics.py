"""Verdicts are held to simulated data: what the truth is there is known."""

from __future__ import annotations

import math
import random
from statistics import median

import pytest
from recorded import ar1

from europa_exp.runs.quantities import quantity
from europa_exp.runs.statistics import (
    Estimate,
    Sample,
    estimate,
    independent,
    judge,
    sample,
    spread,
    warmup_steps,
)
from europa_exp.runs.students_t import t_quantile

SPEED = quantity("throughput/tokens_per_second_per_gpu")
STEP = quantity("time/step_s")
MEMORY = quantity("memory/peak_reserved_gib")
BYTES = quantity("comm/all_gather_sent_gib")
LOSS = quantity("loss/global_avg")


def one(values: list[float], what=SPEED, seed: object = 0) -> Sample:
    return Sample(median(values), spread(values), tuple(enumerate(values)), 0, seed)


def run(rng: random.Random, n: int, rho: float, mean: float = 100.0, deviation: float = 1.0) -> Estimate:
    return estimate([one(ar1(rng, n, mean, deviation, rho))], SPEED)


def rate(words: list[str]) -> float:
    return sum(word in ("faster", "slower") for word in words) / len(words)


@pytest.mark.parametrize(
    ("freedom", "alpha", "expected"),
    # Printed tables of Student's t.
    [
        (1, 0.05, 12.706),
        (2, 0.01, 9.925),
        (5, 0.05, 2.571),
        (10, 0.01, 3.169),
        (30, 0.05, 2.042),
        (1000, 0.05, 1.962),
    ],
)
def test_t_quantile_is_the_tabled_one(freedom: float, alpha: float, expected: float) -> None:
    assert t_quantile(freedom, alpha) == pytest.approx(expected, abs=6e-4)


def test_warm_up_is_two_steps_or_a_tenth() -> None:
    assert [warmup_steps(n) for n in (0, 5, 20, 21, 60)] == [2, 2, 2, 3, 6]


def test_value_leaves_warm_up_out() -> None:
    rows = [{"step": s, "time/step_s": 9.0 if s < 3 else 1.0} for s in range(1, 21)]
    found = sample(rows, STEP)
    assert (found.value, found.dropped, len(found.used)) == (1.0, 2, 18)
    assert sample(rows, STEP, warmup=0).used[0] == (1, 9.0)
    assert sample(rows, STEP, warmup=20).value is None


def test_steps_of_a_lost_attempt_do_not_count_beyond_where_the_next_one_went_on() -> None:
    """The first attempt came to step 40, the second goes on from 20 and ends at 30."""
    rows = [{"step": s, LOSS.key: 5.0, MEMORY.key: 9.0, STEP.key: 1.0} for s in range(1, 41)]
    rows += [{"step": s, LOSS.key: 2.0, MEMORY.key: 4.0, STEP.key: 3.0} for s in range(21, 31)]
    assert sample(rows, LOSS).used == ((28, 2.0), (29, 2.0), (30, 2.0))
    assert [s for s, _ in sample(rows, STEP).used] == list(range(4, 31))
    assert sample(rows, STEP).used[-10:] == tuple((s, 3.0) for s in range(21, 31))
    assert sample(rows[20:], MEMORY).value == 4.0


def test_warm_up_counts_logged_steps_although_a_quantity_came_later() -> None:
    rows = [{"step": s} | ({"time/step_s": float(s)} if s > 5 else {}) for s in range(1, 21)]
    assert sample(rows, STEP).used[0] == (6, 6.0)


def test_values_by_kind() -> None:
    rows = [
        {
            "step": s,
            MEMORY.key: 5.0 if s == 1 else 2.0,
            "memory/allocator_retries": 1,
            LOSS.key: 10.0 - s / 10,
        }
        for s in range(1, 41)
    ]
    assert sample(rows, MEMORY).value == 5.0  # the peak counts in the warm-up too
    assert sample(rows, quantity("memory/allocator_retries")).value == 40
    assert sample(rows, LOSS).value == pytest.approx(median([6.3, 6.2, 6.1, 6.0]))
    assert sample(rows, quantity("never/logged")).value is None


def test_loss_that_ends_in_nan_is_nan() -> None:
    rows = [{"step": s, LOSS.key: math.nan if s == 20 else 1.0} for s in range(1, 21)]
    found = estimate([sample(rows, LOSS)], LOSS)
    assert found.value is not None
    assert math.isnan(found.value)
    verdict = judge(LOSS, found, estimate([Sample(1.0)], LOSS))
    assert verdict is not None
    assert (verdict.word, verdict.percent) == ("not finite", None)


@pytest.mark.parametrize(("steps", "rho"), [(18, 0.0), (18, 0.5), (45, 0.3), (90, 0.5), (90, 0.7)])
@pytest.mark.parametrize("paired", [False, True])
def test_identical_runs_are_seldom_told_apart(steps: int, rho: float, paired: bool) -> None:
    rng = random.Random(7)
    words = [
        judge(SPEED, run(rng, steps, rho), run(rng, steps, rho), paired=paired).word  # type: ignore[union-attr]
        for _ in range(400)
    ]
    # Nominal 5%; three standard errors of 400 draws are 3.3%.
    assert rate(words) < 0.085


def test_a_table_of_ten_identical_runs_seldom_holds_a_verdict() -> None:
    rng = random.Random(8)
    lucky = 0
    for _ in range(150):
        base = run(rng, 45, 0.3)
        lucky += any(judge(SPEED, run(rng, 45, 0.3), base, questions=10).outside_noise for _ in range(10))  # type: ignore[union-attr]
    assert lucky / 150 < 0.1


def test_a_real_difference_of_five_percent_is_found() -> None:
    rng = random.Random(9)
    for steps, least in ((18, 0.6), (45, 0.98)):
        found = [
            judge(SPEED, run(rng, steps, 0.3, 105.0, 1.5), run(rng, steps, 0.3, 100.0, 1.5), questions=5)
            for _ in range(200)
        ]
        assert sum(v is not None and v.word == "faster" for v in found) / 200 >= least
        assert not any(v is not None and v.word == "slower" for v in found)


def test_pairs_find_what_the_data_hides() -> None:
    # Documents make some steps 30% slower in both runs alike; one run is 2% faster.
    rng = random.Random(10)
    work = [rng.uniform(0.7, 1.3) for _ in range(60)]
    fast = estimate([one([100 * w * rng.gauss(1.02, 0.002) for w in work])], SPEED)
    slow = estimate([one([100 * w * rng.gauss(1, 0.002) for w in work])], SPEED)
    assert judge(SPEED, fast, slow, paired=False).word != "faster"  # type: ignore[union-attr]
    verdict = judge(SPEED, fast, slow, paired=True)
    assert verdict is not None
    assert (verdict.word, verdict.basis) == ("faster", "paired steps")


def test_few_or_clinging_steps_give_no_verdict() -> None:
    rng = random.Random(11)
    assert judge(SPEED, run(rng, 11, 0), run(rng, 30, 0, 200)).word == "too few steps"  # type: ignore[union-attr]
    drifting = estimate([one([100.0 + i for i in range(40)])], SPEED)
    assert independent([100.0 + i for i in range(40)]) < 5
    assert judge(SPEED, drifting, run(rng, 40, 0)).word == "too few steps"  # type: ignore[union-attr]


def test_direction_of_better() -> None:
    rng = random.Random(12)
    fast, slow = ar1(rng, 40, 2.0, 0.01), ar1(rng, 40, 1.0, 0.01)
    up = judge(SPEED, estimate([one(fast)], SPEED), estimate([one(slow)], SPEED))
    down = judge(STEP, estimate([one(fast)], STEP), estimate([one(slow)], STEP))
    assert up is not None
    assert down is not None
    assert (up.word, up.better) == ("faster", True)
    assert (down.word, down.better) == ("slower", False)
    assert up.percent == pytest.approx(100, abs=3)
    assert up.margin is not None
    assert up.margin < 5


def test_repeats_see_the_noise_between_runs() -> None:
    # Each run is steady, but runs differ by 3%: single runs would say faster or slower nearly always.
    rng = random.Random(13)

    def repeats(n: int, mean: float = 100.0) -> Estimate:
        return estimate([one(ar1(rng, 30, rng.gauss(mean, 3), 0.1)) for _ in range(n)], SPEED)

    single = [judge(SPEED, repeats(1), repeats(1)).word for _ in range(200)]  # type: ignore[union-attr]
    assert rate(single) > 0.8
    for rows, bases in ((2, 2), (3, 3), (1, 3), (4, 2)):
        words = [judge(SPEED, repeats(rows), repeats(bases)).word for _ in range(200)]  # type: ignore[union-attr]
        assert rate(words) < 0.1, (rows, bases)
    found = [judge(SPEED, repeats(3, 130.0), repeats(3)).word for _ in range(100)]  # type: ignore[union-attr]
    assert found.count("faster") > 90


def test_repeats_are_never_surer_than_their_steps() -> None:
    # Two repeats whose medians agree by luck must not make their noisy steps certain.
    noisy = [90.0, 110.0, 95.0, 105.0, 80.0, 120.0] * 4
    shifted = [v + 0.5 for v in noisy]
    rng = random.Random(14)

    def both(values: list[float]) -> Estimate:
        return estimate([one(rng.sample(values, len(values))) for _ in range(2)], SPEED)

    assert judge(SPEED, both(shifted), both(noisy)).word == "within noise"  # type: ignore[union-attr]


def test_row_of_repeats_shows_the_mean_of_medians_and_the_spread_between_runs() -> None:
    found = estimate([one([1.0] * 12), one([3.0] * 12)], SPEED)
    assert (found.value, found.over) == (2.0, "runs")
    assert found.spread == pytest.approx(math.sqrt(2))


def test_bytes_are_counts() -> None:
    half, whole = estimate([one([0.26] * 5)], BYTES), estimate([one([0.5] * 5)], BYTES)
    verdict = judge(BYTES, half, whole)
    assert verdict is not None
    assert (verdict.word, verdict.better, verdict.basis, verdict.outside_noise) == (
        "less",
        True,
        "exact",
        True,
    )
    assert judge(BYTES, whole, whole).word == "equal"  # type: ignore[union-attr]


def test_memory_needs_repeats() -> None:
    def peaks(*values: float) -> Estimate:
        return estimate([Sample(v, None, ((1, v),)) for v in values], MEMORY)

    assert judge(MEMORY, peaks(80), peaks(81)).word == "needs repeats"  # type: ignore[union-attr]
    assert judge(MEMORY, peaks(80, 80.1, 80.2), peaks(90, 90.1, 90.2)).word == "less"  # type: ignore[union-attr]
    assert judge(MEMORY, peaks(80), peaks(90, 90.1, 90.2)).word == "less"  # type: ignore[union-attr]


def test_loss_needs_seeds_and_counts_each_once() -> None:
    def losses(*values: tuple[float, int]) -> Estimate:
        return estimate([Sample(v, 0.01, ((1, v),), 0, seed) for v, seed in values], LOSS)

    # The same seed three times repeats the loss bit by bit and says nothing about the next seed.
    verdict = judge(LOSS, losses((2.0, 0), (2.0, 0), (2.0, 0)), losses((2.1, 0), (2.1, 0)))
    assert verdict is not None
    assert (verdict.word, verdict.basis) == ("needs seeds", None)
    seeds = losses((2.0, 0), (2.01, 1), (2.02, 2)), losses((3.0, 0), (3.01, 1), (3.02, 2))
    assert judge(LOSS, *seeds).word == "lower"  # type: ignore[union-attr]
    assert len(losses((2.0, 0), (2.2, 0), (2.4, 1)).values) == 2


def test_baseline_of_zero_has_no_percent() -> None:
    what = quantity("memory/allocator_retries")
    none, some = estimate([Sample(0.0), Sample(0.0)], what), estimate([Sample(4.0), Sample(4.0)], what)
    verdict = judge(what, some, none)
    assert verdict is not None
    assert (verdict.percent, verdict.difference, verdict.word) == (None, 4.0, "more")
    assert judge(what, Estimate(), none) is None
