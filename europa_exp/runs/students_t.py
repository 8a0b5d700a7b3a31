"""Quantiles of Student's t distribution, which Python's library lacks."""

from __future__ import annotations

import functools
import math


@functools.lru_cache(maxsize=4096)
def t_quantile(freedom: float, alpha: float) -> float:
    """The t that |T| exceeds with chance ``alpha`` (two-sided), for any positive degrees of freedom."""
    low, high = 0.0, 1.0
    while _t_tail(high, freedom) > alpha and high < 1e12:
        low, high = high, 2 * high
    for _ in range(100):
        middle = (low + high) / 2
        if _t_tail(middle, freedom) > alpha:
            low = middle
        else:
            high = middle
    return high


def _t_tail(t: float, freedom: float) -> float:
    return _incomplete_beta(freedom / 2, 0.5, freedom / (freedom + t * t))


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """Regularised incomplete beta function by its continued fraction (Lentz's method)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(b, a, 1 - x)
    tiny = 1e-300
    front = math.exp(
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    )
    c, d = 1.0, 1 / max(1 - (a + b) * x / (a + 1), tiny)
    result = d
    for m in range(1, 500):
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 + term * d
            d = 1 / (d if abs(d) > tiny else tiny)
            c = 1 + term / c
            c = c if abs(c) > tiny else tiny
            result *= d * c
        if abs(d * c - 1) < 1e-14:
            break
    return front * result / a
