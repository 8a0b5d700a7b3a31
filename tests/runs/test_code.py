from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from europa_exp.runs import code
from europa_exp.runs.code import code_state


def git(where: Path, *args: str) -> str:
    return subprocess.run(["git", "-C", str(where), *args], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    root = tmp_path / "repo"
    (root / "pkg").mkdir(parents=True)
    (root / "pkg" / "__init__.py").write_text("A = 1\n")
    (root / "pkg" / "old.py").write_text("B = 1\n")
    (root / ".gitignore").write_text("runs/\n")
    git(root, "init", "-q", "-b", "trunk")
    git(root, "config", "user.name", "x")
    git(root, "config", "user.email", "x@y")
    git(root, "add", ".")
    git(root, "commit", "-qm", "first")
    return root


def state(root: Path) -> code.CodeState:
    return code_state(root / "pkg")


def test_a_clean_checkout_is_its_commit(repo: Path) -> None:
    found = state(repo)
    assert found.commit == git(repo, "rev-parse", "HEAD").strip()
    assert (found.branch, found.dirty, found.diff, found.notes) == ("trunk", False, "", [])
    assert found.root == str(repo)
    assert state(repo) == found


def test_the_patch_brings_a_clean_checkout_to_this_state(repo: Path, tmp_path: Path) -> None:
    (repo / "pkg" / "__init__.py").write_text("A = 2\n")
    git(repo, "rm", "-q", "pkg/old.py")
    (repo / "pkg" / "new ö.py").write_text("C = 1\n")
    (repo / "staged.py").write_text("D = 1\n")
    git(repo, "add", "staged.py")
    (repo / "pkg" / "empty.py").write_text("")
    (repo / "runs").mkdir()
    (repo / "runs" / "ignored.txt").write_text("x\n")
    before = git(repo, "status", "--porcelain")
    found = state(repo)
    assert found.dirty
    assert git(repo, "status", "--porcelain") == before
    assert "ignored" not in found.diff
    git(tmp_path, "clone", "-q", str(repo), "copy")
    (tmp_path / "p.diff").write_text(found.diff)
    git(tmp_path / "copy", "apply", str(tmp_path / "p.diff"))
    copy = tmp_path / "copy"
    assert (copy / "pkg" / "__init__.py").read_text() == "A = 2\n"
    assert not (copy / "pkg" / "old.py").exists()
    assert (copy / "pkg" / "new ö.py").read_text() == "C = 1\n"
    assert (copy / "staged.py").read_text() == "D = 1\n"
    assert (copy / "pkg" / "empty.py").read_text() == ""
    assert state(copy).fingerprint == found.fingerprint


def test_the_fingerprint_follows_every_kind_of_change(repo: Path) -> None:
    seen = [state(repo).fingerprint]

    def changed() -> None:
        seen.append(state(repo).fingerprint)
        assert len(set(seen)) == len(seen)

    (repo / "pkg" / "__init__.py").write_text("A = 2\n")
    changed()
    (repo / "new.py").write_text("1\n")
    changed()
    (repo / "new.py").write_text("2\n")
    changed()
    (repo / "data.bin").write_bytes(b"\0\1\2")
    changed()
    (repo / "data.bin").write_bytes(b"\0\1\3")
    changed()
    (repo / "large.bin").write_bytes(b"\0" * (code.MAX_FILE + 1))
    changed()
    (repo / "large.bin").write_bytes(b"\0" * code.MAX_FILE + b"\1")
    changed()
    git(repo, "commit", "-qam", "second")
    changed()


def test_a_secret_is_in_the_fingerprint_and_not_in_the_patch(repo: Path) -> None:
    secret = "ghp_" + "aB3dE" * 8
    (repo / "notes.txt").write_text(f"a\n{secret}\n")
    first = state(repo)
    assert secret not in first.diff
    assert first.redacted == ["GitHub token in line 8"]
    assert first.diff.splitlines()[7] == "+[redacted: GitHub token]"
    (repo / "notes.txt").write_text(f"a\n{secret[:-1]}X\n")
    assert state(repo).fingerprint != first.fingerprint


def test_what_is_large_or_binary_is_noted_with_its_hash(repo: Path) -> None:
    (repo / "small.bin").write_bytes(b"\0\1")
    (repo / "large.txt").write_text("x\n" * code.MAX_FILE)
    (repo / "pkg" / "old.py").write_text("y = 1\n" * (code.MAX_FILE // 5))
    found = state(repo)
    blob = git(repo, "hash-object", "small.bin").strip()
    assert any("small.bin is binary" in note and blob in note for note in found.notes)
    assert any("large.txt" in note and "sha256" in note for note in found.notes)
    assert any("pkg/old.py" in note and "not in the patch" in note for note in found.notes)
    assert len(found.diff) < 1000


def test_no_part_of_a_patch_beyond_the_whole_size_is_kept(
    repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code, "MAX_PATCH", 1000)
    for number in range(20):
        (repo / f"f{number:02}.py").write_text("x = 1\n" * 10)
    found = state(repo)
    assert 0 < len(found.diff) <= 1000
    assert found.diff.startswith("diff --git a/f00.py")
    assert any("f19.py" in note for note in found.notes)


def test_personal_git_settings_change_nothing(repo: Path) -> None:
    (repo / "pkg" / "__init__.py").write_text("A = 2\n")
    before = state(repo)
    for name, value in {
        "diff.noprefix": "true",
        "diff.mnemonicPrefix": "true",
        "color.ui": "always",
        "diff.context": "9",
        "diff.algorithm": "patience",
        "diff.renames": "copies",
        "core.quotePath": "false",
        "status.showUntrackedFiles": "no",
        "diff.external": "false",
    }.items():
        git(repo, "config", name, value)
    assert state(repo) == before


def test_variables_of_a_git_hook_do_not_lead_elsewhere(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = state(repo)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / "index"))
    assert state(repo) == expected


def test_a_linked_worktree_is_a_checkout_too(repo: Path, tmp_path: Path) -> None:
    git(repo, "worktree", "add", "-q", str(tmp_path / "tree"), "-b", "side")
    (tmp_path / "tree" / "new.py").write_text("1\n")
    found = state(tmp_path / "tree")
    assert found.branch == "side"
    assert "new.py" in found.diff


def test_without_git_the_files_make_the_fingerprint(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    first = state(repo)
    assert first.commit is None
    assert first.notes == ["no git commit: git is not installed"]
    assert state(repo) == first
    (repo / "pkg" / "__init__.py").write_text("A = 3\n")
    assert state(repo).fingerprint != first.fingerprint


def test_outside_a_checkout_and_before_the_first_commit_there_is_no_commit(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text("")
    env_note = state(tmp_path).notes[0]
    assert "not a git repository" in env_note
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    assert "no commit yet" in state(tmp_path).notes[0]


def test_an_installed_package_is_not_the_code_of_the_checkout_around_it(repo: Path) -> None:
    place = repo / "runs" / "site-packages" / "pkg"
    place.mkdir(parents=True)
    (place / "__init__.py").write_text("")
    found = code_state(place)
    assert found.commit is None
    assert "not tracked" in found.notes[0]


def test_names_that_are_no_utf8_do_not_stop_it(repo: Path) -> None:
    (repo / os.fsdecode(b"caf\xe9.txt")).write_bytes(b"\xe9\n")
    found = state(repo)
    assert "+" + os.fsdecode(b"\xe9") in found.diff
    assert found.notes == []


def test_this_package_has_a_state() -> None:
    assert code_state().fingerprint
