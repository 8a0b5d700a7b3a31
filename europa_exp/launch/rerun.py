"""``rerun=RUN``: a recorded configuration once more, as it is or with changes.

What comes from where:

- ``cluster``, ``launch``, ``tracking`` and ``trust`` come from today's `conf/` and the command line: they say where and how
  a run is made. Those fields of ``cluster`` that can change a result (threads a rank, environment of the ranks) stay as
  recorded, so that a rerun without changes is the same experiment; ``cluster=...`` or ``cluster.FIELD=...`` takes today's.
- ``cluster.checkpoint_dir`` stays as recorded on a cluster of the same name, unless the command line or the user's own file
  of settings gives one, or the folder is somebody else's by now: what lies in it can be loaded later.
- ``group=option`` takes that group whole from today's `conf/`, ``field=value`` changes one field.
- Everything else, ``data.path`` and ``training.initial_checkpoint`` included, stays as recorded.

A record is data and may come from anyone: it is read into the schema, and nothing in it is imported, resolved or executed.
Of recorded environment variables only those of allocators and libraries for arithmetic and communication are taken over.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from europa_exp.config.errors import ConfigError, Problem
from europa_exp.launch import rerun_folder
from europa_exp.launch.arguments import refuse, split_flags
from europa_exp.launch.compose import (
    GLOBAL_GROUPS,
    Composer,
    Composition,
    apply_overrides,
    explained,
    parse_all,
)
from europa_exp.launch.expand import early_problems, make_plan
from europa_exp.launch.fields import group_names
from europa_exp.launch.hand_over import hand_over
from europa_exp.launch.overrides import key_of, normalize, parse, split
from europa_exp.launch.plugins import composer
from europa_exp.launch.sweep_file import GROUP, SweepFile, read

if TYPE_CHECKING:
    from europa_exp.config.schema import Config

FROM_HERE = ("cluster", "launch", "tracking", "trust")
"""Groups and fields that come from today's `conf/` and the command line, never from a record."""

ACCEPTED = (
    "a run folder, its name, a unique prefix of it, a hash, ENTITY/PROJECT/ID of W&B, or a W&B offline folder"
)

_SAFE_VARIABLES = re.compile(
    r"(PYTORCH|TORCH|CUBLAS|CUDNN|OMP|KMP|GOMP|MKL|OPENBLAS|MALLOC|MIMALLOC|GLOO|UCX|FI)_[A-Z0-9_]+"
    r"|CUDA_(DEVICE_MAX_CONNECTIONS|LAUNCH_BLOCKING|MODULE_LOADING)|PYTHONHASHSEED"
)


@dataclass(frozen=True)
class Record:
    """A recorded run, wherever it was found."""

    name: str
    """What a new run names as its parent."""

    cfg: Config
    provenance: dict[str, Any] = field(default_factory=dict)
    """Empty where none is known (W&B)."""


# ---------------------------------------------------------------------------------------------------------- finding it


def find_record(text: str, runs_dir: str | Path) -> Record:
    """The record that ``text`` names. Raises ConfigError with what would be accepted."""
    from europa_exp.config import io
    from europa_exp.runs.folder import RunFolderError
    from europa_exp.runs.lookup import LookupFailed, find
    from europa_exp.runs.wandb_source import WandbSourceError, is_wandb, recorded_config

    if not text:
        raise _not_found(text, "names no run")
    of_wandb, tried = is_wandb(text), ""
    if not (of_wandb and Path(text).exists()):
        try:
            run = find(runs_dir, text, newest=True)
            return Record(run.name, io.from_yaml(run.config_text(), label=run.name), run.provenance())
        except (LookupFailed, RunFolderError) as e:
            if not of_wandb:
                raise _not_found(text, str(e)) from e
            tried = f"{e}; "
    try:
        found = recorded_config(text)
    except WandbSourceError as e:
        raise _not_found(text, f"{tried}{e}") from e
    return Record(found.name or text, io.from_yaml(found.yaml, label=found.source), found.provenance or {})


def _not_found(text: str, reason: str) -> ConfigError:
    rule, *listed = reason.splitlines() or [reason]
    return ConfigError([("", Problem("rerun", text, rule.rstrip(":"), f"Give {ACCEPTED}", tuple(listed)))])


# ----------------------------------------------------------------------------------------------------------- composing


