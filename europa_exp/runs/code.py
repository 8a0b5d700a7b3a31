"""The state of the code: commit, and what differs from it as a patch, untracked files included."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from europa_exp.config.secrets import redact

MAX_FILE = 1 << 20
"""Bytes of one file's part of the patch; a longer part, and an untracked file of this size, is noted instead."""
MAX_PATCH = 8 << 20
"""Bytes of the whole patch; what comes after is noted."""

_TIMEOUT_S = 20
_PATCH = [
    *("diff", "HEAD", "--full-index", "--unified=3", "--diff-algorithm=default", "--submodule=short"),
    # A user's own git settings must not change the patch, or the fingerprint would not be the same for everybody.
    *("--no-color", "--no-ext-diff", "--no-textconv", "--no-renames", "--src-prefix=a/", "--dst-prefix=b/"),
]


@dataclass(frozen=True)
class CodeState:
    """The code of one moment.

    ``diff`` is a patch against ``commit`` with untracked files, without secrets; a binary file is in it by its hash alone.
    ``fingerprint`` is equal for equal code and is made before anything is left out. Outside a git checkout ``commit`` is None,
    ``notes`` say why, and the fingerprint is that of the package's files.
    """

    commit: str | None
    fingerprint: str
    branch: str | None = None
    dirty: bool = False
    diff: str = ""
    root: str | None = None
    notes: list[str] = field(default_factory=list)
    redacted: list[str] = field(default_factory=list)
    """Kinds and lines of the secrets that were taken out of ``diff``."""


class _GitError(Exception):
    pass


def code_state(package: Path | None = None) -> CodeState:
    """The state of the checkout that holds ``package`` (without it: this package). Never raises.

    A package that only lies inside somebody's checkout (a virtual environment, say) without being tracked there is not that
    checkout's code.
    """
    package = package or Path(__file__).resolve().parents[1]
    try:
        return _from_git(package)
    except (_GitError, OSError) as error:
        return CodeState(None, "files:" + _hash_of_files(package), notes=[f"no git commit: {error}"])


def _from_git(package: Path) -> CodeState:
    root = Path(_git(package, "rev-parse", "--show-toplevel").strip())
    if not _git(package, "ls-files", "--", "__init__.py").strip():
        raise _GitError(f"{package.name} is not tracked in the checkout around it")
    commit, branch, dirty, untracked = _status(root)
    if commit is None:
        raise _GitError("the checkout has no commit yet")
    notes: list[str] = []
    diff, redacted, whole = "", [], ""
    if dirty or untracked:
        small, noted = _small(root, untracked)
        notes += noted
        whole = _patch(root, small)
        diff, cut = _capped(whole)
        diff, findings = redact(diff)
        redacted = [str(finding) for finding in findings]
        notes += cut + _binaries(whole)
        whole += "".join(noted)
    mark = hashlib.sha256(f"{commit}\n{whole}".encode("utf-8", "surrogateescape")).hexdigest()[:16]
    return CodeState(commit, mark, branch, bool(dirty or untracked), diff, str(root), notes, redacted)


