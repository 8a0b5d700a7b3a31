"""Trainings of a rank whose gradients a bf16 all-to-all reduces, or not; functions that tests run on several ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from parity import Trained, watched

from europa_exp.config import io


@dataclass
class Reduced(Trained):
    """Of a rank besides: GiB that it sent to reduce gradients in the last step, and how."""

    reduce_gib: float = 0.0
    reduced_in: dict[str, str] = field(default_factory=dict)
    """By parameter: the collective that its group's gradients take."""


def train(frozen: str, folder: str, keep: bool = True) -> Reduced:
    """Our trainer; without `keep` the all-to-all takes every group."""
    from europa_exp.comm.accounting import step_metrics
    from europa_exp.training import assemble

    if not keep:
        assemble.apply_bf16_all_to_all = partial(_apply_to_all_groups, assemble.apply_bf16_all_to_all)
    trainer, counter = assemble.build_trainer(io.from_yaml(frozen), Path(folder))
    reduced_in = _reduced_in(trainer.model_parts[0])
    trained = watched(trainer)
    reduce_gib = step_metrics(counter.take()).get("comm/reduce_sent_gib", 0.0)
    return Reduced(trained.losses, trained.norms, trained.gradients, reduce_gib, reduced_in)


def _apply_to_all_groups(apply: Any, model: Any, keep: Sequence[str], **options: Any) -> int:
    assert keep
    return apply(model, **options)


def _reduced_in(model: Any) -> dict[str, str]:
    from europa_exp.comm.fsdp_groups import chain, groups

    names = {module: name for name, module in model.named_modules()}
    return {
        f"{names[param._module_info.module]}.{param._module_info.param_name}": getattr(
            chain(group.reduce_scatter)[-1], "collective", "reduce_scatter"
        )
        for group in groups(model)
        for param in group.fsdp.fsdp_params
    }
