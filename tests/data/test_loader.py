"""Batches: the same stream for any number of ranks, exact resuming, and what is refused."""

import dataclasses
import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.models.common.attention import create_varlen_metadata_for_document

from europa_exp.config.rules.names import BYTE_VOCABULARY
from europa_exp.config.schema import Data, DataSource
from europa_exp.data.corpus import DataError
from europa_exp.data.fingerprint import fingerprint
from europa_exp.data.loader import (
    SyntheticDataLoader,
    TextDataLoader,
    dataloader_config,
    tokenizer_config,
)
from europa_exp.data.packing import segment_lengths
from europa_exp.data.tokenizer import ByteTokenizer
from europa_exp.data.vocabulary import VOCAB_SIZE

SAMPLE = Data(source=DataSource.sample, shuffle_seed=0)
SYNTHETIC = Data(source=DataSource.synthetic, shuffle_seed=0, mean_document_length=9)
both = pytest.mark.parametrize("data", [SAMPLE, SYNTHETIC], ids=["sample", "synthetic"])


def loader(data, *, ranks=1, rank=0, batch=1, seq_len=32, vocab_size=320):
    """As torchtitan's trainer builds it."""
    return dataloader_config(data, vocab_size).build(
        dp_world_size=ranks,
        dp_rank=rank,
        tokenizer=tokenizer_config(data).build(tokenizer_path="nowhere"),
        seq_len=seq_len,
        local_batch_size=batch,
        snapshot_every_n_steps=None,
    )


def take(iterator, n):
    """n batches as one tensor [n, 3, rows, seq_len]."""
    out = []
    for _ in range(n):
        inputs, labels = next(iterator)
        out.append(torch.stack([inputs["input"], labels, inputs["positions"]]))
    return torch.stack(out)


