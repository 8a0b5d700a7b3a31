"""``cluster.checkpoint_dir`` of a record that is run again: whether it stays, and what is said of it."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from europa_exp.config.errors import ConfigError
from europa_exp.config.rules.checkpoints import initial_checkpoint

if TYPE_CHECKING:
    from europa_exp.config.schema import Cluster
    from europa_exp.launch.points import Point

FIELD = "cluster.checkpoint_dir"


def stays(recorded: Cluster, now: Cluster, said: Collection[str]) -> bool:
    """Whether the recorded folder replaces today's: on a cluster of the same name, unless ``said`` holds the field.

    ``said`` are the fields of the command line and of the user's own file of settings.
    """
    return (
        recorded.checkpoint_dir is not None
        and recorded.checkpoint_dir != now.checkpoint_dir
        and recorded.name == now.name
        and FIELD not in said
        and owner_problem(recorded.checkpoint_dir) is None
    )


def owner_problem(folder: str) -> str | None:
    """Why a recorded folder is not written to unasked: it, or where it would be made, is neither the caller's nor root's."""
    place = Path(folder).absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    return None if place.stat().st_uid in (os.geteuid(), 0) else f"{place} belongs to somebody else"


def refuse_untrusted(points: Sequence[Point]) -> None:
    """Checkpoints are not ours for lying in a folder that only the record names. Raises ConfigError."""
    for point in points:
        cluster = replace(point.cfg.cluster, checkpoint_dir=None)
        if problems := list(initial_checkpoint.find(replace(point.cfg, cluster=cluster))):
            raise ConfigError([(point.name, p) for p in problems])


def differences(recorded: Cluster, now: Cluster, kept: bool) -> list[str]:
    """Lines on a folder that is not the recorded one, or that is (``kept``) instead of today's."""
    there, used = (c.checkpoint_dir or "the run folders" for c in (recorded, now))
    if there == used:
        line = f"{FIELD}: {used} as recorded is used ({FIELD}=... takes another, null the run folders)"
        return [line] if kept else []
    on, way_out = "" if recorded.name == now.name else f", on {recorded.name},", ""
    if recorded.checkpoint_dir is not None:
        trouble = owner_problem(recorded.checkpoint_dir)
        way_out = f"; {trouble}" if trouble else ""
        way_out += f"; {FIELD}={recorded.checkpoint_dir} takes the recorded one"
    return [f"{FIELD}: {there} recorded{on} and {used} used{way_out}"]
