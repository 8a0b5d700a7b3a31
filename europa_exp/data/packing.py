"""Documents in a stream, the stream in rows.

A document of n tokens gives n - 1 pairs (token, next token); the stream is the pairs of one document after the other, and
a row is ``seq_len`` consecutive pairs. So the shift from inputs to labels happens inside a document:

- No label belongs to another document than its input, and none needs to be masked: the end-of-sequence token is the label
  of a document's last input and is never an input itself. Every position of every row is trained on.
- A document that does not fit goes on in the next row. Its pairs are all there once: the last label of a row is the first
  input of the next.
- Positions restart at 0 at each document, and also where a row begins in the middle of a document: earlier tokens are in
  another row and can't be attended to, rotary embeddings see differences of positions only, and positions stay below
  ``seq_len``, which is as long as rotary caches are. torchtitan's attention masks find segments by position 0, so a row
  whose first position is not 0 would be cut wrongly.
- Documents without a pair (fewer than two tokens) take no room, so there are no segments of length 0 and no duplicate
  boundaries, also when a document ends exactly at the end of a row.

The stream is endless: epoch follows epoch, each in an order of its own. Nothing is buffered; any place in the stream can be
asked for directly, and that makes rows independent of which rank asks for them, and a saved place one number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch


class Segment(NamedTuple):
    """Pairs ``start`` to ``start + length`` (exclusive) of one document, side by side in a row."""

    document: int
    start: int
    length: int


class Stream:
    """The endless stream of documents, epoch after epoch."""

    def __init__(self, lengths: Sequence[int] | np.ndarray, order: Callable[[int], np.ndarray]) -> None:
        """
        Args:
            lengths: pairs of each document; 0 is allowed and takes no room.
            order: from the number of an epoch (0, 1, ...) to a permutation of the documents.

        Raises:
            ValueError: no pairs at all, or a negative length.
        """
        self._lengths = np.asarray(lengths, dtype=np.int64)
        self.epoch_length = int(self._lengths.sum())
        """Pairs of an epoch."""
        if self.epoch_length <= 0 or (self._lengths < 0).any():
            raise ValueError("the documents must have lengths of 0 or more, and not all 0")
        self._order = order
        self._epochs: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def segments(self, position: int, length: int) -> list[Segment]:
        """The pairs ``position`` to ``position + length`` (exclusive) of the stream; no segment is empty.

        A row that is longer than an epoch holds documents more than once.
        """
        found = []
        while length > 0:
            epoch, offset = divmod(position, self.epoch_length)
            order, ends = self._epoch(epoch)
            # The first document that ends after the offset; documents of length 0 end where they begin and are passed.
            rank = int(np.searchsorted(ends, offset, side="right"))
            document = int(order[rank])
            left = int(ends[rank]) - offset
            taken = min(left, length)
            found.append(Segment(document, int(self._lengths[document]) - left, taken))
            position += taken
            length -= taken
        return found

    def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        if epoch not in self._epochs:
            while len(self._epochs) > 1:  # a row seldom touches more than two epochs
                del self._epochs[min(self._epochs)]
            order = self._order(epoch)
            self._epochs[epoch] = order, np.cumsum(self._lengths[order])
        return self._epochs[epoch]


class Row(NamedTuple):
    """One row, each an int64 array of ``seq_len``: inputs, labels, positions within the segment."""

    inputs: np.ndarray
    labels: np.ndarray
    positions: np.ndarray


def fill_row(segments: Sequence[Segment], tokens: Callable[[int, int, int], np.ndarray]) -> Row:
    """The row that ``segments`` make up.

    Args:
        segments: in the order of the row.
        tokens: from (document, start, stop) to those tokens of the document.
    """
    size = sum(segment.length for segment in segments)
    row = Row(*(np.empty(size, dtype=np.int64) for _ in Row._fields))
    at = 0
    for document, start, length in segments:
        # One token more than there are inputs: the label of the last one.
        window = tokens(document, start, start + length + 1)
        row.inputs[at : at + length] = window[:-1]
        row.labels[at : at + length] = window[1:]
        row.positions[at : at + length] = np.arange(length)
        at += length
    return row


def segment_lengths(positions: torch.Tensor) -> list[int]:
    """Lengths of the segments of a batch, row after row, from positions alone (``[rows, seq_len]`` or ``[seq_len]``).

    A segment begins where the position is 0 and at the start of each row. The lengths add up to the number of tokens;
    attention costs the sum of their squares. Positions on a device are copied to the host.
    """
    rows = positions.detach().reshape(-1, positions.shape[-1])
    if rows.numel() == 0:
        return []
    begins = rows == 0
    begins[:, 0] = True
    starts = begins.flatten().nonzero().flatten()
    ends = torch.cat([starts[1:], starts.new_tensor([rows.numel()])])
    return (ends - starts).tolist()
