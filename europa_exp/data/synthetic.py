"""Rows of ``data.source=synthetic``: random tokens for work on throughput; nothing is read and nothing can be learnt.

Tokens are uniform over the model's vocabulary and independent, so the loss stays at ln(vocabulary). Documents have
geometric lengths: each token ends its document with probability 1 / mean. That has no memory, so a stream of such
documents cut into rows has the same segments as rows drawn one by one, which is what happens here: a row depends on the
seed and its place in the stream alone, not on the rows before it nor on the rank that asks.
"""

from __future__ import annotations

import numpy as np

from europa_exp.data import draws
from europa_exp.data.fingerprint import synthetic_fingerprint
from europa_exp.data.packing import Row


class SyntheticRows:
    """Rows from any place in the stream of random documents.

    Attributes:
        fingerprint: see ``europa_exp.data.fingerprint``.
        description: one phrase for logs.
    """

    def __init__(self, vocab_size: int, shuffle_seed: int, mean_document_length: int | None) -> None:
        self._vocab_size, self._seed, self._mean = vocab_size, shuffle_seed, mean_document_length
        self.fingerprint = synthetic_fingerprint(shuffle_seed, mean_document_length)
        documents = (
            f"documents of {mean_document_length} tokens on average"
            if mean_document_length
            else "a document a row"
        )
        self.description = f"random tokens below {vocab_size:,}, {documents}"

    def row(self, position: int, seq_len: int) -> Row:
        """The row of ``seq_len`` tokens that begins ``position`` tokens into the stream."""
        label = f"{self._seed} {position}"
        tokens = draws.integers(f"tokens {label}", seq_len + 1, self._vocab_size)
        inputs, labels = tokens[:-1], tokens[1:].copy()
        places = np.arange(seq_len, dtype=np.int64)
        if self._mean is None:
            return Row(inputs, labels, places)
        # Below 2^64 / mean with probability 1 / mean; a mean of 1 would need 2^64, which a word can't hold.
        begins = draws.words(f"documents {label}", seq_len) <= np.uint64((2**64 - 1) // self._mean)
        # Whether the first token begins a document does not matter: a row begins a segment anyway.
        starts = np.maximum.accumulate(np.where(begins, places, 0))
        # As in packed text, a document's last label is a token of its own, not the first input of the next document.
        lasts = np.flatnonzero(begins[1:])
        labels[lasts] = draws.integers(f"ends {label}", seq_len, self._vocab_size)[lasts]
        return Row(inputs, labels, places - starts)
