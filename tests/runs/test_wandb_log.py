from __future__ import annotations

import struct
import zlib
from pathlib import Path

import pytest

from europa_exp.runs.wandb_log import payloads, records

BLOCK = 32768


def write(items: list[bytes]) -> bytes:
    """LevelDB's log format, from its description."""
    out = bytearray(struct.pack("<4sHB", b":W&B", 0xBEE1, 0))
    for item in items:
        first, rest = True, item
        while first or rest:
            left = BLOCK - len(out) % BLOCK
            if left < 7:
                out += b"\0" * left
                left = BLOCK
            piece, rest = rest[: left - 7], rest[left - 7 :]
            kind = (1 if not rest else 2) if first else (4 if not rest else 3)
            out += struct.pack("<IHB", zlib.crc32(bytes([kind]) + piece), len(piece), kind) + piece
            first = False
    return bytes(out)


@pytest.mark.parametrize("left", range(12))
def test_records_on_every_edge_of_a_block(left: int) -> None:
    items = [b"a" * (BLOCK - 7 - 7 - left), b"second", b"b" * (3 * BLOCK), b"", b"last"]
    assert list(payloads(write(items))) == items


def test_what_is_no_log_is_refused(tmp_path: Path) -> None:
    for data in (b"", b":W&B", b"\0" * 100):
        with pytest.raises(ValueError, match=r"\.wandb"):
            list(payloads(data))
    path = tmp_path / "x.wandb"
    path.write_bytes(write([b"\xff\xff\xff"]))  # whole, and no message of W&B's
    assert list(records(path)) == []
