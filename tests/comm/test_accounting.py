"""The count of bytes handed to collectives, against the calls of torch.distributed themselves."""

from __future__ import annotations

import logging
from typing import Any

import accounting_on_ranks
import fp8_on_ranks
import pytest
import torch
from accounting_on_ranks import MILLISECONDS, Collectives, Rows
from ranks import run_ranks
from sharded_moe import Case
from torch import Tensor, nn

from europa_exp.comm.accounting import Collective, CollectiveCounter, Kind, Traffic, step_metrics
from europa_exp.comm.collective_timer import CollectiveTimer

EXPERT_VALUES = 2 * 2 * 8 * 128 * 64  # layers, weights, experts, hidden, width
DENSE_VALUES = 2 * 64 * 64 + 8 * 64


def rows_total(rows: dict, *collectives: str) -> int:
    return sum(handed for (collective, *_), (_, handed, _) in rows.items() if collective in collectives)


@pytest.mark.slow
@pytest.mark.parametrize("count_first", [False, True])
def test_fp8_halves_the_expert_bytes_and_nothing_else(count_first: bool) -> None:
    bf16 = run_ranks(4, fp8_on_ranks.counted, Case(), False, count_first)
    fp8 = run_ranks(4, fp8_on_ranks.counted, Case(), True, count_first)
    for plain, ours in zip(bf16, fp8):
        expert_bf16 = plain["rows"].pop(("all_gather", "expert", "bfloat16", 2))
        expert_fp8 = ours["rows"].pop(("all_gather", "expert", "uint8", 2))
        # forward and backward of two layers, a quarter of the experts each
        assert expert_bf16[:2] == (4, 2 * EXPERT_VALUES // 4 * 2)
        assert expert_fp8[:2] == (4, 2 * EXPERT_VALUES // 4 * 1.03125)
        assert expert_fp8[1] <= 0.52 * expert_bf16[1]
        assert ours["rows"] == plain["rows"]
        assert set(ours["rows"]) == {
            ("all_gather", "dense", "bfloat16", 4),
            ("reduce_scatter", "dense", "float32", 4),
            ("reduce_scatter", "expert", "float32", 2),
        }
        assert ours["rows"]["reduce_scatter", "expert", "float32", 2][1] == EXPERT_VALUES // 2 * 4
        assert ours["rows"]["reduce_scatter", "dense", "float32", 4][1] == DENSE_VALUES * 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "case", "fp8"),
    [
        (4, Case(), True),
        (4, Case(unshard_async=True, offload=True), True),
        (4, Case(width=20, hidden=36, experts=6), True),
        (2, Case(ep=0), True),
        (2, Case(ep=2), False),
        (4, Case(ep=1, replicas=2), True),
        (4, Case(ep=2, replicas=2), True),
    ],
    ids=["expert parallel", "async", "uneven", "one group", "one shard", "replicas", "replicas of one shard"],
)
def test_counts_what_the_collectives_were_given(ranks: int, case: Case, fp8: bool) -> None:
    for seen in run_ranks(ranks, fp8_on_ranks.counted, case, fp8):
        rows, calls = seen["rows"], seen["calls"]
        assert rows_total(rows, "all_gather") == calls["all_gather_single"] > 0
        assert rows_total(rows, "reduce_scatter") == calls["reduce_scatter_single"] > 0
        assert rows_total(rows, "all_reduce") == calls.get("all_reduce", 0)
        assert (case.replicas > 1) == (calls.get("all_reduce", 0) > 0)
        sent = {name: sum(row[2] for (found, *_), row in rows.items() if found == name) for name, *_ in rows}
        assert seen["metrics"]["comm/all_gather_sent_gib"] == pytest.approx(sent["all_gather"] / 2**30)
        reduced = sent["reduce_scatter"] + sent.get("all_reduce", 0)
        assert seen["metrics"]["comm/reduce_sent_gib"] == pytest.approx(reduced / 2**30)
        assert seen["left"] == 0


