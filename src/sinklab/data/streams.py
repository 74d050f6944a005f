"""Rows of a corpus larger than memory: read, tokenized, packed and shuffled while training, resumed exactly."""

# R rows, S sequence, T tokens
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from sinklab.data.corpora import corpus_documents
from sinklab.data.rows import check_packing, encode, numbered_in_rows, place_generator, row_of_batch
from sinklab.errors import one_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Place:
    """A place between two tokens of a stream."""

    passed: int = 0
    """Whole passes over the corpus before it."""
    document: int = 0
    """Number of the document in the corpus, blank ones counted."""
    offset: int = 0
    """Tokens of that document before it."""


@dataclass(eq=False)
class StreamedRows(IterableDataset[dict[str, Tensor]]):
    """Rows of a corpus as a stream, in an order that depends on the seed alone.

    Documents follow one another, each ended by the end-of-text token, and are cut into rows; a document longer than a
    row runs on over the next ones. After the last document the corpus begins again. Blocks of ``shuffle_rows`` rows
    are shuffled inside by a permutation that depends on (seed, block). Memory holds two blocks and some documents.

    Each row is ``input_ids`` (S,), ``row``: its number in the run, ``cursor`` (4,) int64: block, pass, document and
    offset in it from which reading resumes after this row, and with ``separate`` documents ``documents`` (S,).

    Args:
        source: a corpus, as for :func:`sinklab.data.read_corpus`.
        tokenizer: must have an ``eos_token``.
        length: tokens a row, S ≥ 2.
        text_field: the field that holds the text.
        seed: of the order.
        shuffle_rows: rows of a block, K; 1 keeps the order of the corpus.
        documents: ``joined``, or ``separate`` to tell tokens of different documents in a row apart.
        skip_rows: the first rows of the corpus, which are left out in every pass: they are held out.
        repeat: begin the corpus again at its end; otherwise the stream ends, without a last row that is not full.

    Raises:
        ValueError: for sizes that cannot be, and while it is read for a corpus that does not fill one row behind the
            held-out ones, or more than one worker: several would cut the stream differently.
    """

    source: str | Path
    tokenizer: PreTrainedTokenizerBase
    length: int
    _: KW_ONLY
    text_field: str = "text"
    seed: int = 0
    shuffle_rows: int = 1024
    documents: str = "joined"
    skip_rows: int = 0
    repeat: bool = True

    def __post_init__(self) -> None:
        check_packing(self.tokenizer, self.length)
        if self.shuffle_rows < 1:
            raise ValueError(f"shuffle_rows must be at least 1, which keeps the order, but is {self.shuffle_rows}")
        if self.skip_rows < 0:
            raise ValueError(f"skip_rows must be at least 0, but is {self.skip_rows}")
        one_of("documents", self.documents, ("joined", "separate"))
        self._start = (0, 0, Place())

    def start_at(self, row: int, cursor: Sequence[int] | Tensor) -> None:
        """Let the stream begin with row ``row``, exactly as it would have gone on.

        Args:
            row: number of the next row.
            cursor: of the row before it, or of any earlier one: what lies between is then read again.

        Raises:
            ValueError: if the cursor lies behind the row.
        """
        block, passed, document, offset = (int(part) for part in cursor)
        if row // self.shuffle_rows < block:
            raise ValueError(
                f"a stream resumes from a cursor of an earlier row, but row {row} is in block "
                f"{row // self.shuffle_rows} of {self.shuffle_rows} rows and the cursor in block {block}"
            )
        self._start = (row, block, Place(passed, document, offset))

    def heldout(self) -> tuple[Tensor, Tensor]:
        """The rows that the stream leaves out: ids (R, S) and document numbers (R, S), int32.

        Raises:
            ValueError: if the corpus does not have them.
        """
        shape = (self.skip_rows, self.length)
        wanted = self.skip_rows * self.length
        ids_T, owners_T = _Tokens(replace(self, skip_rows=0, repeat=False), Place()).take(wanted)
        if ids_T.numel() < wanted:
            raise self._too_short(ids_T.numel())
        return ids_T.view(shape), numbered_in_rows(owners_T.view(shape))

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        worker = get_worker_info()
        if worker is not None and worker.num_workers > 1:
            raise ValueError(f"a stream is read by 0 or 1 workers, but there are {worker.num_workers}; set workers=1")
        row, block, place = self._start
        tokens = _Tokens(self, place)
        left = self._cut(tokens)
        here, rows = place, list(islice(left, self.shuffle_rows))
        for number in count(block):
            there, following = tokens.place, list[dict[str, Tensor]]()
            first = number * self.shuffle_rows
            order = torch.randperm(len(rows), generator=place_generator(self.seed, number)).tolist()
            for inside in range(max(0, row - first), len(rows)):
                # the next block is read row by row, so that a loader's worker never stops for a whole one
                following += islice(left, 1)
                whole = inside + 1 == self.shuffle_rows
                at = there if whole else here
                cursor = torch.tensor([number + whole, at.passed, at.document, at.offset])
                yield row_of_batch(rows[order[inside]], first + inside) | {"cursor": cursor}
            following += islice(left, self.shuffle_rows - len(following))
            if not following:
                return
            here, rows = there, following

    def _cut(self, tokens: _Tokens) -> Iterator[dict[str, Tensor]]:
        while True:
            ids_S, owners_S = tokens.take(self.length)
            if ids_S.numel() < self.length:
                return
            yield {"input_ids": ids_S} | ({"documents": owners_S - owners_S[0]} if self.documents == "separate" else {})

    def _encoded(self, start: int) -> Iterator[tuple[int, Tensor]]:
        """Number and ids of each document with text, from number ``start`` on."""
        numbers: list[int] = []

        def texts() -> Iterator[str]:
            documents = corpus_documents(self.source, text_field=self.text_field, start=start)
            for number, text in enumerate(documents, start):
                if text.strip():
                    numbers.append(number)
                    yield text

        for ids in encode(texts(), self.tokenizer):
            yield numbers.pop(0), ids

    def _too_short(self, tokens: int) -> ValueError:
        """The error for a corpus that does not fill one row behind those that are held out."""
        held = f" behind {self.skip_rows} held-out rows" if self.skip_rows else ""
        return ValueError(
            f"the corpus {self.source} has {tokens} tokens, which do not fill one row of {self.length}{held}; use a "
            "shorter length, fewer held-out rows or more text"
        )


