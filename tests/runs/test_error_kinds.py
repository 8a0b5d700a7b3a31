"""Who failed first, what is tried again and why a run failed are told of one error in one way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from making import make_run

from europa_exp.launch.failure import Failure
from europa_exp.launch.retry import classify
from europa_exp.runs.error_kinds import BAD_CONFIGURATION, Echo, echo_of
from europa_exp.runs.why import explain


@pytest.mark.parametrize(
    ("kind", "message", "echo", "reason"),
    [
        ("RuntimeError", "[pair.cc] Connection closed by peer [n1]:80", Echo.broken, "lost_rank"),
        ("DistNetworkError", "The socket was closed", Echo.broken, "lost_rank"),
        ("DistBackendError", "NCCL communicator was aborted on rank 1", Echo.broken, "lost_rank"),
        ("RuntimeError", "Timed out waiting 30ms for recv operation", Echo.timed_out, "collective_timeout"),
        ("DistStoreError", "Socket Timeout", Echo.timed_out, "collective_timeout"),
        ("RuntimeError", "The size of tensor a must match", None, "exception"),
        ("ConnectionResetError", "a download broke off", None, "exception"),
        *((kind, "it can't be done", None, "bad_configuration") for kind in sorted(BAD_CONFIGURATION)),
    ],
)
def test_all_tell_one_error_in_one_way(
    tmp_path: Path, kind: str, message: str, echo: Echo | None, reason: str
) -> None:
    assert echo_of(kind, message) is echo
    assert Failure(1, kind, message, "", 0.0).is_echo is (echo is not None)
    error = {"rank": 1, "type": kind, "message": message, "traceback": ""}
    assert classify(error) == reason

    run = make_run(tmp_path)
    run.set_state("running")
    run.set_state("failed", error=error)
    # An error of its own is the cause; an echo is not, however early it came.
    for rank, (of, said, time) in enumerate([("ValueError", "a cause", "2"), (kind, message, "1")]):
        record = {"rank": rank, "type": of, "message": said, "traceback": "", "time": time}
        run.error_file(rank).write_text(json.dumps(record))
    assert explain(run).cause == reason
    run.note(error={"rank": None, "type": "JobEnded", "message": "its job is gone", "traceback": ""})
    assert ("a cause" in explain(run).title) is (echo is not None)
