"""What a run of a composition would meet on this machine, found out without running it: one finding a subject."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from europa_exp.config.schema import Cluster, Config, Executor, NumaBinding, TrackingMode

PACKAGES = ("torch", "torchtitan", "hydra-core", "omegaconf", "submitit", "wandb")
_TIMEOUT_S = 60.0


class Health(Enum):
    """``missing`` keeps a run from working; ``note`` is worth knowing."""

    ok = "ok"
    note = "note"
    missing = "missing"


@dataclass(frozen=True)
class Finding:
    """One subject and what was found."""

    health: Health
    subject: str
    text: str


def examine(conf: Path, overrides: Sequence[str]) -> Iterator[Finding]:
    """Look at everything that ``python launch.py OVERRIDES`` would need here, one after the other.

    ``conf`` is the folder of compositions. Raises ConfigError for overrides or personal settings that are not right.
    """
    from europa_exp.launch.compose import resolve
    from europa_exp.launch.overrides import normalize
    from europa_exp.launch.plugins import composer

    with composer(conf) as composing:
        mine = composing.personal()
        composition = composing.compose([normalize(text) for text in overrides])
        cfg = resolve(composition.cfg)
    option = composition.choices.get("cluster") or cfg.cluster.name
    yield personal_settings(option, {name: list(values) for name, values in mine.items()})
    yield from problems(cfg)
    yield from slurm(cfg.cluster)
    if cfg.cluster.modules:
        yield modules(cfg.cluster)
    yield runs_folder(Path(cfg.launch.runs_dir))
    if cfg.cluster.checkpoint_dir is not None:
        yield checkpoint_folder(Path(cfg.cluster.checkpoint_dir))
    yield from packages(cfg.cluster)
    yield tracking(cfg)
    yield code()


def personal_settings(cluster: str, found: dict[str, list[str]]) -> Finding:
    """Where the user's own file is, and what it says for this cluster."""
    from europa_exp.config import personal

    where, subject = personal.path(), "your settings"
    if where is None:
        return Finding(Health.note, subject, f"none: {personal.VARIABLE} is empty")
    if not where.is_file():
        return Finding(Health.note, subject, f"none; they would be in {where}")
    names = ", ".join(key.split(".")[-1] for key in found.get(cluster, []))
    others = f"; it has {', '.join(found)}" if found and not names else ""
    return Finding(Health.ok, subject, f"{where}: {names or f'nothing for {cluster}{others}'}")


def problems(cfg: Config) -> Iterator[Finding]:
    """What the checks before a submission have to say."""
    from europa_exp.config.checks import check

    found = check(cfg)
    for problem in found:
        yield Finding(Health.missing, "configuration", str(problem))
    if not found:
        yield Finding(Health.ok, "configuration", f"fine for cluster={cfg.cluster.name}")


def slurm(cluster: Cluster) -> Iterator[Finding]:
    """Slurm's commands, whether it answers, and what this shell would have leaked into a job."""
    from europa_exp.launch.environment import for_submission
    from europa_exp.launch.slurm import clean_environment

    if cluster.executor is not Executor.slurm:
        yield Finding(Health.ok, "Slurm", f"not used by cluster={cluster.name}")
        return
    needed = ("srun", "scontrol") if cluster.inside_allocation else ("sbatch", "srun", "squeue", "scontrol")
    for name in (*needed, "sacct"):
        where = shutil.which(name)
        if where:
            yield Finding(Health.ok, name, where)
        elif name in needed:
            yield Finding(Health.missing, name, "not on PATH; log in to a node where Slurm's commands are")
        else:
            yield Finding(Health.note, name, "not on PATH; how jobs ended is then read from the runs alone")
    if shutil.which("scontrol"):
        with clean_environment():
            answer = _run(["scontrol", "ping"], 20.0)
        up = answer is not None and " UP" in answer
        text = " ".join((answer or "no answer").split())[:200]
        yield Finding(Health.ok if up else Health.missing, "controller", text)
    if cluster.inside_allocation and "SLURM_JOB_ID" not in os.environ:
        yield Finding(Health.missing, "allocation", "this shell holds none; get one with salloc")
    kept = for_submission(dict(os.environ))
    if left_out := sorted(set(os.environ) - set(kept)):
        more = f" and {len(left_out) - 6} more" if len(left_out) > 6 else ""
        text = f"jobs don't get this shell's {', '.join(left_out[:6])}{more}"
        yield Finding(Health.note, "environment", text)
    if cluster.numa_binding is not NumaBinding.none and not shutil.which("numactl"):
        text = "not on PATH here; where nodes have none either, ranks run unbound and say so"
        yield Finding(Health.note, "numactl", text)


