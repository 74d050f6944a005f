"""Rows of a corpus larger than memory: read, tokenized, packed and shuffled while training, resumed
exactly.
"""

# S sequence, T tokens
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from itertools import count, islice, tee
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers import PreTrainedTokenizerBase

from sinklab.core.errors import check_count
from sinklab.lab.data.corpora import corpus_documents
from sinklab.lab.data.rows import Rows, check_packing, encode, place_generator, row_of_batch


@dataclass(frozen=True)
class Place:
    """A place between two tokens of a stream."""

    passed: int = 0
    """Whole passes over the corpus before it."""
    document: int = 0
    """Number of the document in the corpus, blank ones counted."""
    offset: int = 0
    """Tokens of that document before it."""


_Row = tuple[Tensor, Place]


@dataclass(eq=False)
class StreamedRows(IterableDataset[dict[str, Tensor]]):
    """Rows of a corpus as a stream, in an order that depends on the seed alone.

    Documents follow one another, each ended by the end-of-text token, and are cut into rows; a
    document longer than a row runs on over the next ones. After the last document the corpus begins
    again. Blocks of ``shuffle_rows`` rows are shuffled inside by a permutation that depends on
    (seed, block). Memory holds two blocks and some documents.

    Each row is ``input_ids`` (S,), ``row``: its number in the run, ``cursor`` (4,) int64: block,
    pass, document and offset in it from which reading resumes after this row.

    Args:
        source: a corpus, as for :func:`sinklab.lab.data.read_corpus`.
        tokenizer: must have an ``eos_token``.
        length: tokens a row, S ≥ 2.
        only: which documents, as for :func:`sinklab.lab.data.read_corpus`; all when left out.
        seed: of the order.
        shuffle_rows: rows of a block, K; 1 keeps the order of the corpus.
        repeat: begin the corpus again at its end; otherwise the stream ends, without a last row
            that is not full.

    Raises:
        ValueError: for sizes that cannot be, and while it is read for a corpus that does not fill
            one row.
    """

    source: str | Path
    tokenizer: PreTrainedTokenizerBase
    length: int
    _: KW_ONLY
    only: str | None = None
    seed: int = 0
    shuffle_rows: int = 1024
    repeat: bool = True

    def __post_init__(self) -> None:
        check_packing(self.tokenizer, self.length)
        check_count("shuffle_rows", self.shuffle_rows, "1 keeps the order")
        self._first = Place()
        self._start = (0, 0, self._first)

    def start_at(self, row: int, cursor: Sequence[int] | Tensor) -> None:
        """Let the stream begin with row ``row``, exactly as it would have gone on.

        Args:
            row: number of the next row.
            cursor: of the row before it, or of any earlier one: the rows between are then read
                again.
        """
        block, passed, document, offset = (int(part) for part in cursor)
        self._start = (row, block, Place(passed, document, offset))

    def hold_out(self, number: int) -> Rows:
        """The first rows, which every pass leaves out from now on. Raises ValueError if the corpus
        does not have them and one more.
        """
        *rows, (_, behind) = islice(self._packed(Place()), number + 1)
        if behind.passed:
            raise ValueError(
                f"the corpus {self.source} does not fill {number} held-out rows of {self.length} "
                "and one to learn from; use a shorter length, fewer held-out rows or more text"
            )
        self._first = rows[-1][1]
        self._start = (0, 0, self._first)
        return Rows(torch.stack([ids_S for ids_S, _ in rows]))

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        row, number, here = self._start
        left = self._packed(here)
        rows = list(islice(left, self.shuffle_rows))
        while rows:
            following = list[_Row]()
            first = number * self.shuffle_rows
            there = rows[-1][-1]
            order = torch.randperm(len(rows), generator=place_generator(self.seed, number)).tolist()
            for inside in range(max(0, row - first), len(rows)):
                # the next block is read row by row, so that a loader's worker never stops for a
                # whole one
                following += islice(left, 1)
                ids_S, _ = rows[order[inside]]
                block = number
                at = here
                if inside + 1 == self.shuffle_rows:
                    block = number + 1
                    at = there
                cursor = torch.tensor([block, at.passed, at.document, at.offset])
                yield row_of_batch({"input_ids": ids_S}, first + inside) | {"cursor": cursor}
            following += islice(left, self.shuffle_rows - len(following))
            rows = following
            here = there
            number += 1

    def _packed(self, start: Place) -> Iterator[_Row]:
        """Rows from a place on: ids, and the place behind them."""
        ids_T = torch.empty(0, dtype=torch.int32)
        for place, piece_T in self._pieces(start):
            ids_T = torch.cat([ids_T, piece_T])
            while ids_T.numel() >= self.length:
                ids_S = ids_T[: self.length]
                ids_T = ids_T[self.length :]
                behind = replace(place, offset=place.offset + piece_T.numel() - ids_T.numel())
                yield ids_S, behind

    def _pieces(self, start: Place) -> Iterator[tuple[Place, Tensor]]:
        """The tokens of each document from a place on, and the place where they begin."""
        for passed in count(start.passed):
            first = replace(self._first, passed=passed)
            begins = start if passed == start.passed else first
            tokens = 0
            for document, ids_T in self._encoded(begins.document):
                offset = begins.offset if document == begins.document else 0
                tokens += ids_T.numel() - offset
                if offset < ids_T.numel():
                    yield Place(passed, document, offset), ids_T[offset:]
            if begins == first and tokens < self.length:
                raise ValueError(
                    f"the corpus {self.source} has {tokens} tokens, which do not fill one row of "
                    f"{self.length}; use a shorter length or more text"
                )
            if not self.repeat:
                return

    def _encoded(self, start: int) -> Iterator[tuple[int, Tensor]]:
        """Number and ids of each document with text, from number ``start`` on."""
        documents = enumerate(corpus_documents(self.source, only=self.only, start=start), start)
        numbered, texts = tee((number, text) for number, text in documents if text.strip())
        ids = encode((text for _, text in texts), self.tokenizer)
        yield from zip((number for number, _ in numbered), ids, strict=True)
