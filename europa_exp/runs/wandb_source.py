"""The frozen configuration of a run that is known to W&B only: ``entity/project/id``, or the folder of an offline run.

What comes back is text and plain data. Nothing in it is imported or executed; whoever uses it reads it with ``config.io``.
"""

from __future__ import annotations

import json
import re
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml

from europa_exp.config.secrets import redact
from europa_exp.runs.folder import PROVENANCE_FILE
from europa_exp.runs.tracking import CONFIG_KEY, FROZEN_FILE
from europa_exp.runs.wandb_log import records

T = TypeVar("T")

TIMEOUT_S = 60.0
"""The longest that a question to the W&B server may take."""

_PATH = re.compile(
    r"(?:https?://[^/\s]+/)?(?P<entity>[\w.-]+)/(?P<project>[\w.-]+)/(?:runs/)?(?P<id>[\w.-]+)(?:\?.*)?"
)
_MAX_BYTES = 4 << 20


class WandbSourceError(Exception):
    """The recorded configuration can't be had; the message says what was asked, why not, and a way out."""


@dataclass(frozen=True)
class RecordedConfig:
    """A recorded configuration as YAML text (``config.io.from_yaml`` reads it), where it came from, and its provenance.

    ``provenance`` is the run's ``provenance.json`` where that was uploaded, else what W&B's config tells of it (identity,
    commit), else None. ``name`` is the run's name, if W&B knew it.
    """

    yaml: str
    source: str
    provenance: dict[str, Any] | None = None
    name: str | None = None


def is_wandb(text: str) -> bool:
    """True if ``text`` can only be meant for ``recorded_config``: an offline W&B folder, a ``.wandb`` file, ``entity/project/id``."""
    path = Path(text)
    if path.exists():
        return path.suffix == ".wandb" or _run_folder(path) is not None
    return _PATH.fullmatch(text) is not None


def recorded_config(text: str) -> RecordedConfig:
    """The configuration recorded under ``text``.

    Args:
        text: ``entity/project/id`` (or the run's address) for the W&B server; or a folder: ``offline-run-*``, ``run-*``, a
            ``wandb`` folder with exactly one of them, or a ``.wandb`` file.

    Raises:
        WandbSourceError: there is no such run, the server can't be reached, or no configuration was recorded.
    """
    path = Path(text).expanduser()
    if path.exists():
        return _from_folder(path)
    match = _PATH.fullmatch(text)
    if match is None:
        raise WandbSourceError(
            f"{text!r} is no W&B run: give entity/project/id, or the folder of an offline run (wandb/offline-run-...)"
        )
    return _from_server("{entity}/{project}/{id}".format(**match.groupdict()))


# ------------------------------------------------------------------------------------------------------- folder


def _run_folder(path: Path) -> Path | None:
    """The folder of one W&B run at ``path``: itself, or the only one in it."""
    if not path.is_dir():
        return None
    if any(path.glob("*.wandb")):
        return path
    inside = sorted(
        {entry.resolve() for pattern in ("offline-run-*", "run-*") for entry in path.glob(pattern)}
    )
    return inside[0] if len(inside) == 1 and any(inside[0].glob("*.wandb")) else None


def _from_folder(path: Path) -> RecordedConfig:
    folder = path.parent if path.is_file() and path.suffix == ".wandb" else _run_folder(path)
    if folder is None:
        count = len([*path.glob("offline-run-*"), *path.glob("run-*")]) if path.is_dir() else 0
        why = f"it holds {count} runs, give one of them" if count > 1 else "it holds no .wandb file"
        raise WandbSourceError(f"{path} is no W&B run: {why}")
    files = folder / "files"
    provenance = _json(_read(files / PROVENANCE_FILE))
    if (text := _read(files / FROZEN_FILE)) is not None:
        return RecordedConfig(
            text, f"{folder.name}/files/{FROZEN_FILE}", provenance, (provenance or {}).get("name")
        )
    config, name = _from_log(path if path.is_file() else min(folder.glob("*.wandb")))
    provenance = provenance or _about(config)
    if config:
        return RecordedConfig(_to_yaml(config), f"W&B's record in {folder.name}", provenance, name)
    old = _saved_config(_read(files / "config.yaml"))
    if old:
        return RecordedConfig(
            _to_yaml(old), f"{folder.name}/files/config.yaml", provenance or _about(old), name
        )
    raise WandbSourceError(
        f"{folder} holds no configuration: neither {FROZEN_FILE} nor W&B's own record has one"
    )


def _from_log(path: Path) -> tuple[dict[str, Any], str | None]:
    """Config and name of the run in a ``.wandb`` file, as far as it can be read: the file of a killed run is cut."""
    config: dict[str, Any] = {}
    name = None
    try:
        for record in records(path):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                name = record.run.display_name or name
                _apply(config, record.run.config)
            elif kind == "config":
                _apply(config, record.config)
    except ImportError as error:
        raise WandbSourceError(f"{path} can't be read without the wandb package: {error}") from error
    except (OSError, ValueError) as error:
        raise WandbSourceError(f"{path} can't be read: {error}") from error
    return config, name


