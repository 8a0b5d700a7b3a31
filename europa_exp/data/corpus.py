"""The documents of ``data.source=sample``: Python's own help texts, or a folder of text files.

Documents are bytes and stay bytes: with one token a byte nothing needs decoding, so a file that is not valid UTF-8 loses
nothing. This module imports neither torch nor numpy, because the fingerprint is asked for on login nodes.
"""

from __future__ import annotations

import os
import stat
from abc import ABC, abstractmethod
from collections import Counter
from pathlib import Path

KEEP_IN_MEMORY_BYTES = 256 * 2**20
"""Folders up to this size are read once and kept (at most this much host memory a rank); larger ones are read row by row."""

SNIFFED_BYTES = 8192
"""A file with a NUL byte in its first so many bytes is taken for binary."""


class DataError(ValueError):
    """Data that can't be used. The message is one line: field and value, the rule, a way out."""

    def __init__(self, field: str, value: object, rule: str, way_out: str) -> None:
        super().__init__(f"{field}={value}: {rule}; {way_out}")
        self.field, self.value, self.rule, self.way_out = field, value, rule, way_out


class Documents(ABC):
    """Non-empty documents in a fixed order.

    Attributes:
        names: one name a document, unique, in ascending order.
        sizes: length of each document in bytes, all positive.
        description: one phrase for logs.
    """

    names: list[bytes]
    sizes: list[int]
    description: str

    @abstractmethod
    def read(self, index: int, start: int, stop: int) -> bytes:
        """Bytes ``start`` to ``stop`` (exclusive, within the document) of document ``index``.

        Raises:
            DataError: the document is no longer what it was when the documents were opened.
        """

    @property
    def total_bytes(self) -> int:
        return sum(self.sizes)


class HelpTexts(Documents):
    """The topics of Python's interactive help (some 0.5 MB of English), one document a topic.

    They differ between versions of Python; the fingerprint says so.
    """

    def __init__(self) -> None:
        try:
            from pydoc_data.topics import topics
        except ImportError as error:
            raise DataError(
                "data.path",
                None,
                "this Python comes without its help texts (pydoc_data)",
                "give data.path=<folder of text files> or data=synthetic",
            ) from error
        # A str from source code is valid Unicode but for lone surrogates; keep even those rather than fail.
        encoded = {name.encode(): text.encode("utf-8", "surrogatepass") for name, text in topics.items()}
        self.names = sorted(name for name, text in encoded.items() if text)
        self._texts = [encoded[name] for name in self.names]
        self.sizes = [len(text) for text in self._texts]
        self.description = f"{len(self.names)} help texts of Python ({self.total_bytes:,} bytes)"
        if not self.names:
            raise DataError("data.path", None, "Python's help texts are empty", "give data.path=<folder>")

    def read(self, index: int, start: int, stop: int) -> bytes:
        return self._texts[index][start:stop]


class TextFolder(Documents):
    """The text files under a folder, one document a file, ordered by their path in it.

    Left out, and counted in ``left_out``: empty files, binary files (a NUL byte in the first 8 KiB, which UTF-16 text
    has too), and what is not a regular file. Hidden files and folders (name begins with a dot) and links to folders are
    not looked at; links to files are.

    Attributes:
        mtimes_ns: time of last change of each file, in ns.
        left_out: number of files left out, by reason.
    """

    def __init__(self, path: str) -> None:
        """
        Raises:
            DataError: no such folder, a file or folder that can't be read, or no text in it.
        """
        self._path, self._root = path, Path(path)
        if not self._root.exists():
            raise self._error("no such folder", "give a folder of text files or leave data.path out")
        if not self._root.is_dir():
            raise self._error("not a folder", f"give the folder of the file, {self._root.parent}")
        self.names, self.sizes = [], []
        self.mtimes_ns: list[int] = []
        self.left_out: Counter[str] = Counter()
        for name in sorted(self._walk()):
            self._look_at(name)
        if not self.names:
            counts = ", ".join(f"{n} {reason}" for reason, n in sorted(self.left_out.items()))
            raise self._error(
                f"no text in this folder (left out: {counts})" if counts else "the folder holds no files",
                "put text files there or give another folder",
            )
        self._kept: dict[int, bytes] | None = {} if self.total_bytes <= KEEP_IN_MEMORY_BYTES else None
        self.description = f"{len(self.names)} files of {path} ({self.total_bytes:,} bytes)"
        if self.left_out:
            counts = ", ".join(f"{n} {reason}" for reason, n in sorted(self.left_out.items()))
            self.description += f", left out: {counts}"

    def read(self, index: int, start: int, stop: int) -> bytes:
        if self._kept is None:
            return self._read_file(index, start, stop)
        if index not in self._kept:
            self._kept[index] = self._read_file(index, 0, self.sizes[index])
        return self._kept[index][start:stop]

    def _error(self, rule: str, way_out: str) -> DataError:
        return DataError("data.path", self._path, rule, way_out)

    def _unreadable(self, error: OSError) -> DataError:
        return self._error(f"can't read {error.filename}: {error.strerror}", "make it readable or remove it")

    def _walk(self) -> list[bytes]:
        def stop(error: OSError) -> None:
            # os.walk would pass over a folder that it can't list, and the data would silently be less.
            raise self._unreadable(error) from error

        found = []
        for folder, subfolders, files in os.walk(self._root, onerror=stop):
            subfolders[:] = [name for name in subfolders if not name.startswith(".")]
            for name in files:
                if not name.startswith("."):
                    found.append(os.fsencode(os.path.relpath(os.path.join(folder, name), self._root)))
        return found

    def _look_at(self, name: bytes) -> None:
        path = self._file(name)
        try:
            # Asked before opening: opening a pipe would wait for its other end for ever.
            if not stat.S_ISREG(os.stat(path).st_mode):
                self.left_out["not regular"] += 1
                return
            with open(path, "rb") as file:
                status = os.fstat(file.fileno())
                head = file.read(SNIFFED_BYTES)
        except FileNotFoundError:  # a link to nothing
            self.left_out["not regular"] += 1
            return
        except OSError as error:
            raise self._unreadable(error) from error
        if not head:
            self.left_out["empty"] += 1
        elif b"\0" in head:
            self.left_out["binary"] += 1
        else:
            self.names.append(name)
            self.sizes.append(status.st_size)
            self.mtimes_ns.append(status.st_mtime_ns)

    def _file(self, name: bytes) -> str:
        return os.path.join(self._root, os.fsdecode(name))

    def _read_file(self, index: int, start: int, stop: int) -> bytes:
        path = self._file(self.names[index])
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(start)
                data = file.read(stop - start)
        except OSError as error:
            raise self._unreadable(error) from error
        if size != self.sizes[index] or len(data) != stop - start:
            raise self._error(
                f"{path} had {self.sizes[index]} bytes when the data were opened and has {size} now",
                "leave the folder alone while a run reads it",
            )
        return data


def open_documents(path: str | None) -> Documents:
    """The text files under ``path``, or Python's help texts without one.

    Raises:
        DataError: see ``TextFolder`` and ``HelpTexts``.
    """
    return HelpTexts() if path is None else TextFolder(path)
