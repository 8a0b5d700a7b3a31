"""What the rows of text and of random tokens hold."""

import numpy as np
import pytest
import torch

from europa_exp.data import draws
from europa_exp.data.corpus import TextFolder
from europa_exp.data.packing import segment_lengths
from europa_exp.data.synthetic import SyntheticRows
from europa_exp.data.text import TextRows
from europa_exp.data.vocabulary import BOS_ID, EOS_ID

TEXTS = {"a.txt": b"hello", "b.txt": b"x", "c.txt": b"\xff\xfe bytes", "d.txt": b"a longer document " * 5}


@pytest.fixture
def folder(tmp_path):
    for name, text in TEXTS.items():
        (tmp_path / name).write_bytes(text)
    return str(tmp_path)


def documents_of(rows, position, length):
    """The documents (inputs and labels) in a stretch of the stream, each as the bytes between BOS and EOS."""
    inputs, labels, _ = rows.row(position, length)
    found, current, expected = [], None, EOS_ID
    for token, label in zip(inputs.tolist(), labels.tolist(), strict=True):
        if token == BOS_ID:
            assert expected == EOS_ID, "a document begins where the one before it has ended"
            current = []
        else:
            assert token == expected, "inside a document an input is the label before it"
            current.append(token)
        expected = label
        if label == EOS_ID:
            found.append(bytes(current))
    return found


def epoch_of(rows, epoch):
    length = sum(len(text) + 1 for text in TEXTS.values())
    return documents_of(rows, epoch * length, length)


def test_an_epoch_is_every_document_once_between_bos_and_eos(folder):
    rows = TextRows(TextFolder(folder), shuffle_seed=0)
    assert sorted(epoch_of(rows, 0)) == sorted(TEXTS.values())
    assert sorted(epoch_of(rows, 7)) == sorted(TEXTS.values())


def test_order_follows_the_seed_and_the_epoch(folder):
    rows, again, other = (TextRows(TextFolder(folder), shuffle_seed=s) for s in (0, 0, 1))
    orders = [epoch_of(rows, epoch) for epoch in range(8)]
    assert len({tuple(order) for order in orders}) > 1
    assert orders == [epoch_of(again, epoch) for epoch in range(8)]
    assert orders != [epoch_of(other, epoch) for epoch in range(8)]


@pytest.mark.parametrize("seq_len", [1, 2, 3, 7, 200])
def test_short_rows_hold_what_one_long_row_holds(folder, seq_len):
    """The bytes of a document are found from any start: BOS, EOS and the cut at each place."""
    rows = TextRows(TextFolder(folder), shuffle_seed=3)
    whole = rows.row(0, 420)
    cut = [rows.row(at, seq_len) for at in range(0, 420 // seq_len * seq_len, seq_len)]
    kept = len(cut) * seq_len
    assert np.array_equal(np.concatenate([row.inputs for row in cut]), whole.inputs[:kept])
    assert np.array_equal(np.concatenate([row.labels for row in cut]), whole.labels[:kept])
    assert all(row.positions[0] == 0 and row.positions.max() < seq_len for row in cut)


def test_eos_is_never_an_input(folder):
    row = TextRows(TextFolder(folder), shuffle_seed=0).row(0, 1000)
    assert EOS_ID in row.labels
    assert EOS_ID not in row.inputs
    assert BOS_ID not in row.labels


def test_synthetic_rows_repeat_from_seed_and_place_alone():
    rows, again, other = SyntheticRows(1000, 5, 20), SyntheticRows(1000, 5, 20), SyntheticRows(1000, 6, 20)
    later = again.row(640, 64)
    for a, b in zip(rows.row(640, 64), later, strict=True):
        assert np.array_equal(a, b)
    assert not np.array_equal(rows.row(0, 64).inputs, later.inputs)
    assert not np.array_equal(other.row(640, 64).inputs, later.inputs)


def test_synthetic_tokens_are_uniform_and_in_the_vocabulary():
    row = SyntheticRows(10, 0, None).row(0, 20_000)
    for tokens in (row.inputs, row.labels):
        assert tokens.min() == 0
        assert tokens.max() == 9
        assert np.abs(np.bincount(tokens) - 2000).max() < 250  # six standard deviations
    assert np.array_equal(row.labels[:-1], row.inputs[1:])
    assert np.array_equal(row.positions, np.arange(20_000))


def test_synthetic_documents_have_the_mean_length():
    row = SyntheticRows(1000, 0, 50).row(0, 100_000)
    lengths = segment_lengths(torch.from_numpy(row.positions))
    assert 46 < np.mean(lengths) < 54
    assert 45 < np.std(lengths) < 55, "a geometric length spreads as far as its mean"
    # Labels are the next input inside a document; the last one is not the next document's first token.
    lasts = np.cumsum(lengths)[:-1] - 1
    inside = np.setdiff1d(np.arange(99_999), lasts)
    assert np.array_equal(row.labels[inside], row.inputs[inside + 1])
    assert np.mean(row.labels[lasts] == row.inputs[lasts + 1]) < 0.01


def test_synthetic_documents_of_one_token_and_longer_than_rows():
    assert SyntheticRows(10, 0, 1).row(0, 100).positions.tolist() == [0] * 100
    assert SyntheticRows(10, 0, 10**15).row(0, 100).positions.tolist() == list(range(100))


def test_draws_are_what_they_were():
    """Recorded runs must repeat: neither numpy nor a change here may move these."""
    assert draws.words("a", 2).tolist() == [15719197843237996371, 13027058848716181355]
    assert draws.permutation("a", 6).tolist() == [3, 4, 5, 2, 1, 0]
    assert draws.integers("a", 5, 100).tolist() == [85, 70, 65, 22, 30]
    assert sorted(draws.permutation("b", 50)) == list(range(50))
