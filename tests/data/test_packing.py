"""Documents in rows: nothing lost, nothing doubled, nothing predicted across documents."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from europa_exp.data.packing import Segment, Stream, fill_row, segment_lengths


def in_order(n):
    return lambda epoch: np.arange(n)


def rotated(n):
    """An order of its own in each epoch, that a test can write down."""
    return lambda epoch: np.roll(np.arange(n), epoch)


def document(index, pairs):
    """Tokens that tell their document and their place; a document of n pairs has n + 1 tokens."""
    return np.arange(pairs + 1) + 1000 * index


def naive_stream(lengths, order, epochs):
    """(document, place) of every pair, written out one after the other."""
    return [(d, i) for epoch in range(epochs) for d in order(epoch).tolist() for i in range(lengths[d])]


lengths_lists = st.lists(st.integers(0, 12), min_size=1, max_size=8).filter(any)


@given(lengths_lists, st.integers(1, 30), st.integers(0, 40))
def test_rows_hold_the_stream_and_nothing_else(lengths, seq_len, first_row):
    order = rotated(len(lengths))
    stream = Stream(lengths, order)
    epochs = (first_row + 4) * seq_len // sum(lengths) + 1
    expected = naive_stream(lengths, order, epochs)

    for index in range(first_row, first_row + 3):
        segments = stream.segments(index * seq_len, seq_len)
        row = fill_row(segments, lambda d, start, stop: document(d, lengths[d])[start:stop])
        pairs = expected[index * seq_len : (index + 1) * seq_len]

        assert all(segment.length > 0 for segment in segments)
        assert row.inputs.tolist() == [1000 * d + i for d, i in pairs]
        # A label is the next token of the same document, whatever stands next in the row.
        assert row.labels.tolist() == [1000 * d + i + 1 for d, i in pairs]
        # Positions go up by one within a document, and begin at 0 with each document and each row.
        place = 0
        for at, (_, i) in enumerate(pairs):
            place = 0 if at == 0 or i == 0 else place + 1
            assert row.positions[at] == place
        assert segment_lengths(torch.from_numpy(row.positions)) == [s.length for s in segments]


@given(lengths_lists, st.integers(1, 30))
def test_an_epoch_holds_every_pair_once(lengths, seq_len):
    stream = Stream(lengths, in_order(len(lengths)))
    seen = [
        (s.document, s.start + i)
        for at in range(0, stream.epoch_length, seq_len)
        for s in stream.segments(at, min(seq_len, stream.epoch_length - at))
        for i in range(s.length)
    ]
    assert sorted(seen) == [(d, i) for d, n in enumerate(lengths) for i in range(n)]


@given(lengths_lists, st.integers(0, 200), st.integers(1, 40), st.integers(1, 40))
def test_any_place_can_be_asked_for_in_any_order(lengths, position, first, second):
    """Row for row or all at once, forwards or backwards: the same pairs."""

    def pairs(segments):
        return [(s.document, s.start + i) for s in segments for i in range(s.length)]

    once = pairs(Stream(lengths, rotated(len(lengths))).segments(position, first + second))
    stream = Stream(lengths, rotated(len(lengths)))
    later = pairs(stream.segments(position + first, second))
    assert pairs(stream.segments(position, first)) + later == once


def test_document_that_ends_on_the_boundary_leaves_no_empty_segment():
    stream = Stream([4, 4, 3], in_order(3))
    assert stream.segments(0, 4) == [Segment(0, 0, 4)]
    assert stream.segments(4, 4) == [Segment(1, 0, 4)]
    assert stream.segments(8, 4) == [Segment(2, 0, 3), Segment(0, 0, 1)]


def test_document_over_many_rows_goes_on_where_it_was():
    stream = Stream([10, 2], in_order(2))
    assert [stream.segments(at, 4) for at in (0, 4, 8)] == [
        [Segment(0, 0, 4)],
        [Segment(0, 4, 4)],
        [Segment(0, 8, 2), Segment(1, 0, 2)],
    ]


def test_row_longer_than_an_epoch_repeats_documents():
    assert Stream([2, 1], in_order(2)).segments(1, 7) == [
        Segment(0, 1, 1),
        Segment(1, 0, 1),
        Segment(0, 0, 2),
        Segment(1, 0, 1),
        Segment(0, 0, 2),
    ]


@pytest.mark.parametrize("lengths", [[], [0], [0, 0], [3, -1]])
def test_nothing_to_train_on_is_refused(lengths):
    with pytest.raises(ValueError, match="lengths"):
        Stream(lengths, in_order(len(lengths)))


@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=6), min_size=1, max_size=4))
def test_segment_lengths_of_a_batch(rows):
    size = max(sum(row) for row in rows)
    rows = [[*row, size - sum(row)] if sum(row) < size else row for row in rows]
    positions = torch.tensor([list(itertools.chain.from_iterable(range(n) for n in row)) for row in rows])
    assert segment_lengths(positions) == [n for row in rows for n in row]


def test_segment_lengths_without_a_leading_zero_or_without_rows():
    assert segment_lengths(torch.tensor([[5, 6, 0, 1], [2, 3, 4, 5]])) == [2, 2, 4]
    assert segment_lengths(torch.tensor([3, 0])) == [1, 1]
    assert segment_lengths(torch.empty(0, 4, dtype=torch.int64)) == []