class _Tokens:
    """A corpus as one endless run of tokens that can start anywhere."""

    def __init__(self, rows: StreamedRows, place: Place) -> None:
        self.rows = rows
        self.place = place
        self._pieces = self._read(place)
        self._left = torch.empty(0, dtype=torch.int32)
        self._owner = -1

    def take(self, wanted: int) -> tuple[Tensor, Tensor]:
        """The next tokens and the running numbers of their documents; fewer only at the end of the stream."""
        ids: list[Tensor] = []
        owners: list[Tensor] = []
        while wanted:
            if not self._left.numel():
                following = next(self._pieces, None)
                if following is None:
                    break
                self.place, self._left = following
                self._owner += 1
            part, self._left = self._left[:wanted], self._left[wanted:]
            self.place = replace(self.place, offset=self.place.offset + part.numel())
            wanted -= part.numel()
            ids.append(part)
            owners.append(torch.full_like(part, self._owner))
        nothing = torch.empty(0, dtype=torch.int32)
        return torch.cat([nothing, *ids]), torch.cat([nothing, *owners])

    def _read(self, start: Place) -> Iterator[tuple[Place, Tensor]]:
        for passed in count(start.passed):
            begins = start if passed == start.passed else Place(passed)
            from_the_top = begins == Place(passed)
            seen = 0
            held = self.rows.skip_rows * self.rows.length if from_the_top else 0
            for document, ids in self.rows._encoded(begins.document):
                seen += ids.numel()
                offset = begins.offset if document == begins.document else 0
                # held-out rows are left out in every pass
                skipped = min(held, ids.numel()) if from_the_top else offset
                held = max(0, held - ids.numel())
                if skipped < ids.numel():
                    yield Place(passed, document, skipped), ids[skipped:]
            if from_the_top and seen < (self.rows.skip_rows + 1) * self.rows.length:
                raise self.rows._too_short(seen)
            if not self.rows.repeat:
                return
