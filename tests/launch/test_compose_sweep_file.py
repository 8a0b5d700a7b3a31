"""Sweep files: grids, listed points, conditions; and what is said about a wrong one."""

from __future__ import annotations

import re

import pytest
from composing import ROOT, call, copied_root, overrides, plan

from europa_exp.config.errors import ConfigError


@pytest.fixture
def write_sweep(tmp_path):
    """write_sweep(text) -> root whose +sweeps=mine has that text."""
    root = copied_root(tmp_path)

    def write(text: str):
        (root / "sweeps" / "mine.yaml").write_text(text)
        return root

    return write


def mine(root, *arguments):
    return plan("+sweeps=mine", *arguments, multirun=True, root=root)


@pytest.mark.parametrize("name", sorted(p.stem for p in (ROOT / "sweeps").glob("*.yaml")))
def test_every_file_in_sweeps_has_checked_points(name):
    found = plan(f"+sweeps={name}", multirun=True)
    assert len(found.points) > 1
    assert found.sweep == name
    assert found.notices == []


def test_comm_nccl_is_the_six_points():
    found = plan("+sweeps=comm_nccl", multirun=True)
    assert overrides(found) == [
        [f"comm={c}", f"nccl.max_ctas={n}"] for c in ("bf16", "fp8") for n in (8, 16, 32)
    ]


def test_the_example_zips_and_excludes():
    found = plan("+sweeps=example_points", multirun=True)
    assert found.excluded == 3
    told = [
        (
            p.cfg.training.seq_len,
            p.cfg.training.local_batch_size,
            p.cfg.comm.expert_all_gather.name,
            p.cfg.nccl.max_ctas,
        )
        for p in found.points
    ]
    assert told == [
        (64, 4, "bf16", 16),
        (64, 4, "fp8", 16),
        (128, 2, "bf16", 16),
        (128, 2, "fp8", 16),
        (128, 2, "fp8", 32),
    ]


def test_the_ladder_climbs():
    """Its rungs are held to what they say in tests/config/test_ladder.py."""
    points = plan("+sweeps=throughput_ladder", multirun=True).points
    told = [
        (
            p.cfg.training.activation_checkpoint.name,
            p.cfg.comm.expert_all_gather.name,
            p.cfg.comm.gradient_reduce.name,
            p.cfg.nccl.max_ctas,
        )
        for p in points
    ]
    assert told == [
        ("selective", "bf16", "reduce_scatter", None),
        ("full", "bf16", "reduce_scatter", None),
        ("full", "fp8", "reduce_scatter", None),
        *[("full", "fp8", "bf16_all_to_all", None)] * 4,
        ("full", "fp8", "bf16_all_to_all", 16),
    ]


def test_the_ladder_can_be_seen_at_its_published_size_as_its_file_says():
    text = (ROOT / "sweeps" / "throughput_ladder.yaml").read_text()
    (typed,) = re.findall(r"#   python launch\.py (.*) \\\n#     (.*launch\.preview=true)\n", text)
    result = call(*" ".join(typed).split())
    assert (result.code, result.err) == (0, "")
    rows = [
        line
        for line in result.out.splitlines()
        if re.match(r"\d\d_\w+-(max_ctas=16-)?flavor=europa_1t", line)
    ]
    assert [line.split()[-4:] for line in rows] == [["384", "1", "96", "96"]] * 8
    assert "768 node-hours" in result.out


def test_europa_1t_is_composed_and_checked_for_its_machine():
    (point,) = plan(
        "experiment=europa_1t", "cluster.device_memory_gib=95", "cluster.host_memory_gib=110"
    ).points
    assert point.cfg.model.flavor == "europa_1t"
    assert point.cfg.parallelism.data_parallel_shard_degree == 384
    assert point.cfg.training.seq_len == 65536
    assert point.cfg.training.activation_checkpoint.name == "full"


def test_command_line_sweeps_combine_and_replace(write_sweep):
    root = write_sweep("params:\n  comm: [bf16, fp8]\n  nccl.max_ctas: 8,16\n")
    assert len(mine(root, "training.seed=0,1").points) == 8
    assert overrides(mine(root, "nccl.max_ctas=32")) == [
        ["comm=bf16", "nccl.max_ctas=32"],
        ["comm=fp8", "nccl.max_ctas=32"],
    ]


def test_values_are_taken_as_they_are(write_sweep):
    root = write_sweep(
        "points:\n"
        "  - {tracking.notes: 'a,b = #c', tags: [x, y], nccl.max_ctas: null, cluster.env.A: '1e3'}\n"
        "  - {tracking.notes: 'true', nccl.max_ctas: 8, nccl.extra.NCCL_ALGO: Ring, cluster.env.A: true}\n"
    )
    first, second = (p.cfg for p in mine(root).points)
    assert first.tracking.notes == "a,b = #c"
    assert first.tags == ["x", "y"]
    assert first.nccl.max_ctas is None
    assert first.cluster.env == {"A": "1e3"}
    assert second.tracking.notes == "true"
    assert second.nccl.extra == {"NCCL_ALGO": "Ring"}
    assert second.cluster.env == {"A": "true"}


