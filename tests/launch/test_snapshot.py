"""Frozen copies of the code: what is in them, what is not, and that edits don't reach them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from europa_exp.launch import snapshot


def git(root: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(["git", "-C", str(root), *identity, *arguments], check=True, capture_output=True)


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    write(root / "europa_exp" / "__init__.py", "")
    write(root / "europa_exp" / "part.py", "VALUE = 1\n")
    write(root / "conf" / "config.yaml", "a: 1\n")
    write(root / ".gitignore", "*.log\n")
    git(root, "init", "-q")
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "one")
    return root


def value(code: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", "import europa_exp.part as p; print(p.VALUE, p.__file__)"],
        env={**os.environ, "PYTHONPATH": str(code)},
        cwd="/",
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()[0]


def test_edits_do_not_reach_it(tree, tmp_path):
    write(tree / "europa_exp" / "part.py", "VALUE = 2\n")  # not committed
    code = snapshot.freeze(tree, tmp_path / "runs" / ".code")
    write(tree / "europa_exp" / "part.py", "VALUE = 3\n")
    assert (value(code), value(tree)) == ("2", "3")


def test_tracked_and_untracked_but_not_ignored(tree, tmp_path):
    write(tree / "europa_exp" / "new ünit.py", "X = 1\n")
    write(tree / "noise.log", "x")
    os.unlink(tree / "conf" / "config.yaml")
    os.symlink("part.py", tree / "europa_exp" / "alias.py")
    code = snapshot.freeze(tree, tmp_path / "runs" / ".code")
    found = {str(p.relative_to(code)) for p in code.rglob("*") if p.is_file() and p.suffix != ".pyc"}
    package = {"__init__.py", "part.py", "new ünit.py", "alias.py"}
    assert found == {".gitignore", ".snapshot", *(f"europa_exp/{n}" for n in package)}
    assert os.readlink(code / "europa_exp" / "alias.py") == "part.py"


def test_equal_code_is_shared_and_other_code_is_not(tree, tmp_path):
    to = tmp_path / "runs" / ".code"
    first, again = snapshot.freeze(tree, to), snapshot.freeze(tree, to)
    (tree / "europa_exp" / "part.py").chmod(0o755)
    other = snapshot.freeze(tree, to)
    assert first == again != other
    assert sorted(p.name for p in to.iterdir()) == sorted([first.name, other.name])


def test_it_is_read_only(tree, tmp_path):
    code = snapshot.freeze(tree, tmp_path / "runs" / ".code")
    assert all(not p.stat().st_mode & 0o222 for p in (code, *code.rglob("*")))


def test_bytecode_is_there_and_names_the_sources(tree, tmp_path):
    code = snapshot.freeze(tree, tmp_path / "runs" / ".code")
    assert len(list((code / "europa_exp" / "__pycache__").glob("*.pyc"))) == 2


def test_secrets_and_data_stay_out_and_are_told(tree, tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot, "MAX_UNTRACKED", 1000)
    write(tree / ".env", "HF_TOKEN=hf_" + "a1B2" * 10 + "\n")
    write(tree / "corpus.txt", "x" * 1001)
    taken = snapshot.take(tree, tmp_path / "runs" / ".code")
    assert not (taken.path / ".env").exists()
    assert not (taken.path / "corpus.txt").exists()
    told = "\n".join(taken.left_out)
    assert ".env: untracked, and holds what looks like a secret (Hugging Face token" in told
    assert "corpus.txt: untracked" in told
    assert "a1B2" not in told + (taken.path / snapshot.NOTES_FILE).read_text()


def test_runs_inside_the_tree_are_not_copied(tree):
    write(tree / "results" / "run" / "metrics.jsonl", "{}\n")
    first = snapshot.freeze(tree, tree / "results" / ".code")
    assert not (first / "results").exists()
    assert snapshot.freeze(tree, tree / "results" / ".code") == first


def test_a_link_out_of_the_tree_is_frozen_by_its_content(tree, tmp_path):
    elsewhere = write(tmp_path / "elsewhere.py", "VALUE = 5\n")
    os.symlink(elsewhere, tree / "europa_exp" / "far.py")
    os.symlink(tmp_path, tree / "far_folder")
    taken = snapshot.take(tree, tmp_path / "runs" / ".code")
    write(elsewhere, "VALUE = 6\n")
    assert (taken.path / "europa_exp" / "far.py").read_text() == "VALUE = 5\n"
    assert [entry.partition(":")[0] for entry in taken.left_out] == ["far_folder"]


def test_without_git(tree, tmp_path):
    import shutil

    shutil.rmtree(tree / ".git")
    write(tree / "data" / "large.txt", "x")
    code = snapshot.freeze(tree, tmp_path / "runs" / ".code")
    assert (code / "conf" / "config.yaml").is_file()
    assert not (code / "data").exists()
    assert value(code) == "1"


def test_what_can_not_be_written_leaves_nothing(tree, tmp_path):
    write(tmp_path / "runs", "a file in the way")
    with pytest.raises(snapshot.SnapshotError, match=r"launch\.snapshot=true: .* can't be frozen"):
        snapshot.freeze(tree, tmp_path / "runs" / ".code")


def test_a_tree_without_the_package(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(snapshot.SnapshotError, match="no package europa_exp"):
        snapshot.freeze(tmp_path / "empty", tmp_path / "runs" / ".code")
    assert not list((tmp_path / "runs" / ".code").iterdir())
