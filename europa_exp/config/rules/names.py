"""Rules of names and texts: NCCL variables, the ranks' environment, what W&B takes, folders and files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from europa_exp.config.errors import Problem
from europa_exp.config.rules import reads
from europa_exp.config.schema import Config, DataSource, Nccl
from europa_exp.config.secrets import is_harmless, is_secret_name

# ----------------------------------------------------------------------------------------------------------------- NCCL

NCCL_FIELDS = {f"NCCL_{f.name.upper()}": f.name for f in fields(Nccl) if f.name not in ("extra", "record")}
"""Variables that have a field of their own: name -> field."""

_NCCL_NAME = re.compile(r"NCCL_[A-Z0-9_]+")
_REACHES_OUT = re.compile(r"PLUGIN|FILE|PATH|_LIB|_DIR|COMM_ID|NCCL_ENV")
_DEVICES = re.compile(r"[\^=]{0,2}[A-Za-z0-9_.@:-]+(,[A-Za-z0-9_.@:-]+)*")
_CHOICES = {"socket_family": ("AF_INET", "AF_INET6"), "debug": ("VERSION", "WARN", "INFO", "TRACE")}


@reads("nccl.max_ctas", "nccl.min_ctas")
def ctas(cfg: Config) -> Iterator[Problem]:
    """The most is not below the least."""
    most, least = cfg.nccl.max_ctas, cfg.nccl.min_ctas
    if most is not None and least is not None and most < least:
        yield Problem("nccl.max_ctas", most, f"must be at least nccl.min_ctas={least}", f"Take {least} to 64")


@reads("nccl")
def nccl_texts(cfg: Config) -> Iterator[Problem]:
    """Words that NCCL knows, devices that look like devices."""
    for name, choices in _CHOICES.items():
        value = getattr(cfg.nccl, name)
        if value is not None and value not in choices:
            yield Problem(
                f"nccl.{name}", value, f"must be one of {', '.join(choices)} or null", "Take one of these"
            )
    for name, example in (("socket_ifname", "ib0"), ("ib_hca", "mlx5_0,mlx5_1")):
        value = getattr(cfg.nccl, name)
        if value is not None and not _DEVICES.fullmatch(value):
            yield Problem(
                f"nccl.{name}",
                value,
                "must be names of devices, separated by commas",
                f"Write it like {example}",
            )


@reads("nccl")
def nccl_extra(cfg: Config) -> Iterator[Problem]:
    """Only NCCL's variables, none with a field of its own, none that loads code or names a file."""
    for name, value in cfg.nccl.extra.items():
        dotted = f"nccl.extra.{name}"
        if not _NCCL_NAME.fullmatch(name):
            rule, way_out = (
                "takes NCCL_* names only (capitals, digits, _)",
                f"Put other variables in cluster.env (+cluster.env.{name}=...)",
            )
        elif name in NCCL_FIELDS:
            field = NCCL_FIELDS[name]
            rule, way_out = f"{name} has a field of its own", f"Write nccl.{field}={value}"
        elif _REACHES_OUT.search(name) or "/" in value:
            rule = "no plugins, libraries, addresses or file paths: a configuration is data and may come from anyone"
            way_out = "Set that variable in your own environment"
        elif not value.strip():
            rule, way_out = "must not be empty", f"Leave it out (~{dotted}), or give a value"
        else:
            continue
        yield Problem(dotted, value, rule, way_out)


@reads("nccl")
def nccl_record(cfg: Config) -> Iterator[Problem]:
    """What NCCL is to be recorded with, it has to say: it needs its level INFO, and its subsystems INIT and ENV."""
    if not cfg.nccl.record:
        return
    if cfg.nccl.debug in ("VERSION", "WARN"):
        yield Problem(
            "nccl.debug",
            cfg.nccl.debug,
            "nccl.record=true records what NCCL says at INFO, and below that it says nothing",
            "Give nccl.debug=null, INFO or TRACE, or nccl.record=false",
        )
    value = cfg.nccl.extra.get("NCCL_DEBUG_SUBSYS", "").strip()
    named = {name.strip().upper() for name in value.removeprefix("^").split(",")}
    if value.startswith("^"):  # NCCL: all but these
        says = not named & {"INIT", "ENV", "ALL"}
    else:
        says = not value or "ALL" in named or named >= {"INIT", "ENV"}
    if not says:
        yield Problem(
            "nccl.extra.NCCL_DEBUG_SUBSYS",
            value,
            "nccl.record=true records what NCCL says in its subsystems INIT and ENV",
            "Add them, as in 'INIT,ENV,TUNING', or leave it out (~nccl.extra.NCCL_DEBUG_SUBSYS)",
        )


# ---------------------------------------------------------------------------------------------------------- environment

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OWNED = {
    "OMP_NUM_THREADS": "Use cluster.threads_per_rank",
    "CUDA_VISIBLE_DEVICES": "Use parallelism.gpus_per_node; the launcher deals the devices out",
}
_OURS = re.compile(
    r"(LOCAL_|GROUP_|ROLE_|NODE_)?RANK|(LOCAL_|GROUP_|ROLE_)?WORLD_SIZE|MASTER_(ADDR|PORT)"
    r"|(TORCHELASTIC|PET|SLURM|SBATCH|SRUN|PMI|PMIX|OMPI|SUBMITIT|EUROPA)_.*"
)
_INJECTS = re.compile(
    r"(LD|DYLD)_.*|PYTHON(?!HASHSEED$|FAULTHANDLER$|UNBUFFERED$|MALLOC$|OPTIMIZE$).*|PATH|BASH_ENV|ENV|IFS|SHELLOPTS"
    r"|CC|CXX|CUDA_INJECTION.*|.*_PRELOAD|.*PLUGIN.*|TORCHINDUCTOR_CACHE_DIR|TRITON_(CACHE_DIR|PTXAS_PATH)"
)


