"""Rows of ``data.source=sample``: documents as bytes between BOS and EOS, in a new order each epoch."""

from __future__ import annotations

import numpy as np

from europa_exp.data import draws
from europa_exp.data.corpus import Documents
from europa_exp.data.fingerprint import documents_fingerprint
from europa_exp.data.packing import Row, Stream, fill_row
from europa_exp.data.vocabulary import BOS_ID, EOS_ID


class TextRows:
    """Rows from any place in the stream of documents.

    Attributes:
        fingerprint: see ``europa_exp.data.fingerprint``.
        description: one phrase for logs.
    """

    def __init__(self, documents: Documents, shuffle_seed: int) -> None:
        self._documents = documents
        self.fingerprint = documents_fingerprint(documents)
        # BOS + n bytes + EOS are n + 2 tokens: n + 1 pairs.
        self._stream = Stream(
            np.asarray(documents.sizes) + 1,
            lambda epoch: draws.permutation(f"documents {shuffle_seed} {epoch}", len(documents.sizes)),
        )
        self.description = f"{documents.description}, {self._stream.epoch_length:,} tokens an epoch"

    def row(self, position: int, seq_len: int) -> Row:
        """The row of ``seq_len`` tokens that begins ``position`` tokens into the stream."""
        return fill_row(self._stream.segments(position, seq_len), self._tokens)

    def _tokens(self, document: int, start: int, stop: int) -> np.ndarray:
        # Token 0 is BOS, token i is byte i - 1, token n + 1 is EOS.
        size = self._documents.sizes[document]
        first, last = max(start - 1, 0), min(stop - 1, size)
        tokens = np.empty(stop - start, dtype=np.int64)
        at = first + 1 - start
        data = self._documents.read(document, first, last)
        tokens[at : at + len(data)] = np.frombuffer(data, dtype=np.uint8)
        if start == 0:
            tokens[0] = BOS_ID
        if stop == size + 2:
            tokens[-1] = EOS_ID
        return tokens