class RerunComposer:
    """Composes points from a record instead of the defaults of `conf/` (see the module's rules)."""

    def __init__(self, today: Composer, recorded: Config) -> None:
        self._today = today
        self._recorded = recorded
        self.kept_folder = False
        """Whether a point took ``cluster.checkpoint_dir`` from the record."""

    def options(self, group: str) -> list[str]:
        """Options of a group of today's `conf/`."""
        return self._today.options(group)

    def compose(self, overrides: Sequence[str]) -> Composition:
        """One point: the record with these overrides. Raises ConfigError."""
        from omegaconf import OmegaConf

        from europa_exp.config.io import to_dict
        from europa_exp.config.schema import Config

        with explained(overrides, self.options):
            parsed = parse_all(overrides)
        chosen = [p.key_or_group for p in parsed if self.options(p.key_or_group)]
        if experiments := [g for g in chosen if g in GLOBAL_GROUPS]:
            rule = "an experiment sets several groups, and here the record does that"
            raise refuse(
                experiments[0], "", rule, "Name the groups and fields to change, or run it without rerun="
            )

        here = [text for text in overrides if self._from_here(key_of(text), chosen)]
        today = self._today.compose(here)
        record = to_dict(self._recorded)
        cfg = OmegaConf.structured(Config)
        for name in (*group_names(), "tags", "trust"):
            takes_today = name in FROM_HERE or name in chosen
            value = today.cfg[name] if takes_today else record[name]
            OmegaConf.update(cfg, name, value, merge=not takes_today, force_add=True)
        OmegaConf.set_struct(cfg, True)
        if "cluster" not in chosen:
            named = {key_of(text) for text in overrides}
            for key, value in kept_of_cluster(self._recorded, named).items():
                OmegaConf.update(cfg, key, value, merge=False)
        said = {*self._today.personal().get(today.choices.get("cluster") or "", {}), *map(key_of, overrides)}
        if rerun_folder.stays(self._recorded.cluster, today.cfg.cluster, said):
            self.kept_folder = True
            cfg.cluster.checkpoint_dir = self._recorded.cluster.checkpoint_dir
        with explained(overrides, self.options):
            apply_overrides([p for p in parsed if (p.input_line or "") not in here], cfg)
        known = {k: v for k, v in today.choices.items() if k in chosen or k in FROM_HERE}
        return Composition(cfg, known)

    def _from_here(self, key: str, chosen: Sequence[str]) -> bool:
        return bool(self.options(key)) or key.split(".")[0] in FROM_HERE


def kept_of_cluster(recorded: Config, named: set[str]) -> dict[str, Any]:
    """Fields of ``cluster`` that stay as recorded because they can change a result: dotted name -> value.

    ``named`` are the keys of the command line; what it sets is not kept. Raises ConfigError for recorded environment
    variables that are not taken over from a record.
    """
    from europa_exp.config.identity import is_excluded

    kept: dict[str, Any] = {}
    for f in fields(recorded.cluster):
        dotted = f"cluster.{f.name}"
        if f.name == "executor" or is_excluded(dotted):
            continue
        if not any(key == dotted or key.startswith(f"{dotted}.") for key in named):
            kept[dotted] = getattr(recorded.cluster, f.name)
    problems = []
    for name, value in (kept.get("cluster.env") or {}).items():
        if not _SAFE_VARIABLES.fullmatch(name) or "/" in value:
            rule = "a record's environment is taken over for allocators and libraries only, without paths"
            way_out = f"If you know what it does, give it yourself: cluster.env.{name}=...; cluster.env={{}} leaves all out"
            problems.append(("", Problem(f"cluster.env.{name}", value, rule, way_out)))
    if problems:
        raise ConfigError(problems)
    return kept


# ------------------------------------------------------------------------------------------------------------- the call