@reads("cluster.env")
def environment(cfg: Config) -> Iterator[Problem]:
    """Valid names; nothing that the launcher sets, that has a field, that loads code, or that is a secret."""
    for name, value in cfg.cluster.env.items():
        dotted = f"cluster.env.{name}"
        if not _NAME.fullmatch(name):
            rule, way_out = "is no name of a variable (letters, digits, _)", "Correct the name"
        elif is_secret_name(name) and not is_harmless(value):
            rule = "looks like a secret, and a configuration is recorded"
            way_out = "Set it in your own environment"
        elif name.startswith("NCCL_"):
            field = NCCL_FIELDS.get(name)
            rule, way_out = (
                "NCCL's settings live in nccl",
                f"Write nccl.{field}" if field else f"Write +nccl.extra.{name}",
            )
        elif name.startswith("WANDB_"):
            rule, way_out = "W&B's settings live in tracking", "Use tracking.*, or your own environment"
        elif name in _OWNED:
            rule, way_out = "the launcher sets it", _OWNED[name]
        elif _OURS.fullmatch(name):
            rule, way_out = "the launcher sets it for every rank", "Leave it out"
        elif _INJECTS.fullmatch(name):
            rule = "it can load other code into the ranks, and a configuration is data"
            way_out = "Set it in your own environment"
        else:
            continue
        yield Problem(dotted, value, rule, way_out)


# ------------------------------------------------------------------------------------------------------------------ W&B


@reads("tags")
def tags(cfg: Config) -> Iterator[Problem]:
    """What W&B takes as tags."""
    for i, tag in enumerate(cfg.tags):
        if not tag.strip():
            yield Problem(f"tags[{i}]", tag, "a tag must not be empty", "Leave it out")
        elif len(tag) > 64:
            yield Problem(
                f"tags[{i}]",
                tag,
                f"has {len(tag)} characters; W&B takes 1 to 64",
                f"Drop {len(tag) - 64} of them",
            )
        elif tag in cfg.tags[:i]:
            yield Problem(
                f"tags[{i}]", tag, f"stands at tags[{cfg.tags.index(tag)}] already", "Leave one of them out"
            )


_WANDB_LIMITS = {
    "tracking.project": 128,
    "tracking.entity": 128,
    "tracking.group": 128,
    "tracking.job_type": 64,
    "launch.sweep_name": 128,  # the group where tracking.group is null
}


@reads("tracking", "launch.sweep_name")
def wandb_names(cfg: Config) -> Iterator[Problem]:
    """Lengths and characters that W&B's server takes; offline, it would tell only at the upload."""
    for dotted, most in _WANDB_LIMITS.items():
        group, name = dotted.split(".")
        value = getattr(getattr(cfg, group), name)
        if value is None:
            continue
        if not value.strip():
            yield Problem(dotted, value, "must not be empty", f"Give {dotted}=<name>")
        elif len(value) > most:
            yield Problem(
                dotted,
                value,
                f"has {len(value)} characters; W&B takes {most}",
                f"Drop {len(value) - most} of them",
            )
        if name in ("project", "entity") and (found := sorted(set(value) & set("/\\#?%:"))):
            yield Problem(
                dotted, value, f"W&B takes no {' '.join(found)} here", "Use letters, digits, - and _"
            )


# -------------------------------------------------------------------------------------------------------------- folders


@reads("launch.runs_dir")
def runs_dir(cfg: Config) -> Iterator[Problem]:
    """Runs need a folder."""
    value = cfg.launch.runs_dir
    if not value.strip():
        yield Problem("launch.runs_dir", value, "must name a folder", "Give launch.runs_dir=runs")
    elif Path(value).exists() and not Path(value).is_dir():
        yield Problem("launch.runs_dir", value, "is a file, not a folder", "Give launch.runs_dir=<folder>")


BYTE_VOCABULARY = 259
"""Tokens of data.source=sample: 256 bytes and three marks (BOS, EOS, PAD)."""


@reads("data", "model.vocab_size")
def data(cfg: Config) -> Iterator[Problem]:
    """Each setting belongs to one source; text is there and its tokens have a row in the embedding."""
    d, vocab = cfg.data, cfg.model.vocab_size
    if d.source is not DataSource.sample and d.path is not None:
        yield Problem(
            "data.path", d.path, f"belongs to data=sample, not {d.source.name}", "Type data.path=null"
        )
    if d.source is not DataSource.synthetic and d.mean_document_length is not None:
        yield Problem(
            "data.mean_document_length",
            d.mean_document_length,
            f"belongs to data=synthetic, not {d.source.name}",
            "Type data.mean_document_length=null",
        )
    if d.source is not DataSource.sample:
        return
    if vocab < BYTE_VOCABULARY:
        yield Problem(
            "model.vocab_size",
            vocab,
            f"data=sample has {BYTE_VOCABULARY} tokens (256 bytes, BOS, EOS, PAD)",
            f"Take {BYTE_VOCABULARY} or more, or data=synthetic",
        )
    if d.path is not None and not (d.path.strip() and Path(d.path).is_dir()):
        there = (
            "is no folder"
            if d.path.strip() and Path(d.path).exists()
            else "there is no such folder on this machine"
        )
        yield Problem(
            "data.path",
            d.path,
            there,
            "Give data.path=<folder of text files here> (a record from another machine names that machine's folder), "
            "or null for Python's help texts",
        )


RULES = [
    ctas,
    nccl_texts,
    nccl_extra,
    nccl_record,
    environment,
    tags,
    wandb_names,
    runs_dir,
    data,
]
