"""A run that Slurm started twice, tracked offline, is one run on the W&B server."""

from __future__ import annotations

import json

import pytest
from clusters import until
from submitting import config, europa, evidence, logged, submit, wait_for_state
from wandb_server import WandbServer

from europa_exp.runs.attempts import attempts_of
from europa_exp.runs.folder import RunFolder
from europa_exp.runs.sync import offline_folders
from europa_exp.runs.tracking import STEP_KEY

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(400)]

TRAINING = ("training.steps=20", "training.checkpoint_every=4", "training.checkpoint_keep=2")


@pytest.fixture
def server():
    found = WandbServer()
    yield found
    found.close()


def test_the_attempts_of_a_requeued_and_of_a_killed_run(slurm, server, tmp_path):
    """The ranks of both die in the middle of their first attempt; one of them was sent before, as far as it was."""
    runs = tmp_path / "runs"

    def begin(name: str, node: int) -> RunFolder:
        where = f"cluster.nodelist=127.0.0.{node}"
        cfg = config(1, 2, *TRAINING, where, "launch.detach=true", "tracking.mode=offline")
        code, out = submit(slurm, runs / name, "slurm_targets:slow_then_fast", [cfg])
        assert code == 0, out
        return RunFolder(runs / name / "run0")

    def sync(name: str) -> str:
        login = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": "0123456789" * 4}
        mine = {"NETRC": str(tmp_path / "none"), "WANDB_CONFIG_DIR": str(tmp_path / "wandb-config")}
        done = europa(slurm, runs / name, "sync", "--runs-dir", ".", **login, **mine)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    requeued, killed = begin("requeued", 1), begin("killed", 2)
    for run in (requeued, killed):
        until(lambda run=run: len(run.metrics()) >= 6, 120, lambda run=run: evidence(run.path.parent))
    assert "1 run sent" in sync("requeued")
    assert [row[STEP_KEY] for row in of(server, requeued).rows][:6] == [1, 2, 3, 4, 5, 6]
    slurm.run("scontrol", "requeue", requeued.status().extra["job_id"])
    slurm.script("down", "127.0.0.2")
    slurm.script("up", "127.0.0.2")
    for run in (requeued, killed):
        assert wait_for_state(run.path, "completed", "failed", "cancelled") == "completed", evidence(
            run.path.parent
        )
        assert len(attempts_of(run.status())) == 2
        assert len(offline_folders(run)) == 2, "an offline run of the client for each attempt"

    for name, run in (("requeued", requeued), ("killed", killed)):
        sync(name)
        found = of(server, run)
        rows = logged(run.path)
        assert [number for number, _ in found.history] == list(range(len(rows))), "each row, once, in order"
        assert [row["_step"] for row in found.rows] == list(range(len(rows)))
        assert [row[STEP_KEY] for row in found.rows] == [row["step"] for row in rows]
        assert [row["loss/global_avg"] for row in found.rows] == [row["loss/global_avg"] for row in rows]
        assert sorted({row[STEP_KEY] for row in found.rows}) == list(range(1, 21)), "one axis, without a gap"
        # As a rule more: steps between the checkpoint and the end of the first attempt run twice.
        assert len(rows) >= 20
        assert found.summary[STEP_KEY] == 20
        assert found.ends[-1] == (0, False)
        assert "1 up to date" in sync(name)
        assert len(of(server, run).history) == len(rows)
    assert len(server.runs) == 2


def of(server: WandbServer, run: RunFolder):
    """What the server has of a run; both are called run0, so the id tells them apart."""
    uid = json.loads((run.path / "provenance.json").read_text())["uid"]
    [found] = [stored for name, stored in server.runs.items() if uid in name]
    return found