def _git(where: Path, *args: str, env: dict[str, str] | None = None, text: str | None = None) -> str:
    """The output of a git command. Variables such as GIT_DIR (set inside hooks) would point it at another checkout."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    clean |= {"GIT_OPTIONAL_LOCKS": "0", "GIT_LITERAL_PATHSPECS": "1", "LC_ALL": "C"} | (env or {})
    try:
        done = subprocess.run(
            ["git", "-c", "core.quotePath=true", "-C", str(where), *args],
            env=clean,
            input=None if text is None else os.fsencode(text),
            stdin=subprocess.DEVNULL if text is None else None,
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError:
        raise _GitError("git is not installed") from None
    except subprocess.TimeoutExpired:
        raise _GitError(f"git took longer than {_TIMEOUT_S} s") from None
    if done.returncode != 0:
        message = done.stderr.decode(errors="replace").strip().splitlines()
        raise _GitError(message[0] if message else f"git ended with {done.returncode}")
    return done.stdout.decode("utf-8", "surrogateescape")


def _status(root: Path) -> tuple[str | None, str | None, bool, list[str]]:
    """Commit, branch, whether tracked files differ, and the untracked files that git does not ignore."""
    commit, branch, dirty, untracked = None, None, False, []
    entries = iter(
        _git(root, "status", "--porcelain=v2", "--branch", "-z", "--untracked-files=all").split("\0")
    )
    for entry in entries:
        kind, _, rest = entry.partition(" ")
        if kind == "#":
            name, _, value = rest.partition(" ")
            if name == "branch.oid" and value != "(initial)":
                commit = value
            elif name == "branch.head" and value != "(detached)":
                branch = value
        elif kind == "?":
            untracked.append(rest)
        elif kind:
            dirty = True
            if kind == "2":
                next(entries, None)  # the old name of a renamed file is an entry of its own
    return commit, branch, dirty, untracked


def _small(root: Path, untracked: list[str]) -> tuple[list[str], list[str]]:
    """The untracked files that belong into the patch, and a note for each that is too large or no plain file."""
    small, notes = [], []
    for name in untracked:
        path = root / name
        try:
            info = path.lstat()
        except OSError:
            continue
        if name.endswith("/"):
            notes.append(f"untracked checkout {name} is not in the patch")
        elif info.st_size > MAX_FILE:
            notes.append(f"untracked {name} ({info.st_size} bytes, sha256 {_hash(path)}) is not in the patch")
        else:
            small.append(name)
    return small, notes


def _patch(root: Path, untracked: list[str]) -> str:
    """The patch against HEAD. Untracked files take part through a copy of the index, so the checkout stays as it was."""
    if not untracked:
        return _git(root, *_PATCH)
    index, objects = _git(root, "rev-parse", "--git-path", "index", "--git-path", "objects").splitlines()
    with tempfile.TemporaryDirectory(prefix="code-state-") as scratch:
        env = {
            "GIT_INDEX_FILE": f"{scratch}/index",
            "GIT_OBJECT_DIRECTORY": f"{scratch}/objects",
            "GIT_ALTERNATE_OBJECT_DIRECTORIES": str(root / objects),
        }
        os.mkdir(env["GIT_OBJECT_DIRECTORY"])
        with contextlib.suppress(FileNotFoundError):
            shutil.copy2(root / index, env["GIT_INDEX_FILE"])
        _git(
            root,
            "add",
            "--intent-to-add",
            "--pathspec-from-file=-",
            "--pathspec-file-nul",
            env=env,
            text="\0".join(untracked),
        )
        return _git(root, *_PATCH, env=env)


def _files(patch: str) -> list[str]:
    """The parts of a patch, one a file. Content lines begin with a blank or a sign, so this heading is never content."""
    return [part for part in re.split(r"(?m)^(?=diff --git )", patch) if part]


def _capped(patch: str) -> tuple[str, list[str]]:
    """The patch without parts that are too long, and a note for each of them. Whole parts go, so it still applies."""
    kept, notes, size = [], [], 0
    for part in _files(patch):
        length = len(part)
        if length > MAX_FILE or size + length > MAX_PATCH:
            notes.append(f"the change of {_name(part)} ({length} bytes, {_blobs(part)}) is not in the patch")
            continue
        size += length
        kept.append(part)
    return "".join(kept), notes


def _binaries(patch: str) -> list[str]:
    return [
        f"{_name(part)} is binary ({_blobs(part)}); the patch names it only"
        for part in _files(patch)
        if re.search(r"(?m)^Binary files .* differ$", part)
    ]


def _name(part: str) -> str:
    return part.partition("\n")[0].removeprefix("diff --git a/").partition(" b/")[0]


def _blobs(part: str) -> str:
    found = re.search(r"(?m)^index ([0-9a-f]+)\.\.([0-9a-f]+)", part)
    return f"git blob {found[2]}" if found else "no blob"


def _hash(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            # Of a file of many gigabytes size and first part must do: nobody waits minutes for a fingerprint.
            for _ in range(64):
                if not (piece := file.read(1 << 20)):
                    break
                digest.update(piece)
            else:
                return digest.hexdigest()[:16] + " of the first 64 MiB"
    except OSError:
        return "unreadable"
    return digest.hexdigest()[:16]


def _hash_of_files(package: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        with contextlib.suppress(OSError):
            digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]
