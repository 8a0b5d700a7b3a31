"""Numbers, values, verdicts and fields as cells of a table say them."""

from __future__ import annotations

import json
import math
from typing import Any

from europa_exp.runs.statistics import Estimate, Verdict

ABSENT = "–"


def number(value: float | None, digits: int = 4) -> str:
    """A number with at least ``digits`` significant digits, thousands parted; ``–`` for none."""
    if value is None:
        return ABSENT
    if not math.isfinite(value):
        return str(value)
    return (
        f"{value:,.{_decimals(value, digits)}f}"
        if 1e-4 <= abs(value) < 1e15 or value == 0
        else f"{value:.3g}"
    )


def _decimals(value: float, digits: int) -> int:
    if value == 0 or (float(value).is_integer() and abs(value) >= 100):
        return 0
    return max(0, digits - 1 - math.floor(math.log10(abs(value))))


def value_text(estimate: Estimate) -> str:
    """``3,412 ± 21``; without the spread where there is none or it is 0."""
    text = number(estimate.value)
    value, spread = estimate.value, estimate.spread
    if value is None or not spread or not math.isfinite(value):
        return text
    decimals = _decimals(value, 4)
    shown = f"{spread:,.{decimals}f}"
    return f"{text} ± {shown if float(shown.replace(',', '')) else f'{spread:.1g}'}"


def verdict_text(verdict: Verdict | None) -> str:
    """``+5.2% faster``, with a question mark where single runs say so; ``–`` without a verdict."""
    if verdict is None:
        return ABSENT
    if verdict.word == "equal":
        return "equal"
    if verdict.percent is None:
        return verdict.word
    percent = f"{verdict.percent:+.{1 if abs(verdict.percent) >= 1 else 2}f}%"
    # Steps of one run know nothing of the noise between runs: such a verdict is a question, repeats answer it.
    doubt = "?" if verdict.outside_noise and verdict.basis in ("steps", "paired steps") else ""
    return f"{percent.replace('-', '−')} {verdict.word}{doubt}"


def field_text(value: Any) -> str:
    """A value of a field as it would be typed."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | dict):
        return json.dumps(value, ensure_ascii=False)
    return str(value)
