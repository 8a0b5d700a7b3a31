"""What NCCL took, in a run's record."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from europa_exp.runs.folder import RunFolder
from europa_exp.training.nccl_record import NcclRecord

SAID = """\
n01:400:400 [0] NCCL INFO NCCL_MAX_CTAS set by environment to 16.
n01:400:411 [0] NCCL INFO [Rank 0] ncclCommInitRank comm 0x1 rank 0 nranks 8 cudaDev 0 nvmlDev 0 busId 1 commId 0x1 - Init START
n01:400:411 [0] NCCL INFO 16 coll channels, 16 collnet channels, 0 nvls channels, 16 p2p channels, 2 p2p channels per peer
"""


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    (tmp_path / "logs").mkdir()
    return RunFolder(tmp_path)


def runtime(run: RunFolder, **changes):
    asked = {"NCCL_MAX_CTAS": "16", "NCCL_MIN_CTAS": "8", "NCCL_DEBUG_FILE": str(run.nccl_log(0))}
    return {"backend": "nccl", "environment": asked, "torch": "2", "nccl": {"version": "2.30.7"}, **changes}


def test_the_first_call_records_and_warns_and_later_ones_do_nothing(run, caplog):
    run.nccl_log(0).write_text(SAID)
    record = NcclRecord(run, runtime(run))
    with caplog.at_level(logging.WARNING):
        record({"loss": 1.0}, 1)
    found = run.runtime()
    assert found["torch"] == "2"
    assert found["nccl"]["set"]["NCCL_MAX_CTAS"] == "16"
    assert found["nccl"]["reported"] == {"NCCL_MAX_CTAS": "16"}
    assert found["nccl"]["ignored"] == {"NCCL_MIN_CTAS": "8"}
    assert [c["coll_channels"] for c in found["nccl"]["communicators"]] == [16]
    assert "NCCL does not mention NCCL_MIN_CTAS=8" in caplog.text
    run.nccl_log(0).write_text("")
    record()
    assert run.runtime() == found


@pytest.mark.parametrize("changes", [{"backend": "gloo"}, {"environment": {"NCCL_MAX_CTAS": "16"}}])
def test_nothing_where_nccl_was_not_asked_or_does_not_run(run, changes):
    run.nccl_log(0).write_text(SAID)
    NcclRecord(run, runtime(run, **changes))()
    assert run.runtime() == {}


def test_no_log_is_a_warning_and_no_failure(run, caplog):
    with caplog.at_level(logging.WARNING):
        NcclRecord(run, runtime(run))()
    assert "what NCCL took is not recorded" in caplog.text
    assert run.runtime() == {}
