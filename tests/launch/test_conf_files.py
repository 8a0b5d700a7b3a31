"""A boolean field in a file under conf/ holds true or false; what else OmegaConf would take is refused, with the file."""

from __future__ import annotations

from pathlib import Path

import pytest
from composing import call, copied_root

from europa_exp.launch.conf_files import ConfSource


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return copied_root(tmp_path)


def append(file: Path, text: str) -> Path:
    file.write_text(file.read_text(encoding="utf-8") + text, encoding="utf-8")
    return file


@pytest.mark.parametrize("value", ["1", "0", "7", "0.5", "'yes'", "'1'", "'banana'", "null", "[1]"])
def test_what_is_no_boolean_is_refused_with_file_field_value_and_way_out(root: Path, value: str) -> None:
    file = root / "conf/offload/none.yaml"
    file.write_text(f"fsdp_cpu: {value}\n")
    for arguments in (["launch.preview=true"], ["--cfg", "job"], ["-m", "training.steps=1,2"]):
        result = call(*arguments, root=root)
        assert result.code == 2, (arguments, result.out)
        assert result.err == (
            f"1 problem in the configuration:\n  - offload.fsdp_cpu={value}: must be true or false, in {file}. "
            "Write fsdp_cpu: true or fsdp_cpu: false there.\n"
        )


@pytest.mark.parametrize("value", ["true", "False", "yes", "off", "${training.deterministic}"])
def test_yaml_booleans_and_interpolations_are_fine(root: Path, value: str) -> None:
    (root / "conf/offload/none.yaml").write_text(f"fsdp_cpu: {value}\n")
    assert call("launch.preview=true", root=root).code == 0


def test_all_of_a_file_is_told_at_once_whatever_its_package(root: Path) -> None:
    append(
        root / "conf/experiment/ladder/08_fp8_gather.yaml",
        "\noffload: {fsdp_cpu: 2}\ncluster: {requeue: 1, env: {A: '1'}}\n",
    )
    # A parent of the chosen experiment is read too, one that nobody chose is not.
    result = call("experiment=ladder/10_node_local_reshard", "launch.preview=true", root=root)
    assert result.code == 2
    assert "2 problems" in result.err
    for words in ("offload.fsdp_cpu=2", "cluster.requeue=1", "ladder/08_fp8_gather.yaml"):
        assert words in result.err
    assert call("launch.preview=true", root=root).code == 0
    append(root / "conf/config.yaml", "\nprofiling: {collectives: 3}\n")
    assert "profiling.collectives=3: must be true or false, in " in call("--cfg", "job", root=root).err


def test_a_points_own_option_is_refused_with_the_point(root: Path) -> None:
    (root / "conf/offload/other.yaml").write_text("fsdp_cpu: 1\n")
    result = call("-m", "offload=none,other", "training.steps=1,2", root=root)
    assert result.code == 2
    assert result.err.count("must be true or false") == 1
    assert "conf/offload/other.yaml" in result.err
    assert "offload=other" in result.err


@pytest.mark.parametrize(
    ("header", "content"),
    [
        ("", "fsdp_cpu: 1"),
        ("# @package _group_\n", "fsdp_cpu: 1"),
        ("# @package offload\n", "fsdp_cpu: 1"),
        ("# @package _global_\n", "offload: {fsdp_cpu: 1}"),
        ("# @package comm\n", "node_local_reshard: 1"),
    ],
)
def test_the_field_is_found_from_the_package(tmp_path: Path, header: str, content: str) -> None:
    (tmp_path / "offload").mkdir()
    (tmp_path / "offload" / "a.yaml").write_text(f"{header}{content}\n")
    source = ConfSource("main", str(tmp_path))
    field = "comm.node_local_reshard" if "comm" in header else "offload.fsdp_cpu"
    with pytest.raises(Exception, match=rf"{field}=1: must be true or false, in {tmp_path}/offload/a\.yaml"):
        source.load_config("offload/a")
