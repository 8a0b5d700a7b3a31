"""Comparisons as text, for people and for programs."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path

import pytest
from compared import SPEED, runs_of, two_precisions_and_three_limits
from recorded import log_steps, record

from europa_exp.runs.compare import compare
from europa_exp.runs.table import render


@pytest.fixture(scope="module")
def six(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return two_precisions_and_three_limits(tmp_path_factory.mktemp("six"))


@pytest.mark.parametrize("width", [80, 100, 160])
def test_table_fits_the_terminal_and_loses_nothing(six: Path, width: int) -> None:
    found = compare(runs_of(six))
    text = render(found, width=width)
    assert max(len(line) for line in text.split("\n")) <= width
    for q in found.quantities:
        assert q.title in text
    assert text.count("faster") == sum(
        v is not None and v.word == "faster" for r in found.rows for v in r.verdicts.values()
    )
    assert "\x1b" not in text
    assert "\x1b" in render(found, width=width, color=True)


def test_plain_table_has_a_line_a_run(six: Path) -> None:
    found = compare(runs_of(six))
    lines = render(found).split("\n")
    assert sum(line.startswith(tuple(r.label for r in found.rows)) for line in lines) == 6
    base = found.baseline
    assert base is not None
    assert base.label in lines[0]  # the baseline is named
    assert "max_ctas=8" in lines[0]


def test_markdown_is_a_table(six: Path) -> None:
    lines = render(compare(runs_of(six)), "markdown").split("\n")
    table = [line for line in lines if line.startswith("|")]
    bars = [line.replace("\\|", "").count("|") for line in table]
    assert len(table) == 8
    assert len(set(bars)) == 1
    assert set(table[1]) <= set("|-: ")
    assert lines[1] == ""


def test_markdown_escapes_values(tmp_path: Path) -> None:
    log_steps(record(tmp_path, "nccl.ib_hca='a|b*c'"))
    log_steps(record(tmp_path))
    table = [
        line for line in render(compare(runs_of(tmp_path)), "markdown").split("\n") if line.startswith("|")
    ]
    assert any("a\\|b\\*c" in line for line in table)


def test_csv_and_json_have_every_digit(six: Path) -> None:
    found = compare(runs_of(six))
    rows = list(csv.DictReader(io.StringIO(render(found, "csv"))))
    data = json.loads(render(found, "json"))
    assert len(rows) == len(data["rows"]) == 6
    for one, flat, nested in zip(found.rows, rows, data["rows"], strict=True):
        value = one.estimates[SPEED].value
        assert value is not None
        assert float(flat[SPEED]) == nested["metrics"][SPEED]["value"] == value
        assert flat["nccl.max_ctas"] == str(nested["fields"]["nccl.max_ctas"])
        verdict = one.verdicts[SPEED]
        assert (
            (flat[f"{SPEED}:verdict"] or None)
            == nested["metrics"][SPEED]["verdict"]
            == (verdict and verdict.word)
        )
    assert data["baseline"] == rows[0]["label"]
    assert "memory/peak_reserved_gib" not in data["rows"][0]["metrics"]


def test_loss_that_is_not_finite_stays_valid_json(tmp_path: Path) -> None:
    log_steps(record(tmp_path))
    log_steps(
        record(tmp_path, "comm=fp8"), more=lambda step: {"loss/global_avg": math.nan} if step > 50 else {}
    )
    found = compare(runs_of(tmp_path))
    loss = json.loads(render(found, "json"))["rows"][1]["metrics"]["loss/global_avg"]
    assert (loss["value"], loss["verdict"]) == ("NaN", "not finite")
    assert "nan" in render(found)


def test_an_unknown_format_is_refused(six: Path) -> None:
    with pytest.raises(ValueError, match="table, markdown, csv, json"):
        render(compare(runs_of(six)), "xml")
