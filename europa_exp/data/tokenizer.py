"""Bytes as tokens, as a torchtitan tokenizer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torchtitan.components.tokenizer import BaseTokenizer

from europa_exp.data.vocabulary import BOS_ID, EOS_ID, PAD_ID, VOCAB_SIZE


class ByteTokenizer(BaseTokenizer):
    """One token a byte (ids 0 to 255), plus BOS, EOS and PAD: 259 ids. Needs no files and loses nothing."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config | None = None, *, tokenizer_path: str | None = None) -> None:
        """``tokenizer_path`` is what the trainer passes to any tokenizer; there is nothing to read."""
        super().__init__()
        self.bos_id, self.eos_id, self.pad_id = BOS_ID, EOS_ID, PAD_ID

    def encode(self, text: str | bytes, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        """Ids of ``text`` (a str as UTF-8), by default between BOS and EOS.

        Bytes that were decoded with ``errors="surrogateescape"`` come back as they were.
        """
        data = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
        return [BOS_ID] * add_bos + list(data) + [EOS_ID] * add_eos

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Bytes of ``ids`` without BOS, EOS and PAD: the exact inverse of ``encode``.

        Raises:
            ValueError: an id that is not in the vocabulary.
        """
        kept = []
        for i in ids:
            if not 0 <= i < VOCAB_SIZE:
                raise ValueError(f"id {i} is not in the byte vocabulary (0 to {VOCAB_SIZE - 1})")
            if i < BOS_ID:
                kept.append(i)
        return bytes(kept)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ``ids`` for people; bytes that are not UTF-8 show as U+FFFD (see ``decode_bytes`` for the bytes)."""
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def get_vocab_size(self) -> int:
        return VOCAB_SIZE
