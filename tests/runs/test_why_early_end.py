"""Jobs that ended before a rank of theirs began: only their output knows why."""

from __future__ import annotations

from pathlib import Path

import pytest
from making import config, make_run

from europa_exp.runs.slurm_record import SlurmState
from europa_exp.runs.why import explain


@pytest.mark.parametrize(
    ("line", "cause", "code"),
    [
        ("srun: error: n1: tasks 0-1: User defined signal 2", "killed", 12),
        ("cluster.setup: failed on n1: source /nope/activate", "bad_configuration", 1),
        ("cluster.modules: failed to load GCC on n1", "bad_configuration", 1),
        ("cluster.unpack: failed", "bad_configuration", 1),
    ],
)
def test_a_job_that_ended_before_its_ranks_began(tmp_path: Path, line: str, cause: str, code: int) -> None:
    run = make_run(tmp_path, config())
    run.set_state("queued", job_id="7")
    output = tmp_path / "7_0_log.err"
    output.write_text(f"slurmstepd: info: before\n{line}\n")
    slurm = SlurmState("7", "FAILED", "sacct", exit_code=code, signal=0)
    found = explain(run, state="failed", slurm=slurm, job_logs=[output])
    assert (found.cause, found.sure) == (cause, True)
    assert line in found.title
    assert any(line in entry.lines for entry in found.evidence)
