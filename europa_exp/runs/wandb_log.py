"""Reading a ``.wandb`` file: the log that the W&B client keeps of a run (its own Python reader left the package with 0.31).

The format is LevelDB's log: after a header of 7 bytes (``:W&B``, magic, version) come blocks of 32 KiB with pieces of
records, each headed by checksum, length and place in its record. A record is one ``Record`` message of W&B's protocol.
"""

from __future__ import annotations

import contextlib
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_BLOCK = 32 * 1024
_HEADER = struct.Struct("<4sHB")
_PIECE = struct.Struct("<IHB")
_MAGIC = (b":W&B", 0xBEE1)
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def payloads(data: bytes) -> Iterator[bytes]:
    """The records in the content of a ``.wandb`` file, as bytes, up to the first that is cut or damaged.

    Raises ValueError when it is no such file.
    """
    if len(data) < _HEADER.size or _HEADER.unpack_from(data)[:2] != _MAGIC:
        raise ValueError("it does not begin as a .wandb file does")
    at = _HEADER.size
    parts: list[bytes] = []
    while True:
        left = _BLOCK - at % _BLOCK
        if left < _PIECE.size:
            at += left  # the end of a block that holds no further heading is filled with zeros
        if at + _PIECE.size > len(data):
            return
        checksum, length, kind = _PIECE.unpack_from(data, at)
        piece = data[at + _PIECE.size : at + _PIECE.size + length]
        if len(piece) < length or zlib.crc32(piece, zlib.crc32(bytes([kind]))) != checksum:
            return
        at += _PIECE.size + length
        if kind in (_FULL, _FIRST):
            parts = []
        parts.append(piece)
        if kind in (_FULL, _LAST):
            yield b"".join(parts)


def records(path: str | Path) -> Iterator[Any]:
    """The ``Record`` messages of a ``.wandb`` file, up to the first that is cut or damaged (the file of a killed run is cut).

    Raises ImportError without the wandb package, OSError and ValueError when the file can't be read or is no such file.
    """
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from wandb.proto import wandb_internal_pb2

    make = getattr(wandb_internal_pb2, "Record")  # noqa: B009 (the module makes its classes when it is imported)
    for data in payloads(Path(path).read_bytes()):
        record = make()
        try:
            record.ParseFromString(data)
        except DecodeError:
            return
        yield record


@dataclass
class Log:
    """What can be read of a ``.wandb`` file."""

    path: Path
    rows: int = 0
    """Rows of history."""
    whole: bool = False
    """Whether the record of the end of the run is there."""
    appends: bool = False
    """Whether the client recorded that the run may exist on the server and this continues it."""


def read_log(path: Path) -> Log:
    """Look through a ``.wandb`` file; never raises for one that is cut, damaged, empty or not to be read.

    Raises ImportError without the wandb package.
    """
    log = Log(path)
    with contextlib.suppress(OSError, ValueError):
        for record in records(path):
            kind = record.WhichOneof("record_type")
            log.rows += kind == "history"
            log.whole = log.whole or kind == "exit"
            log.appends = log.appends or (kind == "run" and bool(getattr(record.run, "resume", False)))
    return log
