"""Text of a run: tokenizer, rows in their order, held-out rows, and a hash that identifies them."""

# R rows, S sequence
import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from sinklab.lab.data import (
    Pairs,
    Rows,
    StreamedRows,
    begin_rows,
    pack,
    pair_rows,
    read_corpus,
    read_pairs,
    row_start,
    train_tokenizer,
)
from sinklab.lab.data.rows import spread
from sinklab.lab.files import ordinary_files, refused
from sinklab.lab.training.settings import TrainSettings

Say = Callable[[str], object]


def silent(stage: str) -> None:
    """Say nothing of a stage."""


Documents = Pairs | Iterable[str]
ENTRIES = 2048
"""Entries of a tokenizer that is trained here."""
TOKENIZER_DOCUMENTS = 50_000
"""Documents of a stream that a tokenizer is trained on."""


@dataclass(frozen=True)
class Text:
    """Result of :func:`prepare`."""

    tokenizer: PreTrainedTokenizerBase
    training: Rows | StreamedRows
    """The rows of the whole run in its order."""
    heldout: Rows
    sha256: str


def prepare(
    settings: TrainSettings,
    say: Say = silent,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Text:
    """Tokenizer, training rows and held-out rows of a run.

    Args:
        settings: of the run.
        say: called with a short text before each stage.
        tokenizer: of the model that the run starts from; one that the settings name comes before
            it.

    Raises:
        ValueError: for a corpus without text or with too little, a tokenizer that cannot be loaded,
            or a stream if its rows begin with a start token.
    """
    say(f"reading {settings.corpus}")
    documents = _read(settings.corpus, settings)
    named = settings.tokenizer
    if named is not None and not named.isdecimal():
        tokenizer = load_tokenizer(named)
    if not isinstance(documents, Pairs) and not settings.streaming:
        documents = list(documents)
    if tokenizer is None or (named is not None and named.isdecimal()):
        tokenizer = _trained_tokenizer(documents, int(named or ENTRIES), say)
    if settings.row_start:
        begin_rows(tokenizer)
    if settings.streaming:
        return _streamed(settings, tokenizer)
    rows = _rows(documents, settings, tokenizer, say)
    if settings.heldout is not None:
        training = rows
        heldout = _heldout(settings, tokenizer)
    else:
        count = min(settings.heldout_rows, max(1, len(rows) // 20))
        count += -count % rows_together(settings)
        if len(rows) <= count:
            raise ValueError(
                "the corpus fills only one row, so nothing can be held out; give a heldout corpus "
                "or a shorter length"
            )
        training = rows.part(slice(-count))
        heldout = rows.part(slice(-count, None))
    sha256 = data_hash(tokenizer, training, heldout)
    training = replace(training, seed=settings.seed, total=settings.steps * settings.batch)
    return Text(tokenizer, training, heldout, sha256)


def rows_together(settings: TrainSettings) -> int:
    """Rows that one question is made into, and that are held out together."""
    if settings.pairs in ("published", "corrected"):
        return 2
    return 1


def _read(corpus: str, settings: TrainSettings) -> Documents:
    if settings.pairs != "none":
        return read_pairs(corpus)
    return read_corpus(corpus, only=settings.only)


def _trained_tokenizer(documents: Documents, entries: int, say: Say) -> PreTrainedTokenizerBase:
    say(f"training a tokenizer of {entries} entries")
    texts: Any = documents
    if isinstance(documents, Pairs):
        texts = (" ".join(pair.texts()) for pair in documents)
    elif not isinstance(documents, list):
        texts = islice(documents, TOKENIZER_DOCUMENTS)
    return train_tokenizer(texts, entries)


def _rows(
    documents: Documents,
    settings: TrainSettings,
    tokenizer: PreTrainedTokenizerBase,
    say: Say = silent,
) -> Rows:
    if not isinstance(documents, Pairs):
        say("packing the text into rows")
        ids_RS = pack(documents, tokenizer, settings.length)
        columns: dict[str, Any] = {}
        start = len(row_start(tokenizer))
        if start:
            # a start token is given: noise and loss spare it
            maskable_S = torch.arange(settings.length) >= start
            columns["maskable_RS"] = maskable_S.expand(ids_RS.shape)
        return Rows(ids_RS, **columns)
    rows, dropped = pair_rows(documents, tokenizer, settings.length, style=settings.pairs)
    kept = f"{len(documents) - dropped} questions in rows"
    if dropped:
        kept += f", {dropped} too long for {settings.length} tokens and left out"
    if documents.skipped:
        kept += f", {documents.skipped} lines of another form skipped"
    say(kept)
    return rows


def _heldout(settings: TrainSettings, tokenizer: PreTrainedTokenizerBase) -> Rows:
    rows = _rows(_read(str(settings.heldout), settings), settings, tokenizer)
    # evenly spaced, so that every document has its share; the two rows of a question stay together
    together = rows_together(settings)
    every = torch.arange(len(rows)).view(-1, together)
    return rows.part(every[spread(len(every), settings.heldout_rows // together)].flatten())


def _streamed(settings: TrainSettings, tokenizer: PreTrainedTokenizerBase) -> Text:
    if row_start(tokenizer):
        raise ValueError(
            "rows of this tokenizer begin with a start token, which a stream has not; leave out "
            "streaming"
        )
    stream = StreamedRows(
        settings.corpus,
        tokenizer,
        settings.length,
        only=settings.only,
        seed=settings.seed,
    )
    if settings.heldout is not None:
        heldout = _heldout(settings, tokenizer)
    else:
        heldout = stream.hold_out(settings.heldout_rows)
    return Text(tokenizer, stream, heldout, data_hash(tokenizer, heldout))


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or Hub name; no code of it is run.

    Raises:
        ValueError: if there is none.
    """
    with refused(f"no tokenizer can be loaded from {name!r}", OSError, ValueError):
        if Path(name).is_dir():
            ordinary_files(Path(name))
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)


def data_hash(tokenizer: PreTrainedTokenizerBase, *rows: Rows) -> str:
    """SHA-256 of the vocabulary and the packed rows, of a stream those held out: it identifies the
    data of a run.
    """
    digest = hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode())
    for part in rows:
        digest.update(json.dumps(list(part.ids_RS.shape)).encode())
        for ids in part.ids_RS.flatten().split(1 << 16):
            digest.update(ids.to(torch.int64).contiguous().numpy().data)
    return digest.hexdigest()
