"""`europa collectives` as people call it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from console import europa
from recorded import record

from europa_exp.runs.collectives import CollectivesWriter, Row, collectives_file

ROWS = [
    Row("all_gather", "dense", "dp_shard", 4, "bfloat16", 7, 57632, 172896, 57632),
    Row("all_gather", "dense", "node", 2, "bfloat16", 4, 53760, 53760, 53760),
    Row("all_to_all", "tokens", "ep", 2, "bfloat16", 16, 3 * 2**30, 3 * 2**29, 4 * 2**30),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("collectives")
    record(place, sweep=None)
    with CollectivesWriter(collectives_file(record(place, "comm=fp8"))) as writer:
        writer.write(10, 10, 4, ROWS[:1])
        writer.write(20, 10, 4, ROWS)
    with CollectivesWriter(collectives_file(record(place, "nccl.max_ctas=16"))) as writer:
        timed = [replace(row, seconds=0.0125 * row.calls, max_seconds=2.0) for row in ROWS]
        writer.write(1, 1, 4, [*timed[:2], replace(ROWS[2], max_seconds=0.5)])
    return place


def words(lines: list[str]) -> list[str]:
    return [" ".join(line.split()) for line in lines]


def test_the_newest_step_largest_sender_first(runs: Path) -> None:
    done = europa("collectives", "expert", runs=runs)
    assert done.returncode == 0, done.stderr
    head, _, *lines = words(done.stdout.splitlines())
    assert head.endswith("step 20, average of 10 steps: what rank 0 of 4 handed over in a step")
    assert lines[:5] == [
        "collective role group ranks dtype calls bytes most sent, about",
        "all_to_all tokens ep 2 bfloat16 16 3 GiB 4 GiB 1.5 GiB",
        "all_gather dense dp_shard 4 bfloat16 7 56.28 KiB 56.28 KiB 168.8 KiB",
        "all_gather dense node 2 bfloat16 4 52.5 KiB 52.5 KiB 52.5 KiB",
        "sum 27 3 GiB 1.5 GiB",
    ]
    assert "No times: they are measured on CUDA." in lines


def test_times_where_they_were_measured(runs: Path) -> None:
    lines = words(europa("collectives", "max_ctas", runs=runs).stdout.splitlines())
    assert lines[2].endswith("sent, about time longest")
    assert lines[3].startswith("all_to_all")
    assert lines[3].endswith("1.5 GiB – 500 ms")
    assert lines[4].endswith("168.8 KiB 87.5 ms 2 s")
    assert not any("No times" in line for line in lines)


def test_another_step_and_json(runs: Path) -> None:
    done = europa("collectives", "expert", "--step", "10", "--json", runs=runs)
    found = json.loads(done.stdout)
    assert (found["step"], found["steps"], found["world"]) == (10, 10, 4)
    assert found["run"].startswith("expert_all_gather=fp8")
    assert found["rows"] == [ROWS[0].as_data()]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("default",), "profiling.collectives=true"),
        (("default", "--json"), "python launch.py rerun="),
        (("expert", "--step", "11"), "of 2 steps from 10 to 20"),
        (("nothing",), "no run 'nothing'"),
    ],
)
def test_errors_are_one_message_and_exit_code_2(runs: Path, args: tuple[str, ...], message: str) -> None:
    done = europa("collectives", *args, runs=runs)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_show_names_the_file(runs: Path) -> None:
    assert "collectives  collectives.jsonl" in europa("show", "expert", runs=runs).stdout
    assert "collectives.jsonl" not in europa("show", "default", runs=runs).stdout


def test_nothing_heavy_is_imported(runs: Path) -> None:
    script = (
        "import sys\n"
        "sys.argv = ['europa', 'collectives', 'expert']\n"
        "from europa_exp.cli import main\n"
        "try:\n    main()\nexcept SystemExit as leave:\n    assert not leave.code\n"
        "heavy = {'torch', 'torchtitan', 'wandb', 'hydra', 'numpy', 'submitit'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    env = {**os.environ, "EUROPA_RUNS_DIR": str(runs)}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
