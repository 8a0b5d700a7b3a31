"""torchtitan dataloaders over the rows of ``text`` and ``synthetic``.

The order of rows does not depend on the number of ranks. Row i of a forward pass goes to rank i // local_batch_size, and
passes follow each other in the stream, so the rows of one optimizer step are the same for any number of ranks, and for any
split of ``global_batch_size`` into ranks, rows per rank and gradient accumulation. The stream is endless and every rank
takes equally many rows of equal length: no rank can run out before another.

The state is one place in the whole stream, the same on every rank, so a checkpoint goes on with exactly the next row on
any number of ranks; also with another ``seq_len``, from the same token.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.tools.logging import logger

from europa_exp.config.schema import Data, DataSource
from europa_exp.data.corpus import DataError, open_documents
from europa_exp.data.packing import Row
from europa_exp.data.synthetic import SyntheticRows
from europa_exp.data.text import TextRows
from europa_exp.data.tokenizer import ByteTokenizer
from europa_exp.data.vocabulary import VOCAB_SIZE


class Rows(Protocol):
    """Rows from any place in an endless stream of tokens."""

    fingerprint: str
    description: str

    def row(self, position: int, seq_len: int) -> Row: ...


class PackedDataLoader(BaseDataLoader):
    """Hands out this rank's rows.

    Iterating gives ``({"input": tokens, "positions": positions}, labels)``, int64 tensors of
    ``[local_batch_size, seq_len]`` on the host, for ever. All iterators of a loader share its place in the stream. No label
    is ``IGNORE_INDEX`` (see ``packing``). ``packing.segment_lengths(positions)`` gives the segments of a batch.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        shuffle_seed: int
        """Seed of the document order or of the tokens."""

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: BaseTokenizer,
        seq_len: int,
        local_batch_size: int,
        **ignored: Any,
    ) -> None:
        """Built by the trainer. ``ignored`` holds what loaders with worker processes need (snapshot_every_n_steps).

        Raises:
            DataError: the documents can't be read, or the tokenizer does not fit the data.
        """
        self._seed = config.shuffle_seed
        self._ranks, self._rank = dp_world_size, dp_rank
        self._seq_len, self._batch = seq_len, local_batch_size
        self._rows = self._open(config, tokenizer)
        self._position = 0
        if dp_rank == 0:
            logger.info(f"Data {self._rows.fingerprint}: {self._rows.description}")

    @abstractmethod
    def _open(self, config: Any, tokenizer: BaseTokenizer) -> Rows: ...

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the data that are read (``europa_exp.data.fingerprint``)."""
        return self._rows.fingerprint

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            first = self._position + self._rank * self._batch * self._seq_len
            rows = [self._rows.row(first + i * self._seq_len, self._seq_len) for i in range(self._batch)]
            inputs, labels, positions = (torch.from_numpy(np.stack(column)) for column in zip(*rows))
            # Moved on before the batch is handed out: a checkpoint saved while the batch is in use goes on after it.
            self._position += self._ranks * self._batch * self._seq_len
            yield {"input": inputs, "positions": positions}, labels

    def state_dict(self) -> dict[str, Any]:
        """The place in the stream (tokens that all ranks together have been given) and what the stream is."""
        return {
            "position": self._position,
            "fingerprint": self._rows.fingerprint,
            "shuffle_seed": self._seed,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved place; an empty state changes nothing.

        Raises:
            DataError: the state is of other data or of another order, or not of this kind of loader.
        """
        if not state_dict:
            return
        expected = self.state_dict()
        if set(state_dict) != set(expected):
            raise DataError(
                "dataloader state",
                sorted(state_dict),
                f"this loader saves {sorted(expected)}",
                "the checkpoint is from another kind of dataloader: start from its weights alone",
            )
        for key, field in (("fingerprint", "data"), ("shuffle_seed", "data.shuffle_seed")):
            if state_dict[key] != expected[key]:
                raise DataError(
                    field,
                    expected[key],
                    f"the checkpoint was written with {state_dict[key]}, and its place in that stream means nothing in this one",
                    f"train on the {field} of the checkpoint, or start from its weights alone",
                )
        position = state_dict["position"]
        if not isinstance(position, int) or position < 0:
            raise DataError(
                "dataloader state",
                position,
                "the position must be an integer from 0",
                "the checkpoint is damaged",
            )
        self._position = position


class TextDataLoader(PackedDataLoader):
    """Text, one token a byte. ``dataset_path`` is the folder; without it Python's help texts."""

    @dataclass(kw_only=True, slots=True)
    class Config(PackedDataLoader.Config):
        pass

    def _open(self, config: Config, tokenizer: BaseTokenizer) -> Rows:
        if not isinstance(tokenizer, ByteTokenizer):
            raise DataError(
                "data.source",
                "sample",
                f"its tokens are bytes, not {type(tokenizer).__name__}'s",
                "use tokenizer_config()",
            )
        return TextRows(open_documents(config.dataset_path), config.shuffle_seed)


class SyntheticDataLoader(PackedDataLoader):
    """Random tokens; reads nothing."""

    @dataclass(kw_only=True, slots=True)
    class Config(PackedDataLoader.Config):
        vocab_size: int
        """Tokens are below this."""

        mean_document_length: int | None = None
        """Mean length of a document in tokens; None: a document fills its row."""

    def _open(self, config: Config, tokenizer: BaseTokenizer) -> Rows:
        return SyntheticRows(config.vocab_size, config.shuffle_seed, config.mean_document_length)


def dataloader_config(data: Data, vocab_size: int) -> PackedDataLoader.Config:
    """Config of the dataloader that ``data`` asks for: ``TextDataLoader.Config`` or ``SyntheticDataLoader.Config``.

    Reads no data yet; building it does.

    Args:
        data: the data group of the configuration.
        vocab_size: rows of the model's embedding (``model.vocab_size``).

    Raises:
        DataError: the vocabulary is too small for the data, or the mean document length is below 1.
    """
    if data.source is DataSource.sample:
        if vocab_size < VOCAB_SIZE:
            raise DataError(
                "model.vocab_size",
                vocab_size,
                f"data.source=sample has {VOCAB_SIZE} tokens (bytes, BOS, EOS, PAD)",
                f"set model.vocab_size to at least {VOCAB_SIZE}",
            )
        return TextDataLoader.Config(dataset="sample", dataset_path=data.path, shuffle_seed=data.shuffle_seed)
    if data.mean_document_length is not None and data.mean_document_length < 1:
        raise DataError(
            "data.mean_document_length",
            data.mean_document_length,
            "a document has at least 1 token",
            "give 1 or more",
        )
    return SyntheticDataLoader.Config(
        dataset="synthetic",
        vocab_size=vocab_size,
        shuffle_seed=data.shuffle_seed,
        mean_document_length=data.mean_document_length,
    )


def tokenizer_config(data: Data) -> ByteTokenizer.Config:
    """Config of the tokenizer that goes with ``data``: bytes. Synthetic data have no text; the trainer builds one anyway."""
    return ByteTokenizer.Config()
