from __future__ import annotations

import os
import shutil
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from making import CODE, config, make_run

from europa_exp.config import io
from europa_exp.config.schema import Config
from europa_exp.runs import wandb_source
from europa_exp.runs.folder import RunFolder
from europa_exp.runs.tracking import FROZEN_FILE, open_tracker
from europa_exp.runs.wandb_log import payloads
from europa_exp.runs.wandb_source import WandbSourceError, is_wandb, recorded_config


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFolder, Config]:
    """A run that the real client tracked offline."""
    before = dict(os.environ)
    cfg = config(
        "tags=[a]",
        "+nccl.extra.NCCL_ALGO=Ring",
        "optimizer.lr=1e-05",
        "model=europa_1t",
        'tracking.notes="ä: #1"',
    )
    run = make_run(tmp_path_factory.mktemp("runs"), cfg, sweep="six")
    tracker = open_tracker(run, cfg)
    for step in range(300):
        tracker.log({"loss": 1.0 / (step + 1)}, step)
    tracker.finish(0)
    for name in set(os.environ) - set(before):
        del os.environ[name]
    return run, cfg


@pytest.fixture
def offline(tracked: tuple[RunFolder, Config], tmp_path: Path) -> Path:
    """A copy of the W&B folder of that run, as somebody may have sent it."""
    (source,) = tracked[0].path.glob("wandb/offline-run-*")
    return Path(shutil.copytree(source, tmp_path / "wandb" / source.name, symlinks=True))


def test_the_frozen_file_comes_back_exactly(tracked: tuple[RunFolder, Config], offline: Path) -> None:
    run, cfg = tracked
    (log,) = offline.glob("*.wandb")
    for place in (offline, offline.parent, log):
        assert is_wandb(str(place))
        found = recorded_config(str(place))
        assert found.yaml == run.config_text()
        assert io.from_yaml(found.yaml) == cfg
        assert found.provenance == run.provenance()
        assert FROZEN_FILE in found.source


def test_without_files_the_log_gives_the_same_configuration(
    tracked: tuple[RunFolder, Config], offline: Path
) -> None:
    run, cfg = tracked
    shutil.rmtree(offline / "files")
    found = recorded_config(str(offline))
    assert io.from_yaml(found.yaml) == cfg
    assert found.name == run.name
    assert found.provenance is not None
    assert found.provenance["identity"] == "0123456789ab"
    assert found.provenance["code"] == {"commit": CODE.commit, "dirty": True, "fingerprint": CODE.fingerprint}


def test_a_log_that_was_cut_still_gives_the_configuration(
    tracked: tuple[RunFolder, Config], offline: Path
) -> None:
    shutil.rmtree(offline / "files")
    (log,) = offline.glob("*.wandb")
    data = log.read_bytes()
    assert len(data) > 2 * 32768, "the log must have several blocks"
    for length in (len(data) - 3, 40_000, 32768 + 5):
        log.write_bytes(data[:length])
        assert io.from_yaml(recorded_config(str(offline)).yaml) == tracked[1]
    whole = list(payloads(data))
    assert list(payloads(data[:40_000])) == whole[: len(list(payloads(data[:40_000])))]
    damaged = bytearray(data)
    damaged[50_000] ^= 1
    kept = list(payloads(bytes(damaged)))
    assert 0 < len(kept) < len(whole)
    assert kept == whole[: len(kept)]


def test_w_and_bs_own_config_file_is_the_last_resort(
    tracked: tuple[RunFolder, Config], offline: Path
) -> None:
    _, cfg = tracked
    (log,) = offline.glob("*.wandb")
    log.write_bytes(log.read_bytes()[:7])
    shutil.rmtree(offline / "files")
    (offline / "files").mkdir()
    own = {key: {"value": value} for key, value in io.to_dict(cfg).items()} | {"_wandb": {"value": {"x": 1}}}
    (offline / "files" / "config.yaml").write_text(yaml.safe_dump(own))
    assert io.from_yaml(recorded_config(str(offline)).yaml) == cfg
    (offline / "files" / "config.yaml").unlink()
    with pytest.raises(WandbSourceError, match="holds no configuration"):
        recorded_config(str(offline))


