"""The live view: what it reads, what it shows, and that nothing in a run folder can break it."""

from __future__ import annotations

import io
import os
import pty
import shutil
import subprocess
import sys

import pytest
from launching import ROOT, config, environ, make_runs

from europa_exp.launch import follow
from europa_exp.launch.follow import PlainView, Row, failure_text, last_row, table
from europa_exp.runs.metrics import MetricsWriter
from europa_exp.runs.status import State


@pytest.fixture
def rows(tmp_path):
    runs = make_runs(tmp_path / "runs", *[config(seed=i) for i in range(3)])
    return [Row(run, 20) for run in runs]


def log_step(row: Row, step: int, loss: float = 2.5) -> None:
    with MetricsWriter(row.run.metrics_file) as writer:
        writer.write({follow.LOSS: loss, follow.SPEED: 1234.5}, step)


def rendered(rows, *, width: int = 100, height: int = 40) -> str:
    from rich.console import Console

    out = io.StringIO()
    Console(file=out, width=width, height=height).print(table(rows, height=height))
    return out.getvalue()


def test_a_row_follows_its_run(rows):
    row = rows[0]
    row.refresh()
    assert (row.state, row.progress()) == ("queued", "")
    row.run.launcher_log.write_text("the agent has taken it up\n")
    row.refresh()
    assert row.state == "loading"
    row.run.set_state(State.running)
    log_step(row, 12)
    row.refresh()
    assert (row.state, row.progress(), row.loss, row.speed) == ("running", "12/20", 2.5, 1234.5)


def test_a_folder_that_is_gone_reads_as_unknown(rows):
    shutil.rmtree(rows[0].run.path)
    rows[0].refresh()
    assert rows[0].state == "unknown"


def test_last_row_takes_the_last_whole_line(tmp_path):
    path = tmp_path / "m"
    assert last_row(path) is None
    path.write_text("")
    assert last_row(path) is None
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3, "lo')
    assert last_row(path) == {"step": 2}
    path.write_text('{"step": 1}\nnonsense\n[3]\n')
    assert last_row(path) == {"step": 1}
    path.write_text("".join(f'{{"step": {i}, "pad": "{"x" * 500}"}}\n' for i in range(1000)))
    assert last_row(path)["step"] == 999


def test_losses_that_are_not_finite_are_shown_as_such(rows):
    log_step(rows[0], 3, float("nan"))
    rows[0].refresh()
    assert "nan" in rendered(rows)


def test_the_table_fits_narrow_and_low_terminals(tmp_path):
    rows = [Row(run, 20) for run in make_runs(tmp_path / "runs", *[config(seed=i) for i in range(30)])]
    rows[29].run.set_state(State.running)
    rows[11].run.set_state(State.failed)
    for row in rows:
        row.refresh()
    text = rendered(rows, width=60, height=15)
    lines = text.splitlines()
    assert len(lines) <= 15
    assert max(map(len, lines)) <= 60
    assert "run29" in text
    assert "run11" in text
    assert "28 queued" in text


def test_names_are_no_markup(rows):
    rows[0].status = type(rows[0].status)(State.failed, error={"rank": None, "message": "[/red] odd [bold"})
    assert "[/red] odd [bold" in failure_text(rows[0])
    view = follow.LiveView()
    with view:
        view.say(failure_text(rows[0]))
        view.show(rows)


def test_plain_lines_come_at_changes_only(rows, capsys):
    view = PlainView(every=1000)
    for row in rows:
        row.refresh()
    view.show(rows)
    assert capsys.readouterr().out == ""  # queued is no news
    rows[0].run.set_state(State.running)
    log_step(rows[0], 1)
    rows[0].refresh()
    view.show(rows)
    view.show(rows)
    assert capsys.readouterr().out == "[1/3] run0: running  step 1/20  loss 2.5000  1,234 tok/s/rank\n"
    PlainView.__init__(view, every=0)
    view._states["run0"] = "running"
    view.show(rows)
    assert "step 1/20" in capsys.readouterr().out


def test_follow_tells_a_failure_once_and_shows_the_last_word(rows, capsys):
    rounds = iter([True, True, False])

    def tick():
        error = {"rank": 1, "type": "ValueError", "message": "bad", "traceback": "Traceback\n  here"}
        rows[0].run.set_state(State.failed, error=error)
        rows[1].run.set_state(State.completed)

    follow.follow(rows, PlainView(), active=lambda: next(rounds), tick=tick, interval=0)
    out = capsys.readouterr().out
    assert out.count("run0 failed: rank 1: ValueError: bad") == 1
    assert "    Traceback\n      here" in out
    assert "run1: completed" in out


def test_a_reader_that_went_away_stops_nothing():
    code = (
        "from europa_exp.launch.follow import PlainView\nv = PlainView()\n"
        "for i in range(20000): v.say('x' * 100)\n"
        "import os; os.write(2, b'done')"
    )
    done = subprocess.run(
        ["sh", "-c", f'"{sys.executable}" -c "$0" | head -1', code],
        env=environ(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr.endswith("done")


@pytest.mark.parametrize(
    ("term", "expected"), [("xterm", "LiveView"), ("dumb", "PlainView"), ("", "PlainView")]
)
def test_the_view_depends_on_the_terminal(term, expected):
    code = "from europa_exp.launch.follow import make_view; print(type(make_view()).__name__)"
    ours, theirs = pty.openpty()
    subprocess.run(
        [sys.executable, "-c", code], stdout=theirs, env=environ(TERM=term), timeout=60, check=True, cwd=ROOT
    )
    os.close(theirs)
    assert os.read(ours, 1000).decode().strip() == expected
    os.close(ours)


def test_no_terminal_no_table(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert isinstance(follow.make_view(), PlainView)
    monkeypatch.setattr(sys, "stdout", None)
    assert isinstance(follow.make_view(), PlainView)
