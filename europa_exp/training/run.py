"""One rank's share of a run: build the trainer, train, record."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.tools.logging import init_logger, logger

from europa_exp.config import schema
from europa_exp.config.effects import without_effect
from europa_exp.cpu import device
from europa_exp.runs.attempts import STOPPED
from europa_exp.runs.collectives import CollectivesWriter, collectives_file
from europa_exp.runs.folder import RunFolder
from europa_exp.runs.metrics import MetricsWriter
from europa_exp.runs.tracking import open_tracker
from europa_exp.training.assemble import build_trainer
from europa_exp.training.collectives import CollectiveTables
from europa_exp.training.metrics import Sink
from europa_exp.training.nccl_record import NcclRecord
from europa_exp.training.stopping import Stopped


def train(cfg: schema.Config, run: RunFolder, runtime: dict[str, Any]) -> None:
    """Train as this rank of the run; the environment says which rank that is.

    Args:
        cfg: the frozen configuration.
        run: the run folder; rank 0 writes metrics, tables of collectives, ``runtime.json`` and W&B there.
        runtime: what the worker did before torch was imported (the environment that it set, notes). ``stop``, where it is
            there, is a function that says whether this rank was asked to save and stop.

    Raises:
        Stopped: all ranks agreed to stop, and saved what they had; no failure.
        Exception: whatever stops the training; the worker records it.
    """
    init_logger()
    runtime = dict(runtime)
    asked = runtime.pop("stop", None)
    torch.set_num_threads(cfg.cluster.threads_per_rank)
    is_first = int(os.environ["RANK"]) == 0
    nccl_record = NcclRecord(run, _write_runtime(run, cfg, runtime)) if is_first else None
    # W&B starts in a thread of its own while the trainer is built.
    tracker = open_tracker(run, cfg) if is_first else None
    writer = MetricsWriter(run.metrics_file) if is_first else None
    profiled = cfg.profiling.collectives
    collectives = CollectivesWriter(collectives_file(run)) if is_first and profiled else None
    exit_code = 1
    try:
        trainer, counter = build_trainer(cfg, run.path)
        sinks: list[Sink] = [] if writer is None or tracker is None else [writer.write, tracker.log]
        if nccl_record is not None:
            # By the first logged step every group has its communicator and every connection is made.
            sinks.append(nccl_record)
        if asked is not None:
            trainer.stop_when(asked)
        tables = CollectiveTables(counter, collectives)
        trainer.metrics_processor.attach(sinks, tables.take, tables.record if profiled else None)
        trainer.train()
        trainer.close()
        exit_code = 0
    except Stopped as stopped:
        exit_code = STOPPED
        logger.info(str(stopped))
        trainer.close()
        raise
    finally:
        if nccl_record is not None:
            nccl_record()
        for record in (writer, collectives):
            if record is not None:
                record.close()
        if tracker is not None:
            tracker.finish(exit_code)
    dist.destroy_process_group()


def _write_runtime(run: RunFolder, cfg: schema.Config, runtime: dict[str, Any]) -> dict[str, Any]:
    """Write down what this rank met, and return it."""
    device_type = device.device_type()
    notes = [*runtime.get("notes", []), *without_effect(cfg)]
    if device_type == "cpu" and cfg.nccl != schema.Nccl():
        note = "the collectives are gloo's, so the nccl settings have no effect here"
        if cfg.nccl.record:
            note += ", and nccl.record=true recorded nothing"
        logger.warning(note)
        notes.append(note)
    record = {
        **runtime,
        "device": device_type,
        "device_name": platform.processor() or platform.machine(),
        "backend": "gloo" if device_type == "cpu" else "nccl",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "notes": notes,
    }
    if device_type != "cpu":
        record["device_name"] = torch.get_device_module(device_type).get_device_name()
        if device_type == "cuda":
            record["nccl"] = {"version": ".".join(map(str, torch.cuda.nccl.version()))}
    run.write_runtime(record)
    return record
