from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from making import make_run

from europa_exp.runs.metrics import MetricsWriter, counted, read_metrics, to_line


def test_lines_come_back_in_order(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        assert writer.write({"loss/global_avg": 2.5, "tokens_seen": 512}, 1)
        assert read_metrics(path).rows[0]["loss/global_avg"] == 2.5  # before the file is closed
        assert writer.write({"loss/global_avg": 2.25}, 2)
    rows = read_metrics(path).rows
    assert [row["step"] for row in rows] == [1, 2]
    assert isinstance(rows[0]["tokens_seen"], int)
    assert rows[0]["time"].endswith("+00:00")


@pytest.mark.parametrize(
    ("written", "counts"),
    [
        ([], []),
        ("a1 a2 a3", "a1 a2 a3"),
        ("a1 a5 a10 b5 b10 b15", "a1 b5 b10 b15"),
        # Far back, from an older checkpoint than the newest, and not yet or never as far again.
        ("a2 a4 a6 a8 b4", "a2 b4"),
        ("a1 a2 a3 b1", "b1"),
        ("a2 a4 b4 b6 c4", "a2 c4"),
        # The second attempt logged nothing, the third goes on behind it.
        ("a2 a4 c6", "a2 a4 c6"),
    ],
)
def test_of_attempts_the_steps_count_that_led_to_where_the_run_is(written: str, counts: str) -> None:
    rows = [{"step": int(word[1:]), "attempt": word[0]} for word in written and written.split()]
    assert [f"{row['attempt']}{row['step']}" for row in counted(rows)] == (counts and counts.split())


def test_what_is_not_finite_is_valid_json_and_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write({"a": math.nan, "b": math.inf, "c": -math.inf}, 1)

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    json.loads(path.read_text(), parse_constant=refuse)
    row = read_metrics(path).rows[0]
    assert math.isnan(row["a"])
    assert row["b"] == math.inf
    assert row["c"] == -math.inf


def test_only_numbers_are_written() -> None:
    class Scalar:
        def item(self) -> float:
            return 1.5

    class Vector:
        def item(self) -> float:
            raise ValueError("more than one value")

    row = json.loads(to_line({"a": Scalar(), "b": Vector(), "c": None, "d": "text", "step": 9, "e": True}, 3))
    assert {k: v for k, v in row.items() if k != "time"} == {"step": 3, "a": 1.5, "e": True}


def test_a_last_line_cut_in_the_middle_is_dropped_and_the_next_writer_starts_afresh(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        for step in (1, 2, 3):
            writer.write({"loss": 1.0 / step}, step)
    path.write_bytes(path.read_bytes()[:-12])
    found = read_metrics(path)
    assert [row["step"] for row in found.rows] == [1, 2]
    assert found.cut
    assert not found.skipped
    with MetricsWriter(path) as writer:
        writer.write({"loss": 0.25}, 4)
    found = read_metrics(path)
    assert [row["step"] for row in found.rows] == [1, 2, 4]
    assert not found.cut
    assert [number for number, _ in found.skipped] == [3]


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(0, 400))
def test_a_cut_anywhere_gives_whole_rows_only(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    path = tmp_path_factory.mktemp("cut") / "metrics.jsonl"
    rows = [{"step": step, "loss": 1.0 / step, "größe": step * 10**6} for step in range(1, 8)]
    data = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    path.write_bytes(data[:cut])
    found = read_metrics(path)
    assert found.rows == rows[: len(found.rows)]
    assert not found.skipped
    assert found.cut == (
        data[:cut].rpartition(b"\n")[2] != b"" and len(found.rows) == data[:cut].count(b"\n")
    )


@pytest.mark.parametrize(
    "line", ["[1, 2]", '{"loss": 1.0}', '{"step": "1"}', '{"step": true}', "\0\0\0", '{"step": 2, "lo']
)
def test_wrong_lines_in_the_middle_are_left_out_and_reported(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n\n{{"step": 3}}\n')
    found = read_metrics(path)
    assert [row["step"] for row in found.rows] == [1, 3]
    assert [number for number, _ in found.skipped] == [2]


def test_a_whole_last_line_that_is_wrong_is_not_taken_for_a_cut(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"loss": 2.0}\n')
    found = read_metrics(path)
    assert [row["step"] for row in found.rows] == [1]
    assert not found.cut
    assert [number for number, _ in found.skipped] == [2]


def test_a_full_disk_is_told_once_and_noted_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = make_run(tmp_path)
    writer = MetricsWriter(run.metrics_file)
    assert writer.write({"loss": 1.0}, 1)
    real = os.write

    def full(handle: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def half(handle: int, data: bytes) -> int:
        return real(handle, data[: len(data) // 2])

    monkeypatch.setattr(os, "write", half)
    assert not writer.write({"loss": 0.5}, 2)
    monkeypatch.setattr(os, "write", full)
    assert not writer.write({"loss": 0.4}, 3)
    monkeypatch.setattr(os, "write", real)
    assert writer.write({"loss": 0.3}, 4)
    writer.close()
    writer.close()
    assert len([r for r in caplog.records if "Metrics are not recorded" in r.message]) == 1
    found = run.read_metrics()
    assert [row["step"] for row in found.rows] == [1, 4]
    assert [number for number, _ in found.skipped] == [2]
    assert run.status().extra["metrics"]["incomplete"]
    assert run.status().extra["metrics"]["lost_lines"] == 2


def test_a_place_that_can_not_be_written_never_raises(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "absent" / "metrics.jsonl")
    assert not writer.write({"loss": 1.0}, 1)
    assert writer.problem
    writer.close()
    (tmp_path / "absent").mkdir()
    assert writer.write({"loss": 1.0}, 2)
    writer.close()
