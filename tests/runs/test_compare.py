from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from compared import SPEED, runs_of, two_precisions_and_three_limits
from recorded import CODE, log_steps, record

from europa_exp.runs.compare import CompareError, Comparison, Row, compare
from europa_exp.runs.table import render


@pytest.fixture(scope="module")
def six(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return two_precisions_and_three_limits(tmp_path_factory.mktemp("six"))


def row(found: Comparison, **fields: object) -> Row:
    (one,) = [r for r in found.rows if all(r.fields[k.replace("__", ".")] == v for k, v in fields.items())]
    return one


def test_the_sweep_side_by_side(six: Path) -> None:
    found = compare(runs_of(six), title="sweep comm_nccl")
    assert found.title == "sweep comm_nccl"
    assert [c.fields for c in found.columns] == [("comm.expert_all_gather",), ("nccl.max_ctas",)]
    assert len(found.rows) == 6
    base = found.baseline
    assert base is not None
    # bf16 is the off value; of the three runs with it the first is the baseline.
    assert base.fields == {"comm.expert_all_gather": "bf16", "nccl.max_ctas": 8}
    fast = row(found, comm__expert_all_gather="fp8", nccl__max_ctas=16).verdicts[SPEED]
    assert fast is not None
    assert (fast.word, fast.better, fast.basis) == ("faster", True, "paired steps")
    assert fast.percent == pytest.approx(100 * (1.18 * 1.07 - 1), abs=2)
    same = row(found, comm__expert_all_gather="bf16", nccl__max_ctas=32).verdicts[SPEED]
    assert same is not None
    assert same.word == "within noise"
    gather = row(found, comm__expert_all_gather="fp8", nccl__max_ctas=8).verdicts["comm/all_gather_sent_gib"]
    assert gather is not None
    assert (gather.word, gather.percent) == ("less", pytest.approx(-48))
    # A CPU run has no reserved device memory: no column, not a 0.
    assert "memory/peak_reserved_gib" not in [q.key for q in found.quantities]
    assert "memory/peak_host_gib" in [q.key for q in found.quantities]


def test_baseline_by_name_is_added_and_kept(six: Path) -> None:
    runs = runs_of(six)
    found = compare(runs[3:], baseline=[runs[2]])
    assert len(found.rows) == 4
    assert found.baseline is not None
    assert found.baseline.members[0].entry.run == runs[2]


def test_by_group_field_and_end_of_a_name(six: Path) -> None:
    runs = runs_of(six)
    assert [c.fields for c in compare(runs, by=["comm", "nccl.max_ctas"]).columns] == [
        ("comm.expert_all_gather",),
        ("nccl.max_ctas",),
    ]
    found = compare(runs, by=["max_ctas"])
    assert [c.fields for c in found.columns] == [("nccl.max_ctas",)]
    # Runs that differ elsewhere are never mixed into one row, and the reader is told.
    assert len(found.rows) == 6
    assert "Also different, but not shown: comm.expert_all_gather." in found.notes
    assert compare(runs, by=["training.steps"]).rows[0].fields == {"training.steps": 16}
    with pytest.raises(CompareError, match=r"by=nccl.max_cta: .* did you mean nccl.max_ctas"):
        compare(runs, by=["nccl.max_cta"])
    with pytest.raises(CompareError, match="several fields end like that"):
        compare(runs, by=["name"])


def test_metrics_by_key_part_and_all(six: Path) -> None:
    runs = runs_of(six)[:2]
    assert [q.key for q in compare(runs, metrics=["time/step_s"]).quantities] == ["time/step_s"]
    assert [q.key for q in compare(runs, metrics=["loss"]).quantities] == [
        "loss/global_avg",
        "loss/global_max",
    ]
    assert len(compare(runs, metrics=["all"]).quantities) == 10
    # Known, but not logged here: a column of dashes.
    mfu = compare(runs, metrics=["throughput/mfu"])
    assert all(r.estimates["throughput/mfu"].value is None for r in mfu.rows)
    assert "–" in render(mfu)
    with pytest.raises(
        CompareError, match=r"metrics=stepp: no such quantity; did you mean .*These runs have loss/global_avg"
    ):
        compare(runs, metrics=["stepp"])
    with pytest.raises(CompareError, match=r"metrics=zzzz: no such quantity\. These runs have"):
        compare(runs, metrics=["zzzz"])


def test_repeats_are_one_row_and_carry_the_verdict(tmp_path: Path) -> None:
    seed = 0
    for comm, speed in (("bf16", 3000), ("fp8", 3500)):
        for _ in range(3):
            log_steps(record(tmp_path, f"comm={comm}"), tokens_per_second=speed, seed=(seed := seed + 1))
    found = compare(runs_of(tmp_path))
    assert [len(r.members) for r in found.rows] == [3, 3]
    verdict = found.rows[1].verdicts[SPEED]
    assert verdict is not None
    assert (verdict.word, verdict.basis) == ("faster", "runs")
    assert len(compare(runs_of(tmp_path), each=True).rows) == 6
    labels = [r.label for r in compare(runs_of(tmp_path), each=True).rows]
    assert len(set(labels)) == 6
    assert labels[1] == f"{labels[0]}-r2"


def test_seeds_are_repeats_unless_they_are_the_question(tmp_path: Path) -> None:
    for comm, loss in (("bf16", 2.5), ("fp8", 3.5)):
        for k in range(3):
            run = record(tmp_path, f"comm={comm}", f"training.seed={k}")
            log_steps(run, seed=k, loss_end=loss + 0.01 * k)
    found = compare(runs_of(tmp_path))
    assert [len(r.members) for r in found.rows] == [3, 3]
    verdict = found.rows[1].verdicts["loss/global_avg"]
    assert verdict is not None
    assert (verdict.word, verdict.basis, verdict.better) == ("higher", "seeds", False)
    assert any("training.seed are taken together" in note for note in found.notes)
    assert len(compare(runs_of(tmp_path), by=["training.seed", "comm"]).rows) == 6
    only_seeds = compare(runs_of(tmp_path)[:3])
    assert [c.fields for c in only_seeds.columns] == [("training.seed",)]
    assert len(only_seeds.rows) == 3


def test_a_seed_that_by_names_by_its_end_parts_the_runs(tmp_path: Path) -> None:
    for comm in ("bf16", "fp8"):
        for k in range(2):
            log_steps(record(tmp_path, f"comm={comm}", f"training.seed={k}"), seed=k)
    found = compare(runs_of(tmp_path), by=["seed", "comm"])
    assert [r.fields["training.seed"] for r in found.rows] == [0, 1, 0, 1]
    assert not any("taken together" in note for note in found.notes)


def test_steps_are_paired_by_the_data_of_the_runs_that_are_compared(tmp_path: Path) -> None:
    log_steps(record(tmp_path, "data.shuffle_seed=0", state="failed"), steps=5)
    log_steps(record(tmp_path, "data.shuffle_seed=1"), tokens_per_second=3000, seed=1)
    log_steps(record(tmp_path, "comm=fp8", "data.shuffle_seed=0"), tokens_per_second=9000, seed=2)
    found = compare(runs_of(tmp_path))
    assert [r.state for r in found.rows] == ["1 completed, 1 failed", "completed"]
    verdict = found.rows[1].verdicts[SPEED]
    assert verdict is not None
    assert (verdict.word, verdict.basis) == ("faster", "steps")


def test_the_same_configuration_with_other_code_is_another_row(tmp_path: Path) -> None:
    log_steps(record(tmp_path), seed=1)
    log_steps(record(tmp_path, code=replace(CODE, commit="89abcdef" * 5, fingerprint="e" * 16)), seed=2)
    found = compare(runs_of(tmp_path))
    assert [c.title for c in found.columns] == ["code"]
    assert [r.fields["code"] for r in found.rows] == ["01234567", "89abcdef"]


def test_unfinished_and_broken_runs_are_shown_and_not_judged(tmp_path: Path) -> None:
    log_steps(record(tmp_path), seed=1)
    failed = record(tmp_path, "comm=fp8", state="failed")
    log_steps(failed, steps=9)
    running = record(tmp_path, "comm=fp8", "nccl.max_ctas=8", state="running")
    log_steps(running, steps=30, tokens_per_second=9000)
    with open(running.metrics_file, "a") as file:
        file.write('{"step": 31, "lo')
    record(tmp_path, "comm=fp8", "nccl.max_ctas=16", state="created")
    broken = record(tmp_path, "comm=fp8", "nccl.max_ctas=32")
    (broken.path / "config.yaml").write_text("nonsense: 1\n")

    found = compare(runs_of(tmp_path))
    assert [r.state for r in found.rows] == ["completed", "failed", "running", "created", "completed"]
    verdict = found.rows[2].verdicts[SPEED]
    assert verdict is not None
    assert verdict.word == "unfinished"
    assert verdict.percent == pytest.approx(200, abs=6)
    half_loss = found.rows[1].verdicts["loss/global_avg"]
    assert half_loss is not None
    assert (half_loss.word, half_loss.percent) == ("unfinished", None)
    assert found.rows[3].verdicts[SPEED] is None
    notes = "\n".join(found.notes)
    assert "failed: RuntimeError: loss is not finite" in notes
    assert "cut off and left out" in notes
    assert "nonsense=1: there is no such field" in notes
    for form in ("table", "markdown", "csv", "json"):
        assert "running" in render(found, form)
    assert "?" in render(found)


def test_a_completed_run_stands_for_its_experiment_beside_a_failed_one(tmp_path: Path) -> None:
    log_steps(record(tmp_path, state="failed"), steps=5, tokens_per_second=1.0)
    log_steps(record(tmp_path), tokens_per_second=3000)
    (only,) = compare(runs_of(tmp_path)).rows
    assert only.state == "1 completed, 1 failed"
    assert only.estimates[SPEED].value == pytest.approx(3000, rel=0.02)


def test_nothing_to_compare(tmp_path: Path) -> None:
    with pytest.raises(CompareError, match="no runs"):
        compare([])
    with pytest.raises(CompareError, match="warmup=-1"):
        compare([record(tmp_path)], warmup=-1)


def test_runs_that_are_all_warm_up_have_no_value_and_say_so(tmp_path: Path) -> None:
    for seed, comm in enumerate(("bf16", "fp8")):
        log_steps(record(tmp_path, f"comm={comm}"), steps=2, seed=seed)
    found = compare(runs_of(tmp_path))
    assert all(r.estimates[SPEED].value is None for r in found.rows)
    assert any(note.startswith("tok/s/gpu") and "--warmup N" in note for note in found.notes)
    shown = compare(runs_of(tmp_path), warmup=0)
    verdict = shown.rows[1].verdicts[SPEED]
    assert verdict is not None
    assert verdict.word == "too few steps"


def test_many_fields_of_a_group_share_a_column(tmp_path: Path) -> None:
    log_steps(record(tmp_path))
    log_steps(record(tmp_path, "nccl=jupiter"))
    log_steps(record(tmp_path, "model=europa_1t", "parallelism=fsdp384_ep4"))
    found = compare(runs_of(tmp_path))
    assert [c.title for c in found.columns] == ["model", "parallelism", "nccl"]
    text = render(found)
    assert "europa_1t" in text
    assert "socket_ifname=ib0" in text
    assert "as baseline" in text


def test_points_chosen_by_experiment_are_told_apart_by_it(tmp_path: Path) -> None:
    rungs = ["ladder/08_fp8_gather", "ladder/09_bf16_all_to_all", "ladder/10_node_local_reshard"]
    for seed, rung in enumerate([*rungs, "ladder/11_norm_in_backward", "ladder/13_nccl_ctas"]):
        log_steps(record(tmp_path, f"experiment={rung}"), seed=seed)
    found = compare(runs_of(tmp_path))
    assert [c.title for c in found.columns] == ["experiment"]
    assert found.baseline is not None
    assert found.baseline.fields["experiment"] == rungs[0]
    for text in (render(found), render(found, width=100)):
        assert all(rung in text for rung in rungs)
        assert "gradient_reduce" not in text
        assert "; --by comm,nccl,allocator,optimizer shows it." in " ".join(text.split())
    # Programs get the fields, too.
    assert "comm.node_local_reshard" in json.loads(render(found, "json"))["fields"]
    assert "comm.node_local_reshard" in render(found, "csv").split("\n")[0]
    by = compare(runs_of(tmp_path), by=["comm"])
    assert [c.title for c in by.columns] == ["comm"]
    assert [c.title for c in compare(runs_of(tmp_path), by=["experiment"]).columns] == ["experiment"]


def test_beside_the_experiment_stands_what_it_does_not_tell(tmp_path: Path) -> None:
    for rung in ("ladder/08_fp8_gather", "ladder/09_bf16_all_to_all"):
        for ctas in (8, 16):
            log_steps(record(tmp_path, f"experiment={rung}", f"nccl.max_ctas={ctas}"))
    assert [c.title for c in compare(runs_of(tmp_path)).columns] == ["experiment", "max_ctas"]
    # A run without an experiment is told by its fields.
    log_steps(record(tmp_path, "comm=fp8"))
    found = compare(runs_of(tmp_path))
    assert found.columns[0].title == "experiment"
    assert {"comm.expert_all_gather", "comm.gradient_reduce"} & {n for c in found.columns for n in c.fields}
    assert found.rows[-1].fields["experiment"] is None
