"""A frozen copy of the code: what a queued job imports must not change because somebody goes on editing.

The copy holds every tracked file and every untracked one that git does not ignore, as they are at this moment. Its folder
is named by the hash of what is in it, so the runs of a sweep (and later sweeps of the same code) share one, and it is
read-only. Nothing here imports torch.
"""

from __future__ import annotations

import compileall
import contextlib
import hashlib
import os
import py_compile
import secrets as randomness
import shutil
import stat
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from europa_exp.config.secrets import redact

CODE_FOLDER = ".code"
"""Under the runs folder: snapshots, named by their hash."""

MAX_UNTRACKED = 16 << 20
"""Bytes of the largest untracked file that is code. Data and checkpoints that git does not ignore stay out."""

NOTES_FILE = ".snapshot"
"""In the snapshot: where it was taken from, and which files were left out, a line each."""

_TIMEOUT_S = 60


class SnapshotError(Exception):
    """The code can't be frozen; the message says why and what to do."""


@dataclass(frozen=True)
class Snapshot:
    """A finished snapshot. ``left_out`` says which untracked files are not in it, and why."""

    path: Path
    left_out: list[str] = field(default_factory=list)


def freeze(root: Path, to: Path) -> Path:
    """Copy the code in ``root`` into a folder below ``to`` that is named by its hash; returns that folder.

    See ``take``, which also tells what was left out.
    """
    return take(root, to).path


def take(root: Path, to: Path) -> Snapshot:
    """Freeze the code in ``root`` under ``to``; an equal snapshot that is there already is used again.

    ``root`` is the folder that `europa_exp` is imported from. Outside a git checkout the package, `conf`, `sweeps` and
    `launch.py` are copied. Left out, and told: untracked files over 16 MiB or with a secret in them, links that lead out of
    the tree to folders, and special files. Nothing under ``to`` or its parent (the runs folder) is copied. Raises
    SnapshotError; nothing is left behind then.
    """
    root, to = root.resolve(), to.absolute()
    tracked, untracked = _files(root)
    hidden = to / f".new-{randomness.token_hex(8)}"
    left_out: list[str] = []
    try:
        hidden.mkdir(parents=True)
        digest = hashlib.sha256()
        # Run folders may lie in the tree without git ignoring them.
        out = to.resolve() if root.is_relative_to(to.parent.resolve()) else to.parent.resolve()
        for name in sorted({*tracked, *untracked}):
            source = root / name
            if source.is_relative_to(out):
                continue
            reason = None if name in tracked else _unwanted(source)
            reason = reason or _copy(root, source, hidden / name, name, digest)
            if reason:
                left_out.append(f"{name}: {reason}")
        if not (hidden / "europa_exp" / "__init__.py").is_file():
            raise SnapshotError(f"launch.snapshot=true: {root} holds no package europa_exp to freeze")
        _compile(hidden / "europa_exp")
        about = [f"taken from {root}", *(f"left out: {entry}" for entry in left_out)]
        text = "\n".join(about) + "\n"
        (hidden / NOTES_FILE).write_text(text, encoding="utf-8", errors="surrogateescape")
        final = to / digest.hexdigest()[:16]
        if not final.is_dir():
            _set_write(hidden, False)
            with contextlib.suppress(FileExistsError):
                _rename(hidden, final)
    except (OSError, subprocess.SubprocessError) as error:
        raise SnapshotError(
            f"launch.snapshot=true: the code in {root} can't be frozen under {to} ({error}); nothing was submitted"
        ) from error
    finally:
        _remove(hidden)
    return Snapshot(final, left_out)


def _rename(hidden: Path, final: Path) -> None:
    try:
        hidden.rename(final)
    except OSError:
        if not final.is_dir():  # otherwise another call was faster, with the same content
            raise


# -------------------------------------------------------------------------------------------------------------- files