def stream(data, tokens, seq_len=32):
    """The first tokens of the stream as one rank reads them, row after row: [3, rows, seq_len]."""
    return (
        take(iter(loader(data, seq_len=seq_len)), tokens // seq_len).transpose(0, 1).reshape(3, -1, seq_len)
    )


@both
def test_batches_are_what_the_trainer_takes(data):
    made = loader(data, batch=3, seq_len=64)
    assert isinstance(made, BaseDataLoader)
    inputs, labels = next(iter(made))
    assert set(inputs) == {"input", "positions"}
    for tensor in (inputs["input"], inputs["positions"], labels):
        assert tensor.shape == (3, 64)
        assert tensor.dtype == torch.int64
        assert tensor.is_contiguous()
    assert made.fingerprint == fingerprint(data)
    assert (labels != IGNORE_INDEX).all()
    for tokens in (inputs["input"], labels):
        assert tokens.min() >= 0
        assert tokens.max() < 320


@both
@pytest.mark.parametrize(("ranks", "batch"), [(1, 8), (2, 4), (4, 2), (8, 1), (4, 1), (1, 1), (3, 2)])
def test_order_does_not_depend_on_ranks_or_accumulation(data, ranks, batch):
    """Row i of a forward pass is row i % batch of rank i // batch; passes follow each other in the stream."""
    passes = 24 // (ranks * batch)
    per_rank = [take(iter(loader(data, ranks=ranks, rank=r, batch=batch)), passes) for r in range(ranks)]
    rows = torch.cat(per_rank, dim=2).transpose(0, 1).reshape(3, 24, 32)
    assert torch.equal(rows, stream(data, 24 * 32))


@both
def test_every_rank_gets_as_many_rows_beyond_the_end_of_an_epoch(data, tmp_path):
    """Three rows an epoch, five ranks: nobody runs out."""
    (tmp_path / "only.txt").write_text("x" * 95)
    if data.source is DataSource.sample:
        data = dataclasses.replace(data, path=str(tmp_path))
    for rank in range(5):
        assert take(iter(loader(data, ranks=5, rank=rank)), 4).shape == (4, 3, 1, 32)


@both
@pytest.mark.parametrize("before", [0, 1, 5])
def test_resuming_gives_the_very_next_batch(data, before):
    first = loader(data, ranks=2, rank=1, batch=3)
    iterator = iter(first)
    for _ in range(before):
        next(iterator)
    state = json.loads(json.dumps(first.state_dict()))
    second = loader(data, ranks=2, rank=1, batch=3)
    second.load_state_dict(state)
    assert torch.equal(take(iter(second), 4), take(iterator, 4))


@both
def test_resuming_on_other_ranks_goes_on_in_the_same_stream(data):
    old = [loader(data, ranks=4, rank=r, batch=2) for r in range(4)]
    for one in old:
        take(iter(one), 3)
    states = [one.state_dict() for one in old]
    assert all(state == states[0] for state in states), "one state for all ranks"
    expected = stream(data, 48 * 32)[:, 24:]
    new = [loader(data, ranks=3, rank=r, batch=4) for r in range(3)]
    for one in new:
        one.load_state_dict(states[0])
    rows = torch.cat([take(iter(one), 2) for one in new], dim=2).transpose(0, 1).reshape(3, 24, 32)
    assert torch.equal(rows, expected)


def test_resuming_with_another_length_goes_on_from_the_same_token():
    old = loader(SAMPLE, batch=3, seq_len=32)
    take(iter(old), 1)
    new = loader(SAMPLE, seq_len=40)
    new.load_state_dict(old.state_dict())
    tokens = stream(SAMPLE, 480, seq_len=480)[:2].flatten(1)
    assert torch.equal(take(iter(new), 1)[0, :2].flatten(1), tokens[:, 96 : 96 + 40])


@both
def test_state_passes_through_a_distributed_checkpoint(data, tmp_path):
    old = loader(data, batch=2)
    iterator = iter(old)
    take(iterator, 3)
    dcp.save({"dataloader": old}, checkpoint_id=tmp_path / "step", no_dist=True)
    new = loader(data, batch=2)
    dcp.load({"dataloader": new}, checkpoint_id=tmp_path / "step", no_dist=True)
    assert new.state_dict() == old.state_dict() != loader(data, batch=2).state_dict()
    assert torch.equal(take(iter(new), 2), take(iterator, 2))


def test_loading_while_iterating_moves_the_iterator():
    one, other = loader(SAMPLE), loader(SAMPLE)
    iterator = iter(one)
    take(iterator, 1)
    take(iter(other), 7)
    one.load_state_dict(other.state_dict())
    assert torch.equal(take(iterator, 1), take(iter(other), 1))


def test_empty_state_starts_at_the_beginning():
    one = loader(SAMPLE)
    one.load_state_dict({})
    assert torch.equal(take(iter(one), 2), take(iter(loader(SAMPLE)), 2))


def test_state_of_other_data_or_order_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("other data")
    other = dataclasses.replace(SAMPLE, path=str(tmp_path))
    here = loader(SAMPLE)
    for data in (other, SYNTHETIC):
        with pytest.raises(
            DataError, match=f"data={here.fingerprint}: .* written with {fingerprint(data)}.*weights"
        ):
            here.load_state_dict(loader(data).state_dict())
    reordered = loader(dataclasses.replace(SAMPLE, shuffle_seed=3))
    with pytest.raises(DataError, match=r"data\.shuffle_seed=0: .* written with 3,"):
        here.load_state_dict(reordered.state_dict())


def test_state_of_another_loader_or_a_damaged_one_is_refused():
    here = loader(SAMPLE)
    with pytest.raises(DataError, match=r"dataloader state=\['dp_rank_0', 'world_size'\]"):
        here.load_state_dict({"dp_rank_0": b"", "world_size": 1})
    for position in (-1, "7", None):
        with pytest.raises(DataError, match="position must be an integer"):
            here.load_state_dict({**here.state_dict(), "position": position})


@both
@pytest.mark.parametrize("batch", [1, 4])
def test_attention_metadata_has_every_boundary_once(data, batch, tmp_path):
    """Documents of 15 bytes (16 tokens) end exactly on rows of 32."""
    for name in "abc":
        (tmp_path / name).write_text(name * 15)
    if data.source is DataSource.sample:
        data = dataclasses.replace(data, path=str(tmp_path))
    inputs, _ = next(iter(loader(data, batch=batch)))
    boundaries = create_varlen_metadata_for_document(inputs["positions"]).cu_seq_q
    assert boundaries[0] == 0
    assert boundaries[-1] == batch * 32
    assert torch.diff(boundaries).tolist() == segment_lengths(inputs["positions"])
    assert (torch.diff(boundaries) > 0).all()
    if data.source is DataSource.sample:
        assert torch.diff(boundaries).tolist() == [16] * (2 * batch)


def test_configs_say_what_was_asked_for():
    text = dataloader_config(dataclasses.replace(SAMPLE, path="texts", shuffle_seed=4), 259)
    assert isinstance(text, TextDataLoader.Config)
    assert (text.dataset_path, text.shuffle_seed) == ("texts", 4)
    random = dataloader_config(SYNTHETIC, 384_000)
    assert isinstance(random, SyntheticDataLoader.Config)
    assert (random.vocab_size, random.mean_document_length) == (384_000, 9)
    json.dumps([text.to_dict(), random.to_dict()])


def test_impossible_configs_are_refused():
    with pytest.raises(DataError, match=r"model\.vocab_size=256: .* 259 tokens .*at least 259"):
        dataloader_config(SAMPLE, 256)
    with pytest.raises(DataError, match=r"data\.mean_document_length=0: "):
        dataloader_config(dataclasses.replace(SYNTHETIC, mean_document_length=0), 320)


def test_the_check_before_submitting_knows_the_vocabulary():
    assert BYTE_VOCABULARY == VOCAB_SIZE


def test_text_needs_the_byte_tokenizer():
    class Words(BaseTokenizer):
        def encode(self, text):
            return [1]

        def decode(self, ids):
            return ""

        def get_vocab_size(self):
            return 2

    with pytest.raises(DataError, match="not Words's"):
        dataloader_config(SAMPLE, 320).build(
            dp_world_size=1, dp_rank=0, tokenizer=Words(), seq_len=8, local_batch_size=1
        )


def test_tokenizer_loses_nothing():
    tokenizer = tokenizer_config(SAMPLE).build(tokenizer_path="nowhere")
    assert isinstance(tokenizer, ByteTokenizer)
    assert tokenizer.get_vocab_size() == 259
    assert tokenizer.encode("aä") == [256, 97, 0xC3, 0xA4, 257]
    assert tokenizer.encode("a", add_bos=False, add_eos=False) == [97]
    assert tokenizer.encode("") == [tokenizer.bos_id, tokenizer.eos_id]
    every = bytes(range(256))
    assert tokenizer.decode_bytes([*tokenizer.encode(every), tokenizer.pad_id]) == every
    assert tokenizer.encode(every.decode("utf-8", "surrogateescape")) == tokenizer.encode(every)
    assert tokenizer.decode([0xC3, 0xA4, 0xFF]) == "ä\ufffd"
    for i in (-1, 259):
        with pytest.raises(ValueError, match=f"id {i} is not in"):
            tokenizer.decode([i])


def test_batches_hold_the_text():
    tokenizer = ByteTokenizer()
    inputs, labels = next(iter(loader(SAMPLE, seq_len=5000, batch=2)))
    text = tokenizer.decode(inputs["input"][0].tolist())
    assert "Python" in text or "the" in text.split()
    assert tokenizer.decode(labels[0, :-1].tolist())[:1000] == text[:1000]