def rerun(root: Path, arguments: Sequence[str]) -> int:
    """Run a call with ``rerun=RUN`` in it and return its exit code. Raises ConfigError for one that can't be run."""
    flags, overrides = split_flags(arguments)
    multirun, print_config = _flags(flags)
    named = [a.partition("=")[2].strip("'\"") for a in overrides if a.startswith("rerun=")]
    if len(named) != 1:
        raise refuse("rerun", " ".join(named), "one run is run again by one call", "Give rerun= once")
    overrides = [normalize(a) for a in overrides if not a.startswith("rerun=")]
    if hydra_own := [a for a in overrides if key_of(a).startswith(("hydra.", "hydra/"))]:
        raise refuse(
            key_of(hydra_own[0]), hydra_own[0], "Hydra's own settings have no effect here", "Leave it out"
        )

    with composer(root / "conf") as today:
        if problems := early_problems(today, overrides, multirun=multirun):
            raise ConfigError([("", p) for p in problems])
        base = today.default()
        record = find_record(named[0], _runs_dir(overrides, base))
        again = RerunComposer(today, record.cfg)
        plan = make_plan(
            again,
            overrides,
            multirun=multirun,
            sweep_file=_sweep_file(today, overrides),
            base=base,
            parent=record.name,
            force=True,
            loader=today.loader,
        )
    if again.kept_folder:
        rerun_folder.refuse_untrusted(plan.points)
    if print_config:
        from europa_exp.config.io import to_yaml

        print(to_yaml(plan.points[0].cfg), end="")
        return 0
    command = [sys.argv[0], *arguments]
    identities = [p.identity for p in plan.points]
    _say_first(record, identities, plan.points[0].cfg, base, command, overrides, again.kept_folder)
    return hand_over(plan, command)


def _flags(flags: Sequence[str]) -> tuple[bool, bool]:
    """(multirun, print the configuration); raises ConfigError for flags that make no sense with rerun=."""
    multirun = print_config = False
    rest = list(flags)
    while rest:
        flag = rest.pop(0)
        if flag in ("-m", "--multirun"):
            multirun = True
        elif flag in ("-c", "--cfg") and rest[:1] == ["job"]:
            rest.pop(0)
            print_config = True
        elif flag not in ("--run", "-r", "--resolve"):
            raise refuse("command line", flag, "has no meaning together with rerun=", "Use -m or --cfg job")
    if multirun and print_config:
        raise refuse(
            "command line",
            "-m --cfg",
            "--cfg shows one configuration",
            "Leave -m out, or use launch.preview=true",
        )
    return multirun, print_config


def _runs_dir(overrides: Sequence[str], base: Config | None) -> str:
    for text in reversed(overrides):
        if key_of(text) == "launch.runs_dir":
            return str(parse(text).value())
    return base.launch.runs_dir if base is not None else "runs"


def _sweep_file(today: Composer, overrides: Sequence[str]) -> SweepFile | None:
    chosen = [text for text in overrides if key_of(text) == GROUP]
    return read(today.load([f"+{GROUP}={split(chosen[-1])[2]}"], multirun=True).hydra) if chosen else None


def _other_cluster(recorded: Config, cfg: Config) -> list[str]:
    """That it goes to another cluster than the recorded run, or what of the same one is otherwise."""
    then, now = recorded.cluster, cfg.cluster
    if then.name != now.name:
        return [f"cluster: {then.name} as recorded, {now.name} here"]
    differing = [f.name for f in fields(now) if getattr(then, f.name) != getattr(now, f.name)]
    return [
        f"cluster.{name}: {getattr(then, name)} as recorded, {getattr(now, name)} here"
        for name in differing
        if name != "checkpoint_dir"
    ]


def _say_first(
    record: Record,
    identities: Sequence[str],
    cfg: Config,
    base: Config | None,
    command: Sequence[str],
    overrides: Sequence[str],
    kept_folder: bool,
) -> None:
    """Before anything runs: what is different from the record, around the configuration and in it."""
    from europa_exp.config.identity import identity
    from europa_exp.runs import provenance

    same = all(i == identity(record.cfg) for i in identities)
    print(
        f"Rerun of {record.name}: {'the same experiment' if same else 'a new experiment with this parent'}."
    )
    lines = []
    if record.provenance:
        current = provenance.record(provenance.code_state(), command=command, overrides=overrides, extra={})
        lines += provenance.differences(record.provenance, current)
    else:
        lines.append("code, packages and machine of the record are not known here")
    if base is not None:
        for f in fields(cfg.cluster):
            here, now = getattr(base.cluster, f.name), getattr(cfg.cluster, f.name)
            if (
                f.name != "checkpoint_dir"
                and here != now
                and not any(key_of(t).startswith("cluster") for t in overrides)
            ):
                lines.append(
                    f"cluster.{f.name}: {here} here, {now} as recorded is used (cluster.{f.name}=... takes another)"
                )
    lines += _other_cluster(record.cfg, cfg)
    lines += rerun_folder.differences(record.cfg.cluster, cfg.cluster, kept_folder)
    print("Different from the record:" if lines else "Nothing around it differs from the record.")
    for line in lines:
        print(f"  {line}")