def _files(root: Path) -> tuple[set[str], set[str]]:
    """Paths relative to ``root`` of tracked files (those of submodules included) and of untracked ones."""
    try:
        top = Path(_git(root, "rev-parse", "--show-toplevel").strip())
        if top.resolve() != root or not _git(root, "ls-files", "--", "europa_exp/__init__.py").strip():
            return _package_files(root), set()
        tracked = set(_listed(root, "--cached", "--recurse-submodules"))
        untracked = {n for n in _listed(root, "--others", "--exclude-standard") if not n.endswith("/")}
    except _GitFailed:
        return _package_files(root), set()
    return tracked, untracked - tracked


def _package_files(root: Path) -> set[str]:
    found: set[str] = {"launch.py"} if (root / "launch.py").is_file() else set()
    for folder in ("europa_exp", "conf", "sweeps"):
        for path in (root / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                found.add(str(path.relative_to(root)))
    return found


def _listed(root: Path, *options: str) -> Iterator[str]:
    return (name for name in _git(root, "ls-files", "-z", *options).split("\0") if name)


class _GitFailed(Exception):
    pass


def _git(root: Path, *arguments: str) -> str:
    # Variables such as GIT_DIR (set inside hooks) would point git at another checkout.
    clean = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments],
            env=clean | {"GIT_OPTIONAL_LOCKS": "0"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError:
        raise _GitFailed from None
    if done.returncode != 0:
        raise _GitFailed
    return os.fsdecode(done.stdout)


def _unwanted(path: Path) -> str | None:
    """Why an untracked file is no part of the code, or None."""
    try:
        info = path.lstat()
        if not stat.S_ISREG(info.st_mode):
            return None
        if info.st_size > MAX_UNTRACKED:
            return f"untracked, and {info.st_size / 2**20:.0f} MiB are data, not code"
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        return f"untracked, and can't be read ({error.strerror})"
    found = redact(text)[1]
    return f"untracked, and holds what looks like a secret ({found[0]})" if found else None


def _copy(root: Path, source: Path, target: Path, name: str, digest: hashlib._Hash) -> str | None:
    """Copy one file and add it to the digest; returns why it was not copied. A file deleted meanwhile is no part."""
    try:
        info = source.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    target.parent.mkdir(parents=True, exist_ok=True)
    if stat.S_ISLNK(info.st_mode):
        link = os.readlink(source)
        inside = not os.path.isabs(link) and source.resolve().is_relative_to(root)
        if inside or not source.exists():
            target.symlink_to(link)
            _add(digest, name, "link", os.fsencode(link))
            return None
        if not source.is_file():
            return f"a link to {link}, which is not in the tree"
        info = source.stat()  # what it leads to can change, so its content is frozen
    if not stat.S_ISREG(info.st_mode):
        return None if stat.S_ISDIR(info.st_mode) else "no plain file"
    content = source.read_bytes()
    target.write_bytes(content)
    executable = bool(info.st_mode & stat.S_IXUSR)
    target.chmod(0o755 if executable else 0o644)
    _add(digest, name, "x" if executable else "-", content)
    return None


def _add(digest: hashlib._Hash, name: str, kind: str, content: bytes) -> None:
    digest.update(os.fsencode(f"{name}\0{kind}\0{len(content)}\0"))
    digest.update(content)


def _compile(package: Path) -> None:
    """Bytecode beside the sources: a read-only folder can't get it later, and each of many ranks would compile again."""
    compileall.compile_dir(
        str(package),
        quiet=2,
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
    )


def _set_write(top: Path, allowed: bool) -> None:
    for folder, _, names in os.walk(top):
        for path in (*(Path(folder, n) for n in names), Path(folder)):
            if not path.is_symlink():
                mode = stat.S_IMODE(path.stat().st_mode)
                path.chmod(mode | stat.S_IWUSR if allowed else mode & ~0o222)


def _remove(hidden: Path) -> None:
    if hidden.exists():
        with contextlib.suppress(OSError):
            _set_write(hidden, True)
        shutil.rmtree(hidden, ignore_errors=True)
