"""The message of a ConfigError."""

from __future__ import annotations

from europa_exp.config.errors import ConfigError, Problem
from europa_exp.config.schema import ExpertAllGather


def problem(value, field="nccl.max_ctas"):
    return Problem(field, value, "must be 1 to 64", "Give 1 to 64")


def test_problem_is_one_line_with_field_value_rule_and_way_out():
    assert str(problem(0)) == "nccl.max_ctas=0: must be 1 to 64. Give 1 to 64."
    assert str(problem("a\nb" * 400)).count("\n") == 0
    assert len(str(problem("x" * 10_000))) < 300
    assert len(str(problem(10**5000))) < 300
    assert "=null:" in str(problem(None))
    assert "=true:" in str(problem(True))
    assert "=fp8:" in str(problem(ExpertAllGather.fp8))


def test_what_there_is_to_choose_from_is_listed_one_a_line():
    text = str(Problem("rerun", "a", "fits 2 runs", "Type more", ("  ab  (completed)", "ac\n(failed)")))
    assert text.splitlines() == [
        "rerun='a': fits 2 runs. Type more.",
        "      ab  (completed)",
        "      ac (failed)",
    ]


def test_a_problem_that_many_points_share_is_told_once():
    points = [(f"point {i}", problem(0)) for i in range(48)] + [("point 3", problem(1, "x.y"))]
    message = str(ConfigError(points))
    assert message.startswith("2 problems in the configuration:")
    assert message.count("nccl.max_ctas=0") == 1
    assert "point 0, point 1" in message
    assert "and 40 more" in message
    assert "x.y=1: must be 1 to 64. Give 1 to 64.\n    in point 3" in message


def test_a_single_run_needs_no_label():
    assert str(ConfigError([("", problem(0))])).splitlines() == [
        "1 problem in the configuration:",
        "  - nccl.max_ctas=0: must be 1 to 64. Give 1 to 64.",
    ]
