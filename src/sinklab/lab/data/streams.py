"""Rows of a corpus larger than memory: read, tokenized, packed and shuffled while training, resumed
exactly.
"""

# S sequence, T tokens
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from itertools import count, islice, tee
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers import PreTrainedTokenizerBase

from sinklab.core.errors import limited, within_limits
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
        skip_rows: the first rows of the corpus, which are left out in every pass: they are held
            out.
        repeat: begin the corpus again at its end; otherwise the stream ends, without a last row
            that is not full.

    Raises:
        ValueError: for sizes that cannot be, and while it is read for a corpus that does not fill
            one row behind the held-out ones.
    """

    source: str | Path
    tokenizer: PreTrainedTokenizerBase
    length: int
    _: KW_ONLY
    only: str | None = None
    seed: int = 0
    shuffle_rows: int = limited(1024, at_least=1)
    skip_rows: int = limited(0, at_least=0)
    repeat: bool = True

    def __post_init__(self) -> None:
        check_packing(self.tokenizer, self.length)
        for field in dataclasses.fields(self):
            within_limits(field, getattr(self, field.name))
        self._start = (0, 0, Place())

    def start_at(self, row: int, cursor: Sequence[int] | Tensor) -> None:
        """Let the stream begin with row ``row``, exactly as it would have gone on.

        Args:
            row: number of the next row.
            cursor: of the row before it, or of any earlier one: the rows between are then read
                again.
        """
        block, passed, document, offset = (int(part) for part in cursor)
        self._start = (row, block, Place(passed, document, offset))

    def heldout(self) -> Rows:
        """The rows that the stream leaves out.

        Raises:
            ValueError: if the corpus does not have them.
        """
        ids = [ids_S for ids_S, _ in islice(self._packed(Place(), 0), self.skip_rows)]
        return Rows(torch.stack(ids))

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        row, number, here = self._start
        left = self._packed(here, self.skip_rows)
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

    def _packed(self, start: Place, skip_rows: int) -> Iterator[_Row]:
        """Rows from a place on: ids, and the place behind them."""
        ids_T = torch.empty(0, dtype=torch.int32)
        for place, piece_T in self._pieces(start, skip_rows):
            ids_T = torch.cat([ids_T, piece_T])
            while ids_T.numel() >= self.length:
                ids_S = ids_T[: self.length]
                ids_T = ids_T[self.length :]
                behind = replace(place, offset=place.offset + piece_T.numel() - ids_T.numel())
                yield ids_S, behind

    def _pieces(self, start: Place, skip_rows: int) -> Iterator[tuple[Place, Tensor]]:
        """The tokens of each document from a place on, and the place where they begin; every pass
        leaves out its first rows.
        """
        for passed in count(start.passed):
            begins = Place(passed)
            if passed == start.passed:
                begins = start
            from_the_top = begins == Place(passed)
            skipped = begins.offset
            if from_the_top:
                skipped = skip_rows * self.length
            seen = 0
            for document, ids_T in self._encoded(begins.document):
                seen += ids_T.numel()
                offset = min(skipped, ids_T.numel())
                skipped -= offset
                if offset < ids_T.numel():
                    yield Place(passed, document, offset), ids_T[offset:]
            if from_the_top and seen < (self.skip_rows + 1) * self.length:
                room = f"one row of {self.length}"
                if self.skip_rows:
                    room += f" behind {self.skip_rows} held-out rows"
                raise ValueError(
                    f"the corpus {self.source} has {seen} tokens, which do not fill {room}; use a "
                    "shorter length, fewer held-out rows or more text"
                )
            if not self.repeat:
                return

    def _encoded(self, start: int) -> Iterator[tuple[int, Tensor]]:
        """Number and ids of each document with text, from number ``start`` on."""
        documents = enumerate(corpus_documents(self.source, only=self.only, start=start), start)
        numbered, texts = tee((number, text) for number, text in documents if text.strip())
        ids = encode((text for _, text in texts), self.tokenizer)
        yield from zip((number for number, _ in numbered), ids, strict=True)