def test_several_runs_in_a_folder_must_be_told_apart(offline: Path) -> None:
    shutil.copytree(offline, offline.parent / "offline-run-2", symlinks=True)
    with pytest.raises(WandbSourceError, match="holds 2 runs"):
        recorded_config(str(offline.parent))


def test_what_is_no_run_is_said(tmp_path: Path) -> None:
    (tmp_path / "x.wandb").write_bytes(b"something else")
    for text, why in {
        str(tmp_path / "absent" / "a" / "b" / "c"): "is no W&B run",
        "nothing": "is no W&B run",
        "a/b": "is no W&B run",
        str(tmp_path / "x.wandb"): "can't be read",
    }.items():
        with pytest.raises(WandbSourceError, match=why):
            recorded_config(text)
    (tmp_path / "empty").mkdir()
    with pytest.raises(WandbSourceError, match=r"no \.wandb file"):
        recorded_config(str(tmp_path / "empty"))


def test_what_looks_like_w_and_b(tmp_path: Path) -> None:
    assert is_wandb("team/europa_exp/debug-0123456789ab-1a2b")
    assert is_wandb("https://wandb.ai/team/europa_exp/runs/debug-1?nw=1")
    assert not is_wandb("debug-0123456789ab")
    assert not is_wandb("runs/debug-0123456789ab")
    assert not is_wandb(str(make_run(tmp_path).path))


def test_no_configuration_can_run_code(offline: Path) -> None:
    (offline / "files" / FROZEN_FILE).write_text("model: !!python/object/apply:os.system ['touch pwned']\n")
    text = recorded_config(str(offline)).yaml
    with pytest.raises(Exception, match="python/object"):
        io.from_yaml(text)
    shutil.rmtree(offline / "files")
    assert "!!" not in recorded_config(str(offline)).yaml


class _File:
    def __init__(self, text: str) -> None:
        self.text, self.size = text, len(text)

    def download(self, root: str, replace: bool) -> Any:
        name = FROZEN_FILE if self.text.startswith("model") else "provenance.json"
        Path(root, name).write_text(self.text)
        return open(Path(root, name))


def _server(monkeypatch: pytest.MonkeyPatch, run: Any, logged_in: bool = True) -> None:
    """In place of the wandb package: its server can't be had in a test, the answers here have its shapes."""
    api = SimpleNamespace(run=run)
    fake = SimpleNamespace(login=lambda **_: logged_in, Api=lambda **_: api)
    monkeypatch.setitem(sys.modules, "wandb", fake)  # type: ignore[arg-type]


def test_a_run_on_the_server_gives_its_file_or_its_config(
    tracked: tuple[RunFolder, Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, cfg = tracked
    files = {FROZEN_FILE: run.config_text(), "provenance.json": '{"host": "there"}'}

    def get(name: str) -> _File:
        if name not in files:
            raise ValueError("no such file")
        return _File(files[name])

    answer = SimpleNamespace(
        config={**io.to_dict(cfg), "_wandb": {}, "provenance": {"identity": "1"}}, name="n", file=get
    )
    asked: list[str] = []
    _server(monkeypatch, lambda path: asked.append(path) or answer)
    found = recorded_config("https://wandb.ai/team/project/runs/abc")
    assert asked == ["team/project/abc"]
    assert (found.yaml, found.provenance, found.name) == (run.config_text(), {"host": "there"}, "n")
    files.clear()
    found = recorded_config("team/project/abc")
    assert io.from_yaml(found.yaml) == cfg
    assert found.provenance is not None
    assert found.provenance["identity"] == "1"


def test_a_server_that_can_not_be_asked_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(path: str) -> None:
        raise ConnectionError("no route to host\nwith a long trace")

    _server(monkeypatch, fails)
    with pytest.raises(
        WandbSourceError, match="team/project/abc: no route to host; check the path and the network"
    ):
        recorded_config("team/project/abc")
    _server(monkeypatch, fails, logged_in=False)
    with pytest.raises(WandbSourceError, match="nobody is logged in"):
        recorded_config("team/project/abc")
    monkeypatch.setattr(wandb_source, "TIMEOUT_S", 0.05)
    release = threading.Event()
    _server(monkeypatch, lambda path: release.wait(60))
    with pytest.raises(WandbSourceError, match="no answer within"):
        recorded_config("team/project/abc")
    release.set()
