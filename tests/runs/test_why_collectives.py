"""Which rank missed a collective, by what all ranks wrote."""

from __future__ import annotations

from pathlib import Path

import pytest
from making import config, make_run
from why_cases import failed, leave_error, proof, watchdog

from europa_exp.runs.why import explain


def test_the_watchdog_of_nccl_names_the_rank_that_is_behind(tmp_path: Path) -> None:
    run = failed(tmp_path)
    killed = "rank {0} was killed by signal 6 (SIGABRT); see logs/rank_{0}.log"
    for rank, enqueued in ((0, 12), (1, 12), (2, 11), (3, 12)):
        error = leave_error(
            run, rank, "Killed", killed.format(rank), watchdog(rank, enqueued, enqueued, enqueued - 1)
        )
    run.note(error=error, exit_codes={str(r): -6 for r in range(4)})
    found = explain(run)
    assert (found.cause, found.behind, found.rank, found.node) == ("collective_timeout", (2,), 2, "n2")
    assert "allgather" in found.title
    assert found.sure
    assert "Watchdog caught collective operation timeout" in proof(found)


def test_counts_of_different_groups_of_ranks_are_not_compared(tmp_path: Path) -> None:
    """Each group counts its own collectives: rank 3 hangs, its two groups wait for it, at very different numbers."""
    run = failed(tmp_path)
    killed = "rank {0} was killed by signal 6 (SIGABRT); see logs/rank_{0}.log"
    for rank, count, group in ((0, 45, "4(mesh_ep)"), (1, 45, "4(mesh_ep)"), (2, 120, "2(mesh_fsdp)")):
        error = leave_error(
            run, rank, "Killed", killed.format(rank), watchdog(rank, count, count, count - 1, group)
        )
    run.log(3).write_text("======== start\nwaiting for a file\n")
    run.note(error=error)
    assert explain(run).behind == (3,)
    # Within a group the counts tell.
    leave_error(run, 3, "Killed", killed.format(3), watchdog(3, 119, 119, 118, "2(mesh_fsdp)"))
    found = explain(run)
    assert (found.behind, found.sure) == ((3,), True)


def test_a_rank_that_says_nothing_is_the_one_that_did_not_arrive(tmp_path: Path) -> None:
    run = failed(tmp_path)
    killed = "rank {0} was killed by signal 6 (SIGABRT); see logs/rank_{0}.log"
    for rank in (0, 1, 3):
        error = leave_error(run, rank, "Killed", killed.format(rank), watchdog(rank, 12, 12, 11))
    run.log(2).write_text("======== start\nwaiting for a file\n")
    run.note(error=error)
    found = explain(run)
    assert (found.cause, found.behind) == ("collective_timeout", (2,))
    assert "waiting for a file" in proof(found)


def test_a_rank_that_did_not_begin_again_has_said_nothing(tmp_path: Path) -> None:
    """Logs are appended to: what stands at the end of one may be of an attempt before the last."""
    job = {"job_id": "7_1", "nodes": ["n1", "n2"], "reason": "collective_timeout"}
    attempts = [{**job, "n": 1, "start": "9.0.0", "step": 3}, {**job, "n": 2, "start": "9.1.0", "step": None}]
    run = failed(tmp_path, attempts=attempts)
    waited = "Timed out waiting 3000ms for recv operation to complete"
    for rank in range(4):
        where = f"rank {rank} on n{rank // 2 + 1}"
        lines = [f"======== 2026-11-29T12:00:00.000+00:00 job 7_1, {where}", waited]
        if rank != 2:
            lines += [f"======== 2026-11-29T13:00:00.000+00:00 job 7_1, restart 1, {where}", waited]
        run.log(rank).write_text("\n".join([*lines, ""]))
    run.note(error={"rank": 0, "type": "RuntimeError", "message": waited, "traceback": ""})
    found = explain(run)
    assert (found.cause, found.behind, found.node) == ("collective_timeout", (2,), "n2")
    assert all(not entry.place.startswith("logs/rank_2.log") for entry in found.evidence)


@pytest.mark.slow
def test_ranks_whose_logs_are_too_many_to_read_are_not_accused(tmp_path: Path) -> None:
    cfg = config(
        "parallelism.nodes=130",
        "parallelism.gpus_per_node=4",
        "parallelism.data_parallel_shard_degree=520",
    )
    run = make_run(tmp_path, cfg)
    waited = "Timed out waiting 3000ms for recv operation to complete"
    for rank in range(520):
        run.log(rank).write_text(f"{waited}\n" if rank != 77 else "busy\n")
    error = {"rank": 0, "type": "RuntimeError", "message": waited, "traceback": ""}
    run.set_state("running")
    run.set_state("failed", error=error)
    found = explain(run)
    assert (found.cause, found.behind, found.sure) == ("collective_timeout", (77,), False)