def _apply(config: dict[str, Any], change: Any) -> None:
    for item in change.update:
        keys = list(item.nested_key) or [item.key]
        place = config
        for key in keys[:-1]:
            nested = place.setdefault(key, {})
            if not isinstance(nested, dict):
                nested = place[key] = {}
            place = nested
        place[keys[-1]] = json.loads(item.value_json)
    for item in change.remove:
        config.pop(item.key, None)


# ------------------------------------------------------------------------------------------------------- server


def _from_server(path: str) -> RecordedConfig:
    try:
        import wandb
    except ImportError as error:
        raise WandbSourceError(f"W&B run {path}: the wandb package is not installed ({error})") from error
    way_out = (
        "check the path and the network (on a compute node use the run's folder), and that you are logged in"
    )
    try:
        return _bounded(lambda: _ask(wandb, path))
    except WandbSourceError:
        raise
    except TimeoutError:
        raise WandbSourceError(f"W&B run {path}: no answer within {TIMEOUT_S:.0f} s; {way_out}") from None
    except Exception as error:
        lines = str(error).strip().splitlines()
        why = redact(lines[0][:300])[0] if lines else type(error).__name__
        raise WandbSourceError(f"W&B run {path}: {why}; {way_out}") from error


def _ask(wandb: Any, path: str) -> RecordedConfig:
    if not wandb.login(prompt=False, verify=False):
        raise WandbSourceError(f"W&B run {path}: nobody is logged in; run `wandb login` or set WANDB_API_KEY")
    run = wandb.Api(timeout=15).run(path)
    config = {key: value for key, value in dict(run.config).items() if not key.startswith("_")}
    provenance = _json(_fetch(run, PROVENANCE_FILE)) or _about(config)
    if (text := _fetch(run, FROZEN_FILE)) is not None:
        return RecordedConfig(text, f"{path}, file {FROZEN_FILE}", provenance, run.name)
    if not config:
        raise WandbSourceError(f"W&B run {path} has no configuration")
    return RecordedConfig(_to_yaml(config), f"{path}, W&B's config", provenance, run.name)


def _fetch(run: Any, name: str) -> str | None:
    """One small file of a run on the server; None if it has no such file."""
    try:
        file = run.file(name)
        if not file.size or file.size > _MAX_BYTES:
            return None
        with tempfile.TemporaryDirectory(prefix="wandb-") as place:
            file.download(root=place, replace=True).close()
            return _read(Path(place) / name)
    except Exception:
        # The client raises many kinds for "no such file"; W&B's own config is there in any case.
        return None


def _bounded(ask: Callable[[], T]) -> T:
    """Ask in a thread and wait ``TIMEOUT_S``: the client's own retries take many minutes without a network."""
    answer: list[T] = []
    problem: list[Exception] = []

    def work() -> None:
        try:
            answer.append(ask())
        except Exception as error:
            problem.append(error)

    thread = threading.Thread(target=work, name="wandb-api", daemon=True)
    thread.start()
    thread.join(TIMEOUT_S)
    if problem:
        raise problem[0]
    if not answer:
        raise TimeoutError
    return answer[0]


# ------------------------------------------------------------------------------------------------------- inside


def _to_yaml(config: Mapping[str, Any]) -> str:
    """The groups of a W&B config as YAML: without W&B's own keys and without what we added about the run."""
    ours = {key: value for key, value in config.items() if not key.startswith("_") and key != CONFIG_KEY}
    return yaml.safe_dump(ours, sort_keys=False, allow_unicode=True, width=10**6)


def _about(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """What the W&B config says about the run, in the shape of ``provenance.json``."""
    about = config.get(CONFIG_KEY)
    if not isinstance(about, Mapping):
        return None
    code = {"commit": about.get("commit"), "dirty": about.get("dirty"), "fingerprint": about.get("code")}
    return {**{k: v for k, v in about.items() if k not in ("commit", "dirty", "code")}, "code": code}


def _saved_config(text: str | None) -> dict[str, Any]:
    """W&B's own ``config.yaml``: every key holds ``{value: ...}``."""
    try:
        found = yaml.safe_load(text) if text else None
    except yaml.YAMLError:
        return {}
    if not isinstance(found, dict):
        return {}
    return {
        k: v["value"]
        for k, v in found.items()
        if isinstance(v, dict) and "value" in v and not str(k).startswith("_")
    }


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8") if path.stat().st_size <= _MAX_BYTES else None
    except (OSError, ValueError):
        return None


def _json(text: str | None) -> dict[str, Any] | None:
    try:
        found = json.loads(text) if text else None
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
