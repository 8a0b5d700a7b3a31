"""What a run measures at each logged step, under the names that ``metrics.jsonl`` and W&B share.

torchtitan's ``MetricsProcessor`` keeps the time, the tokens and the memory; this one reports them: over all ranks,
with quantities that the device does not have left out instead of reported as 0.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.tools.logging import logger

from europa_exp.cpu import device

GIB = 1024**3

Sink = Callable[[dict[str, float], int], object]
"""Takes (metrics, step) on rank 0."""


class RunMetrics(MetricsProcessor):
    """Metrics of a run over all ranks.

    After the trainer is built, :meth:`attach` says where they go. Every rank takes part in :meth:`log` (one all-gather
    of a few numbers a logged step); rank 0 reports.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    def __init__(self, config: Config, **kwargs: Any) -> None:
        super().__init__(config, **kwargs)
        self._sinks: list[Sink] = []
        self._take_collectives: Callable[[], dict[str, float]] = dict
        self._record_collectives: Callable[[int, int], None] | None = None
        self._flops = 0.0
        self._last_step = 0
        self._retries_before = 0

    def attach(
        self,
        sinks: Sequence[Sink],
        take_collectives: Callable[[], dict[str, float]],
        record_collectives: Callable[[int, int], None] | None = None,
    ) -> None:
        """Say where metrics go.

        Args:
            sinks: called on rank 0 with (metrics, step).
            take_collectives: what this rank handed to collectives since the last call, by metric name (``comm/...``).
            record_collectives: called on every rank with (step, steps since the last logged one) after
                ``take_collectives``, to record more of what was taken.
        """
        self._sinks = list(sinks)
        self._take_collectives = take_collectives
        self._record_collectives = record_collectives

    def start(self, step: int) -> None:
        """Begin the clock of the first interval, so that it does not hold the set-up. ``step``: the last one done."""
        self._last_step = step
        self._retries_before = self._device_stats().get("num_alloc_retries", 0)
        self._take_collectives()
        _reset_peak_host_memory()
        self.device_memory_monitor.reset_peak_stats()
        self.time_last_log = time.perf_counter()

    def count_flops(self, flops: float) -> None:
        """Add floating-point operations of the model that this rank is about to do (forward and backward)."""
        self._flops += flops

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        """Collect over the ranks and report; called by torchtitan's trainer on every rank at each logged step."""
        elapsed = time.perf_counter() - self.time_last_log
        local = {
            "elapsed": elapsed,
            "data": sum(self.data_loading_times),
            "tokens": float(self.ntokens_since_last_log),
            "flops": self._flops,
            "host": _peak_host_memory() / GIB,
            **self._take_collectives(),
            **self._device_memory(),
        }
        ranks = _gather(local)
        steps = max(1, step - self._last_step)
        if self._record_collectives is not None:
            self._record_collectives(step, steps)
        if dist.get_rank() == 0:
            metrics = self._metrics(ranks, steps)
            metrics.update(
                {
                    "loss/global_avg": global_avg_loss,
                    "loss/global_max": global_max_loss,
                    "grad_norm": grad_norm,
                }
            )
            extra = dict(extra_metrics or {})
            if "n_tokens_seen" in extra:
                metrics["tokens_seen"] = extra.pop("n_tokens_seen")
            metrics.update(extra)
            for sink in self._sinks:
                sink(metrics, step)
            logger.info(
                f"step {step}  loss {global_avg_loss:.5f}  grad_norm {grad_norm:.4f}  "
                f"{metrics['throughput/tokens_per_second_per_gpu']:,.0f} tokens/s per GPU  {metrics['time/step_s']:.3f} s"
            )
        self._last_step = step
        self._flops = 0.0
        self.ntokens_since_last_log = 0
        self.data_loading_times.clear()
        self.device_memory_monitor.reset_peak_stats()
        _reset_peak_host_memory()
        self.time_last_log = time.perf_counter()

    def _metrics(self, ranks: dict[str, list[float]], steps: int) -> dict[str, float]:
        # The step is as long as its slowest rank; tokens and work are averages over the ranks.
        elapsed, world = max(ranks["elapsed"]), len(ranks["elapsed"])
        flops_per_second = sum(ranks["flops"]) / world / elapsed
        metrics = {
            "throughput/tokens_per_second_per_gpu": sum(ranks["tokens"]) / world / elapsed,
            "throughput/tflops_per_gpu": flops_per_second / 1e12,
            "time/step_s": elapsed / steps,
            "time/data_s": max(ranks["data"]) / steps,
            "memory/peak_host_gib": max(ranks["host"]),
        }
        for name in ranks:
            if name.startswith("comm/"):
                metrics[name] = max(ranks[name]) / steps
        if device.device_type() != "cpu" and not self.has_quantization:
            metrics["throughput/mfu"] = flops_per_second / self.gpu_peak_flops
        if "active" in ranks:
            metrics["memory/peak_active_gib"] = max(ranks["active"])
            metrics["memory/peak_reserved_gib"] = max(ranks["reserved"])
        if "retries" in ranks:
            metrics["memory/allocator_retries"] = sum(ranks["retries"])
            metrics["memory/ranks_with_retries"] = sum(retries > 0 for retries in ranks["retries"])
        return metrics

    def _device_memory(self) -> dict[str, float]:
        stats = self._device_stats()
        memory = {}
        if "active_bytes.all.peak" in stats:
            memory["active"] = stats["active_bytes.all.peak"] / GIB
            memory["reserved"] = stats["reserved_bytes.all.peak"] / GIB
        if "num_alloc_retries" in stats:
            # The allocator counts over the life of the process; a step wants its own.
            memory["retries"] = float(stats["num_alloc_retries"] - self._retries_before)
            self._retries_before = stats["num_alloc_retries"]
        return memory

    def _device_stats(self) -> dict[str, int]:
        from torchtitan.tools import utils

        return dict(utils.device_module.memory_stats(self.device_memory_monitor.device))


def _gather(local: dict[str, float]) -> dict[str, list[float]]:
    """Values of every rank, by name; all ranks have the same names."""
    names = sorted(local)
    mine = torch.tensor([local[name] for name in names], dtype=torch.float64, device=device.device_type())
    everyone = mine.new_empty(dist.get_world_size() * len(names))
    dist.all_gather_single(everyone, mine)
    return dict(zip(names, everyone.view(-1, len(names)).T.tolist(), strict=True))


def _peak_host_memory() -> int:
    """Peak resident memory of this process in bytes since the last reset (VmHWM of proc(5))."""
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def _reset_peak_host_memory() -> None:
    # proc(5): writing 5 resets the high-water mark. Containers may forbid it; the peak is then that of the process.
    try:
        with open("/proc/self/clear_refs", "w") as handle:
            handle.write("5")
    except OSError:
        pass