@pytest.mark.slow
def test_accumulated_gradients_are_reduced_across_replicas_once() -> None:
    case = Case(ep=1, replicas=2)
    for seen in run_ranks(4, fp8_on_ranks.counted, case, True, False, 3):
        assert rows_total(seen["rows"], "all_reduce") == seen["calls"]["all_reduce"]
        assert rows_total(seen["rows"], "reduce_scatter") == seen["calls"]["reduce_scatter_single"]


def by_collective(rows: Rows, field: str) -> dict[Collective, Any]:
    found: dict[Collective, Any] = {}
    for kind, traffic in rows.items():
        found[kind.collective] = found.get(kind.collective, 0) + getattr(traffic, field)
    return found


@pytest.mark.slow
def test_gradients_by_all_to_all_count_as_gradients() -> None:
    plain = run_ranks(4, accounting_on_ranks.step, Case(), [])
    ours = run_ranks(4, accounting_on_ranks.step, Case(), ["fp8", "a2a"])
    for fp32, seen in zip(plain, ours):
        rows = seen["rows"]
        assert set(rows) == {
            Kind(Collective.all_gather, "dense", "bfloat16", 4, "fsdp"),
            Kind(Collective.all_gather, "expert", "uint8", 2, "efsdp"),
            Kind(Collective.all_to_all, "dense", "bfloat16", 4, "fsdp"),
            Kind(Collective.all_to_all, "expert", "bfloat16", 2, "efsdp"),
        }
        handed = by_collective(rows, "handed_bytes")
        assert handed[Collective.all_to_all] == seen["bytes"]["all_to_all_single"]
        assert handed[Collective.all_gather] == seen["bytes"]["all_gather_single"]
        assert seen["metrics"]["comm/reduce_sent_gib"] == fp32["metrics"]["comm/reduce_sent_gib"] / 2
        assert "comm/all_to_all_sent_gib" not in seen["metrics"]


@pytest.mark.slow
def test_a_gather_in_the_node_is_told_from_a_full_one() -> None:
    for seen in run_ranks(4, accounting_on_ranks.step, Case(), ["node"]):
        gathers = {
            (kind.role, kind.group, kind.ranks): traffic
            for kind, traffic in seen["rows"].items()
            if kind.collective is Collective.all_gather
        }
        # Forward gathers two layers and the head over all ranks, backward the head, and the layers in the node.
        layer, head = 64 * 64 * 2, 8 * 64 * 2
        assert gathers["dense", "fsdp", 4] == Traffic(4, 2 * layer // 4 + 2 * head // 4, pytest.approx(0.004))
        assert gathers["dense", "node", 2] == Traffic(2, 2 * layer // 2, pytest.approx(0.002))
        assert gathers["expert", "efsdp", 2].calls == 4


@pytest.mark.slow
def test_process_groups_have_readable_names() -> None:
    seen = run_ranks(4, accounting_on_ranks.names)
    for rank, names in enumerate(seen):
        assert names == {
            "all": "world",
            "named": "inner",
            "neighbours": ("0-1", "0-1", "2-3", "2-3")[rank],
            "every second": ("0-2:2", "1-3:2")[rank % 2],
            "described": "replay",
            "irregular": "" if rank == 2 else "0,1,3",
            "of a group": "None",
        }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "mechanisms"),
    [
        (Case(), ["fp8"]),
        (Case(unshard_async=True), ["fp8", "a2a"]),
        (Case(ep=1, replicas=2), ["a2a"]),
        (Case(ep=2, replicas=2), []),
    ],
    ids=["plain", "async", "replicas", "replicas of one shard"],
)
def test_each_call_is_timed_for_as_long_as_it_takes(case: Case, mechanisms: list[str]) -> None:
    calls_of = {
        Collective.all_gather: "all_gather_single",
        Collective.reduce_scatter: "reduce_scatter_single",
        Collective.all_to_all: "all_to_all_single",
        Collective.all_reduce: "all_reduce",
    }
    untimed = run_ranks(4, accounting_on_ranks.step, case, mechanisms, 3, False)
    timed = run_ranks(4, accounting_on_ranks.step, case, mechanisms, 3)
    for plain, seen in zip(untimed, timed):
        assert {kind: (t.calls, t.handed_bytes, None) for kind, t in seen["rows"].items()} == {
            kind: (t.calls, t.handed_bytes, t.seconds) for kind, t in plain["rows"].items()
        }
        assert (case.replicas > 1) == any(kind.collective is Collective.all_reduce for kind in seen["rows"])
        for kind, traffic in seen["rows"].items():
            each = MILLISECONDS[calls_of[kind.collective]] / 1000
            # A prefetched gather is in flight while other collectives run, and its time holds theirs.
            if case.unshard_async and kind.collective is Collective.all_gather:
                assert traffic.seconds >= traffic.calls * each
            else:
                assert traffic.seconds == pytest.approx(traffic.calls * each), kind
        # Three steps make no more events than are in flight at a time, and other all-reduce hooks still run.
        assert plain["events"] == 0 < seen["events"] <= 12
        assert seen["reduced"] == seen["groups"]