def modules(cluster: Cluster) -> Finding:
    """Whether the modules can be loaded in their order, in a shell of their own."""
    subject = "modules"
    script = ["type module >/dev/null 2>&1 || . /etc/profile", "type module >/dev/null 2>&1 || exit 90"]
    for i, name in enumerate(cluster.modules):
        script.append(f"module load {shlex.quote(name)} >/dev/null 2>&1 || exit {100 + min(i, 99)}")
    try:
        code = subprocess.run(
            ["bash", "-c", "\n".join(script)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_TIMEOUT_S,
        ).returncode
    except subprocess.TimeoutExpired:
        return Finding(Health.note, subject, f"not known: loading them took more than {_TIMEOUT_S:.0f} s")
    except OSError as error:
        return Finding(Health.note, subject, f"not known: {error}")
    if code == 0:
        return Finding(Health.ok, subject, ", ".join(cluster.modules))
    if code >= 100:
        name = cluster.modules[code - 100] if code < 199 else "one of them"
        return Finding(Health.missing, subject, f"{name} can't be loaded here; see cluster.modules")
    text = "there is no `module` here, so nothing is known of " + ", ".join(cluster.modules)
    return Finding(Health.missing if shutil.which("sbatch") else Health.note, subject, text)


def runs_folder(path: Path) -> Finding:
    """Whether run folders can be made; the folder itself is not made if it isn't there."""
    return _folder("runs folder", path)


def checkpoint_folder(path: Path) -> Finding:
    """Whether checkpoints can be written there, and for how many files and bytes there is room."""
    return _folder("checkpoint folder", path)


def _folder(subject: str, path: Path) -> Finding:
    place = path.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    where = f"{path.absolute()}" + ("" if place == path.absolute() else f" (to be made in {place})")
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        return Finding(Health.missing, subject, f"{where}: can't be written ({error.strerror})")
    free = shutil.disk_usage(place).free / 2**30
    inodes = os.statvfs(place).f_favail  # 0 where the file system counts none
    more = f" and {inodes:,} inodes" if inodes else ""
    return Finding(Health.ok, subject, f"{where}, {free:,.0f} GiB{more} free")


def packages(cluster: Cluster) -> Iterator[Finding]:
    """Versions of what the ranks need, without importing any of it."""
    texts, absent = [], []
    for name in PACKAGES:
        try:
            texts.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            absent.append(name)
    if texts:
        yield Finding(Health.ok, "packages", ", ".join(texts))
    if absent:
        yield Finding(Health.missing, "packages", f"{', '.join(absent)} not installed; see the README")
    if cluster.python:
        python = shlex.split(cluster.python)[0]
        there = shutil.which(python) is not None
        text = cluster.python if there else f"{python} is not here; the nodes may have it"
        yield Finding(Health.ok if there else Health.note, "python of the nodes", text)


def tracking(cfg: Config) -> Finding:
    """Where W&B writes, and whether it could reach its server."""
    mode, subject = cfg.tracking.mode, "W&B"
    if mode is not TrackingMode.online:
        after = "; upload afterwards" if mode is TrackingMode.offline else ""
        return Finding(Health.ok, subject, f"{mode.name}{after}")
    if os.environ.get("WANDB_API_KEY") or _in_netrc("api.wandb.ai"):
        return Finding(Health.ok, subject, "online, logged in")
    return Finding(Health.missing, subject, "online, but not logged in: wandb login, or tracking=offline")


def _in_netrc(host: str) -> bool:
    try:
        text = Path(os.environ.get("NETRC") or Path.home() / ".netrc").read_text(errors="replace")
    except (OSError, RuntimeError):
        return False
    return re.search(rf"machine\s+{re.escape(host)}\s", text) is not None


def code() -> Finding:
    """What the record will say of the code."""
    from europa_exp.runs.code import code_state

    state = code_state()
    if state.commit is None:
        return Finding(Health.note, "code", "; ".join(state.notes) or "no git commit")
    changed = ", with changes that the record keeps as a patch" if state.dirty else ""
    return Finding(Health.ok, "code", f"{state.commit[:12]} on {state.branch or 'no branch'}{changed}")


def _run(command: list[str], timeout_s: float) -> str | None:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout + done.stderr
