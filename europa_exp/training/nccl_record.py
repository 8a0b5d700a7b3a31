"""What NCCL says it took, in the record of a run (``nccl.record``)."""

from __future__ import annotations

from typing import Any

from torchtitan.tools.logging import logger

from europa_exp.comm import nccl_report
from europa_exp.runs.folder import RunFolder


class NcclRecord:
    """Adds the ``nccl`` section to ``runtime.json``; nothing where NCCL was not asked to say anything.

    Called as a sink of metrics: by the first logged step every group has its communicator, and the network is connected.
    Later calls do nothing.

    Args:
        run: the run folder.
        runtime: the content of ``runtime.json``, with the ``environment`` that the worker set and the ``backend``.
    """

    def __init__(self, run: RunFolder, runtime: dict[str, Any]) -> None:
        self._run = run
        self._runtime = runtime
        self._pending = runtime["backend"] == "nccl" and "NCCL_DEBUG_FILE" in runtime.get("environment", {})

    def __call__(self, *_: object) -> None:
        if not self._pending:
            return
        self._pending = False
        try:
            section = nccl_report.section(self._runtime["environment"], self._run.nccl_log(0))
            self._run.write_runtime({**self._runtime, "nccl": section})
        except OSError as error:
            logger.warning(f"what NCCL took is not recorded: {error}")
            return
        for text in nccl_report.warnings(section):
            logger.warning(text)