def test_params_take_lists_of_values_and_hydras_grammar(write_sweep):
    root = write_sweep(
        "params:\n  tracking.notes: ['a,b']\n  nccl.max_ctas: range(8,10)\n  comm: glob(bf16*)\n  training.seed: 3\n"
    )
    found = mine(root)
    assert len(found.points) == 4
    assert {p.cfg.tracking.notes for p in found.points} == {"a,b"}
    assert {p.cfg.training.seed for p in found.points} == {3}


@pytest.mark.parametrize(
    ("condition", "left"),
    [
        ("{comm: fp8}", 3),
        ("{comm.expert_all_gather: fp8}", 3),
        ("{comm: fp8, nccl.max_ctas: 8}", 5),
        ("{comm: fp8, nccl.max_ctas: [8, 16]}", 4),
        ("{nccl.max_ctas: '8'}", 4),
        ("{nccl.max_ctas: null}", 6),
        ("{training.compile: true}", 6),
        ("{model: debug, comm: [fp8]}", 3),
        ("{training.compile: false, nccl.max_ctas: [8, 32]}", 2),
        ("{training.seed: 0, comm: bf16}", 3),
    ],
)
def test_conditions_look_at_the_composed_point(write_sweep, condition, left):
    root = write_sweep(
        f"params:\n  comm: [bf16, fp8]\n  nccl.max_ctas: [8, 16, 32]\nexclude:\n  - {condition}\n"
    )
    found = mine(root)
    assert len(found.points) == left
    assert found.excluded == 6 - left
    assert bool(found.notices) == (left == 6)


GRID = "params:\n  comm: [bf16, fp8]\n"
WRONG = [
    ("parms:\n  comm: [bf16]\n", ["mine", "parms", "params"]),
    ("params:\n  com: [bf16, fp8]\n", ["com=", "comm"]),
    ("params:\n  comm: [bf16, fp9]\n", ["comm='fp9'", "bf16, bf16_a2a, fp8"]),
    ("params: [a]\n", ["params"]),
    ("points:\n  comm: fp8\n", ["points", "list"]),
    ("points:\n  - fp8\n", ["points", "list"]),
    ("- a\n", ["mine", "mapping"]),
    ("", ["mine", "params"]),
    ("exclude:\n  - {comm: fp8}\n", ["nothing to run"]),
    (GRID + GRID, ["mine.yaml", "duplicate", "params"]),
    (GRID + "  x: [\n", ["mine.yaml"]),
    (GRID + "exclude:\n  - {com: fp8}\n", ["exclude, entry 1", "com=", "comm"]),
    (GRID + "exclude:\n  - {comm: fp9}\n", ["exclude, entry 1", "bf16, bf16_a2a, fp8"]),
    (GRID + "exclude:\n  - {nccl.max_ctas: many}\n", ["exclude, entry 1", "whole number"]),
    (GRID + "exclude:\n  - {}\n", ["exclude", "list of mappings"]),
    (GRID + "exclude:\n  - {comm: [bf16, fp8]}\n", ["all 2 points"]),
    (GRID + "points:\n  - {comm: fp8}\n", ["comm", "listed points"]),
    ("params:\n  comm: bf16,,fp8\n", ["comm"]),
    ("params:\n  comm: []\n", ["comm"]),
    ("params:\n  offload.fsdp_cpu: [7, false]\n", ["offload.fsdp_cpu=7: must be true or false"]),
    ("points:\n  - {profiling.collectives: 2}\n", ["profiling.collectives=2: must be true or false"]),
    ("points:\n  - {training.steps: 1e3}\n  - {training.steps: x}\n", ["point 1", "point 2", "whole number"]),
    (
        "points:\n  - {comm: fp8}\n  - {comm.expert_all_gather: fp8}\n",
        ["point 1", "point 2", "same experiment"],
    ),
]


@pytest.mark.parametrize(("text", "parts"), WRONG)
def test_a_wrong_file_is_one_clear_message(write_sweep, text, parts, tmp_path, monkeypatch):
    root = write_sweep(text)
    empty = tmp_path / "cwd"
    empty.mkdir()
    monkeypatch.chdir(empty)
    result = call("-m", "+sweeps=mine", root=root)
    assert result.code == 2, result.out
    assert "Traceback" not in result.err
    for part in parts:
        assert part in result.err
    assert list(empty.iterdir()) == []


def test_listed_points_are_not_given_again_on_the_command_line(write_sweep):
    root = write_sweep("points:\n  - {comm: fp8}\n  - {comm: bf16}\n")
    with pytest.raises(ConfigError, match="comm"):
        mine(root, "comm=fp8")
    assert len(mine(root, "nccl.max_ctas=8,16").points) == 4


def test_without_m_a_sweep_file_is_refused():
    result = call("+sweeps=comm_nccl")
    assert result.code == 2
    assert "python launch.py -m +sweeps=comm_nccl" in result.err