def test_on_a_cpu_there_is_no_time() -> None:
    counter = CollectiveCounter(timed=True)
    counter.install(routed := Routed())
    routed.token_dispatcher.there_and_back(torch.ones(10, 4))
    assert [traffic.seconds for traffic in counter.take().values()] == [None]


class Device:
    """Events of a device that is done with the first `done` of what it was given."""

    def __init__(self) -> None:
        self.queued = self.done = self.made = self.waited = 0

    def event(self) -> DeviceEvent:
        self.made += 1
        return DeviceEvent(self)


class DeviceEvent:
    def __init__(self, device: Device) -> None:
        self._device = device

    def record(self, stream: Any = None) -> None:
        self._device.queued += 1
        self.at = self._device.queued

    def query(self) -> bool:
        return self.at <= self._device.done

    def synchronize(self) -> None:
        self._device.waited += not self.query()
        self._device.done = max(self._device.done, self.at)

    def elapsed_time(self, end: DeviceEvent) -> float:
        assert self.query()
        assert end.query()
        return 1000.0 * (end.at - self.at)


@pytest.mark.slow
def test_times_are_measured_with_events_where_the_model_is_on_cuda() -> None:
    assert run_ranks(1, accounting_on_ranks.timers, Case(ep=0)) == [{"cpu": False, "cuda": True}]


def test_events_are_used_again_and_the_host_waits_only_when_asked() -> None:
    device = Device()
    timer: CollectiveTimer[str] = CollectiveTimer(device.event)
    for _ in range(10_000):
        timer.stop("a", timer.start())
        device.done = max(0, device.queued - 20)  # the device is ten collectives behind
    assert device.waited == 0
    assert device.made <= 24
    assert timer.take() == {"a": 10_000.0}
    assert device.waited > 0
    assert timer.take() == {}


def test_nothing_is_read_before_the_device_is_done() -> None:
    device = Device()
    timer: CollectiveTimer[str] = CollectiveTimer(device.event)
    for _ in range(100):
        timer.stop("a", timer.start())
    assert device.waited == 0
    assert device.made == 200
    assert timer.take() == {"a": 100.0}
    for _ in range(100):
        timer.stop("b", timer.start())
    assert device.made == 200


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_events_measure_what_the_stream_does() -> None:
    timer: CollectiveTimer[str] = CollectiveTimer()
    for _ in range(3):
        start = timer.start()
        torch.cuda._sleep(100_000_000)  # cycles; a GPU makes 1e9 to 3e9 a second
        timer.stop("a", start)
    assert 0.05 < timer.take()["a"] < 3


