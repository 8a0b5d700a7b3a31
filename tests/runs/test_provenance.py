from __future__ import annotations

import copy
import importlib.metadata
import json
import subprocess
import sys

import pytest

from europa_exp.runs.provenance import CodeState, differences, environment, packages, record

CODE = CodeState(commit="1" * 40, fingerprint="f1", branch="main", dirty=False)


def test_the_record_is_json_and_complete() -> None:
    found = record(CODE, command=["launch.py", "-m"], overrides=["comm=fp8"], extra={"identity": "abc"})
    assert json.loads(json.dumps(found)) == found
    assert found["identity"] == "abc"
    assert found["code"]["commit"] == "1" * 40
    assert found["python"].count(".") == 2
    assert found["packages"]["torch"] == importlib.metadata.version("torch")
    assert found["redacted"] == []
    for key in ("host", "platform", "folder", "environment", "created_at", "command", "overrides"):
        assert found[key] is not None


def test_packages_agree_with_what_is_installed() -> None:
    found = packages()
    for name in ("torchtitan", "hydra-core", "omegaconf", "PyYAML", "wandb", "typing_extensions"):
        assert found[name.lower().replace("_", "-")] == importlib.metadata.version(name)


def test_the_environment_is_an_allow_list_without_secrets() -> None:
    found = environment(
        {
            "NCCL_MAX_CTAS": "16",
            "NCCL_SECRET_TOKEN": "x",
            "OMP_NUM_THREADS": "1",
            "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
            "SLURM_JOB_ID": "17",
            "WANDB_API_KEY": "x",
            "HF_TOKEN": "x",
            "HOME": "/home/x",
            "SSH_AUTH_SOCK": "x",
            "LD_PRELOAD": "https://me:s3cret@host/lib.so",
        }
    )
    assert found == {
        "LD_PRELOAD": "https://me:[redacted: password in a URL]@host/lib.so",
        "NCCL_MAX_CTAS": "16",
        "OMP_NUM_THREADS": "1",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "SLURM_JOB_ID": "17",
    }


def test_nothing_differs_from_itself() -> None:
    found = record(CODE, command=[], overrides=[], extra={"data_fingerprint": "d", "cluster": "local"})
    assert (
        differences(
            found,
            record(
                CODE,
                command=["other"],
                overrides=["x=1"],
                extra={"data_fingerprint": "d", "cluster": "local"},
            ),
        )
        == []
    )


def test_differences_come_with_old_and_new_and_what_matters_first() -> None:
    new = record(CODE, command=[], overrides=[], extra={"data_fingerprint": "d1", "cluster": "local"})
    old = copy.deepcopy(new)
    old["code"] |= {"commit": "2" * 40, "fingerprint": "f0", "dirty": True}
    old["host"], old["cluster"], old["data_fingerprint"] = "elsewhere", "jupiter", "d0"
    old["packages"] |= {"torch": "2.0.0", "aaa": "1"}
    del old["packages"]["torchtitan"]
    lines = differences(old, new)
    assert lines == [
        "code: 222222222222 with uncommitted changes -> 111111111111",
        "data: d0 -> d1",
        f"torch: 2.0.0 -> {new['packages']['torch']}",
        f"torchtitan: absent -> {new['packages']['torchtitan']}",
        "aaa: 1 -> absent",
        "cluster: jupiter -> local",
        f"host: elsewhere -> {new['host']}",
    ]


def test_the_same_commit_with_other_changes_differs() -> None:
    old = {"code": {"commit": "1" * 40, "fingerprint": "f0", "dirty": True}}
    new = {"code": {"commit": "1" * 40, "fingerprint": "f1", "dirty": True}}
    assert "the uncommitted changes differ" in differences(old, new)[0]
    assert "not recorded" in differences({"code": {"commit": "1" * 40}}, new)[0]


def test_what_was_not_recorded_is_said() -> None:
    lines = differences({}, record(CODE, command=[], overrides=[], extra={}))
    assert lines[0] == "code: not recorded -> 111111111111"
    assert "packages: not recorded" in lines
    assert any(line.startswith("python: not recorded") for line in lines)
    assert any(line.startswith("host: not recorded") for line in lines)


def test_many_changed_packages_are_counted() -> None:
    lines = differences(
        {"packages": {f"p{n}": "1" for n in range(40)}}, {"packages": {f"p{n}": "2" for n in range(40)}}
    )
    assert len([line for line in lines if line.startswith("p")]) == 13
    assert "packages: 28 more differ" in lines


@pytest.mark.parametrize("broken", [{"code": None, "packages": None}, {"code": "x", "packages": [1]}])
def test_a_broken_record_is_no_error(broken: dict[str, object]) -> None:
    assert differences(broken, record(CODE, command=[], overrides=[], extra={}))


def test_the_login_node_loads_neither_torch_nor_wandb() -> None:
    script = (
        "import sys, europa_exp.runs.folder, europa_exp.runs.skip, europa_exp.runs.tracking, europa_exp.runs.wandb_source;"
        "print([m for m in ('torch', 'torchtitan', 'wandb', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
