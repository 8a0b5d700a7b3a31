"""What is tried again, and what is not."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from europa_exp.launch import retry
from europa_exp.launch.retry import AGAIN, Gain, Requeue, Stop, classify
from europa_exp.runs.attempts import Reason

SEGFAULT = {
    "rank": 3,
    "type": "Killed",
    "message": "rank 3 was killed by signal 11 (SIGSEGV); see logs/rank_3.log",
}


SAVED = Gain(saved=True, began_from=5, every=10, margin_s=60, whole_limit=True)


def decide(ended, reason, error, *, max_attempts: int, gain: Gain = SAVED) -> Requeue | Stop:
    return retry.decide(ended, reason, error, max_attempts=max_attempts, gain=gain)


def attempts(*ends: tuple[Reason | None, int | None, dict | None]) -> list[dict]:
    """Ended attempts (reason, step, error); the last one is the one that is judged."""
    return [
        {"n": n, "reason": reason and str(reason), "step": step, "error": error}
        for n, (reason, step, error) in enumerate(ends, 1)
    ]


@pytest.mark.parametrize("reason", sorted(AGAIN))
def test_what_comes_from_the_machine_is_tried_again(reason):
    assert isinstance(decide(attempts((None, 7, None)), reason, None, max_attempts=2), Requeue)


@pytest.mark.parametrize("reason", sorted(set(Reason) - AGAIN))
def test_what_comes_from_the_run_or_its_user_is_not(reason):
    found = decide(attempts((None, 7, None)), reason, None, max_attempts=9)
    assert isinstance(found, Stop)
    assert "not tried again" in found.why


@pytest.mark.parametrize("reason", sorted(Reason))
@pytest.mark.parametrize("most", [1, 2])
def test_the_reason_is_told_by_whoever_asked(reason, most):
    nothing = replace(SAVED, saved=False)
    for gain in (SAVED, nothing):
        for ended in (attempts((None, 7, None)), attempts((reason, 7, None), (None, 7, None))):
            assert not decide(ended, reason, None, max_attempts=most, gain=gain).why.startswith(reason)


def test_the_rule_names_exactly_these():
    assert {str(reason) for reason in set(Reason) - AGAIN} == {
        "completed",
        "exception",
        "non_finite_loss",
        "bad_configuration",
        "cancelled",
        "killed",
    }


def test_not_more_often_than_asked():
    three = attempts((Reason.time_limit, 1, None), (Reason.time_limit, 2, None), (None, 3, None))
    assert isinstance(decide(three, Reason.time_limit, None, max_attempts=4), Requeue)
    stop = decide(three, Reason.time_limit, None, max_attempts=3)
    assert isinstance(stop, Stop)
    assert "3 of 3" in stop.why
    assert isinstance(decide(attempts((None, 1, None)), Reason.time_limit, None, max_attempts=1), Stop)


def test_the_same_error_at_the_same_step_twice_is_enough():
    twice = attempts((Reason.segmentation_fault, 12, SEGFAULT), (None, 12, None))
    stop = decide(twice, Reason.segmentation_fault, SEGFAULT, max_attempts=9)
    assert isinstance(stop, Stop)
    assert "at step 12 again" in stop.why
    assert "attempt 1" in stop.why


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((Reason.segmentation_fault, 12, SEGFAULT), (13, Reason.segmentation_fault, SEGFAULT)),
        ((Reason.collective_timeout, 12, None), (12, Reason.segmentation_fault, SEGFAULT)),
        (
            (Reason.segmentation_fault, 12, SEGFAULT),
            (12, Reason.segmentation_fault, SEGFAULT | {"type": "other"}),
        ),
    ],
)
def test_another_step_or_another_error_is_tried_again(first, second):
    step, reason, error = second
    assert isinstance(decide(attempts(first, (None, step, None)), reason, error, max_attempts=9), Requeue)


def test_numbers_and_addresses_in_a_message_do_not_make_it_another():
    one = {"rank": 1, "type": "RuntimeError", "message": "timed out after 100012 ms on rank 1, 0x7f12"}
    two = one | {"message": "timed out after 100310 ms on rank 3, 0x7a55"}
    twice = attempts((Reason.collective_timeout, 5, one), (None, 5, None))
    assert isinstance(decide(twice, Reason.collective_timeout, two, max_attempts=9), Stop)


def test_an_older_twin_counts_too():
    ends = attempts(
        (Reason.segmentation_fault, 12, SEGFAULT), (Reason.preemption, 20, None), (None, 12, None)
    )
    assert isinstance(decide(ends, Reason.segmentation_fault, SEGFAULT, max_attempts=9), Stop)


@pytest.mark.parametrize(
    "reason", [Reason.preemption, Reason.requeued, Reason.node_failure, Reason.memory_floor]
)
def test_what_the_run_can_not_help_proves_nothing_twice(reason):
    twice = attempts((reason, None, None), (None, None, None))
    assert isinstance(decide(twice, reason, None, max_attempts=9), Requeue)


def test_a_time_limit_without_progress_is_not_tried_for_ever():
    twice = attempts((Reason.time_limit, None, None), (None, None, None))
    stop = decide(twice, Reason.time_limit, None, max_attempts=9)
    assert isinstance(stop, Stop)
    assert "before its first step" in stop.why


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"every": 0, "began_from": None},
            "training.checkpoint_every=0: it would begin again and end again; set training.checkpoint_every, training.steps or "
            "cluster.time_limit",
        ),
        ({"began_from": None}, "no checkpoint was saved: it would begin at the same step"),
        (
            {"margin_s": 7},
            "saved since step 5, where it began: .*signal_margin_s=7, .*checkpoint_every=10",
        ),
    ],
)
def test_a_time_limit_before_which_nothing_was_saved_is_the_end(change, words):
    nothing = replace(SAVED, saved=False, **change)
    stop = decide(attempts((None, 40, None)), Reason.time_limit, None, max_attempts=9, gain=nothing)
    assert isinstance(stop, Stop)
    assert re.search(words, stop.why)
    # Other runs of the job took a part of its time; alone it may have enough.
    shared = replace(nothing, whole_limit=False)
    assert isinstance(
        decide(attempts((None, 40, None)), Reason.time_limit, None, max_attempts=9, gain=shared), Requeue
    )


@pytest.mark.parametrize("reason", sorted(AGAIN - {Reason.time_limit}))
def test_what_is_not_the_time_limit_may_go_well_from_the_start(reason):
    nothing = replace(SAVED, saved=False, every=0, began_from=None)
    assert isinstance(decide(attempts((None, 7, None)), reason, None, max_attempts=2, gain=nothing), Requeue)


@pytest.mark.parametrize(
    ("kind", "message", "reason"),
    [
        ("Killed", "rank 3 was killed by signal 11 (SIGSEGV); see the log", Reason.segmentation_fault),
        ("Killed", "rank 3 was killed by signal 7 (SIGBUS); see the log", Reason.segmentation_fault),
        ("Killed", "rank 3 was killed by signal 9 (SIGKILL); somebody killed it", Reason.killed),
        ("Killed", "rank 3 was killed by signal 6 (SIGABRT); see the log", Reason.killed),
        ("RuntimeError", "[gloo/pair.cc:1] Timed out waiting 30000ms for recv", Reason.collective_timeout),
        ("DistBackendError", "Watchdog caught collective operation timeout", Reason.collective_timeout),
        ("RuntimeError", "Connection closed by peer [127.0.0.1]:123", Reason.lost_rank),
        ("RuntimeError", "The size of tensor a must match", Reason.exception),
        ("TimeoutError", "a download timed out", Reason.exception),
        ("OutOfMemoryError", "CUDA out of memory. Tried to allocate", Reason.exception),
        ("NonFiniteLossError", "Loss is not finite (nan) at step 3", Reason.non_finite_loss),
        ("ConfigError", "model.dim must be even", Reason.bad_configuration),
        ("LayoutError", "Slurm started 3 tasks", Reason.bad_configuration),
        ("MemoryFloorError", "node n1: 60.0 GiB are free", Reason.memory_floor),
        ("SystemExit", "7", Reason.exception),
    ],
)
def test_errors_have_a_reason(kind, message, reason):
    assert classify({"rank": 1, "type": kind, "message": message, "traceback": ""}) is reason


def test_an_abort_by_the_watchdog_is_a_time_out():
    tail = "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)\nFatal Python error: Aborted"
    error = {"rank": 3, "type": "Killed", "message": "signal 6 (SIGABRT)", "traceback": tail}
    assert classify(error) is Reason.collective_timeout


def test_no_error_at_all_is_a_lost_rank():
    assert classify(None) is Reason.lost_rank