def test_metrics_leave_out_what_was_not_called() -> None:
    assert step_metrics({}) == {}
    counts = {Kind(Collective.all_reduce, "dense", "float32", 2, "dp_replicate"): Traffic(1, 2**30)}
    assert step_metrics(counts) == {"comm/reduce_sent_gib": 1.0}
    assert CollectiveCounter().install(nn.Linear(2, 2)) == 0


@pytest.mark.parametrize(
    ("collective", "sent"),
    [("all_gather", 2100), ("reduce_scatter", 525), ("all_reduce", 1050), ("all_to_all", 525)],
)
def test_estimate_of_bytes_sent(collective: str, sent: int) -> None:
    assert Traffic(1, 700).sent_bytes(Kind(Collective(collective), "dense", "float32", 4, "fsdp")) == sent


class Mesh:
    mesh_dim_names = ("ep",)

    def size(self) -> int:
        return 2


class Exchange(torch.autograd.Function):
    """[sent, 4] -> [received, 4], and back; takes time on `clock`."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, received: int, clock: Collectives) -> Tensor:
        ctx.clock, ctx.sent = clock, len(tokens)
        clock.now += 2
        return tokens.repeat(2, 1)[:received]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.clock.now += 3
        return gradient.repeat(2, 1)[: ctx.sent], None, None


class Dispatcher:
    """Moves tokens between this rank and itself with the methods of torchtitan's dispatcher."""

    ep_mesh = Mesh()

    def __init__(self) -> None:
        self.clock = Collectives()

    def _dispatch_token_exchange(self, tokens: Tensor, received: int) -> Tensor:
        return Exchange.apply(tokens, received, self.clock)

    def _combine_token_exchange(self, tokens: Tensor, received: int) -> Tensor:
        return Exchange.apply(tokens, received, self.clock)

    def there_and_back(self, tokens: Tensor) -> Tensor:
        return self._combine_token_exchange(self._dispatch_token_exchange(tokens, 12) * 2, len(tokens))


class Compilable(Dispatcher):
    """The same without a clock, whose changes a graph can't hold."""

    def _dispatch_token_exchange(self, tokens: Tensor, received: int) -> Tensor:
        return tokens.repeat(2, 1)[:received]

    _combine_token_exchange = _dispatch_token_exchange


class Routed(nn.Module):
    def __init__(self, dispatcher: type[Dispatcher] = Dispatcher) -> None:
        super().__init__()
        self.token_dispatcher = dispatcher()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.token_dispatcher.there_and_back(tokens)


@pytest.mark.parametrize("timed", [False, True])
def test_routed_tokens_are_counted_in_forward_and_their_gradients_in_backward(timed: bool) -> None:
    model = Routed()
    counter = CollectiveCounter(timed, model.token_dispatcher.clock.event)
    counter.install(model)
    tokens = torch.randn(10, 4, dtype=torch.bfloat16, requires_grad=True)
    model(tokens).sum().backward()
    counts = counter.take()
    # 10 tokens out, 12 back, then the gradients of 10 and of 12; 4 values of 2 bytes each
    (traffic,) = counts.values()
    assert counts == {Kind(Collective.all_to_all, "tokens", "bfloat16", 2, "ep"): traffic}
    assert (traffic.calls, traffic.handed_bytes) == (4, (10 + 12 + 10 + 12) * 8)
    assert traffic.seconds == (pytest.approx(2 * (0.002 + 0.003)) if timed else None)
    assert step_metrics(counts) == {"comm/all_to_all_sent_gib": 176 / 2**30}


def test_compiled_layers_compile_and_are_told_not_to_be_counted(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(Routed(Compilable), Routed(Compilable))
    model[1].compile(backend="eager", fullgraph=True)
    counter = CollectiveCounter()
    with caplog.at_level(logging.WARNING):
        counter.install(model)
    assert "training.compile=false counts it" in caplog.text
    model(torch.ones(10, 4, requires_grad=True)).sum().backward()
    assert [traffic.calls for traffic in counter.take().values()] == [4]
