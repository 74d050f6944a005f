"""What a run learns from: tokenizer, rows in their order, held-out rows, and a hash that says what they were."""

# R rows, S sequence
from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from sinklab.data.corpora import fingerprint, read_corpus
from sinklab.data.pairs import Pairs, pair_rows, read_pairs
from sinklab.data.rows import Rows, pack_with_documents, train_tokenizer
from sinklab.data.streams import StreamedRows
from sinklab.training.settings import TrainSettings

Say = Callable[[str], object]
TOKENIZER_DOCUMENTS = 50_000
"""Documents of a stream that a tokenizer is trained on."""


@dataclass(frozen=True)
class Columns:
    """Rows in memory, by the names that :class:`~sinklab.data.Rows` has for them."""

    ids_RS: Tensor
    documents_RS: Tensor | None = None
    maskable_RS: Tensor | None = None
    attention_RS: Tensor | None = None

    def __getitem__(self, rows: slice | Tensor) -> Columns:
        extra = (self.documents_RS, self.maskable_RS, self.attention_RS)
        return Columns(self.ids_RS[rows], *(None if part is None else part[rows] for part in extra))

    def __len__(self) -> int:
        return self.ids_RS.shape[0]

    def rows(self, **order: Any) -> Rows:
        """In the order of a run (arguments ``seed`` and ``total`` of :class:`~sinklab.data.Rows`)."""
        return Rows(
            self.ids_RS,
            documents_RS=self.documents_RS,
            maskable_RS=self.maskable_RS,
            attention_RS=self.attention_RS,
            **order,
        )


@dataclass(frozen=True)
class Text:
    """What :func:`prepare` returns."""

    tokenizer: PreTrainedTokenizerBase
    training: Columns | StreamedRows
    heldout: Columns
    steps: int
    sha256: str

    def rows(self, settings: TrainSettings) -> Rows | StreamedRows:
        """The rows of the whole run in its order."""
        if isinstance(self.training, StreamedRows):
            return self.training
        return self.training.rows(seed=settings.seed, total=self.steps * settings.batch)


def prepare(
    settings: TrainSettings, say: Say = lambda text: None, tokenizer: PreTrainedTokenizerBase | None = None
) -> Text:
    """Tokenizer, training rows and held-out rows of a run.

    Args:
        settings: of the run.
        say: called with a short text before each stage.
        tokenizer: of the model that the run starts from; one that the settings name comes before it.

    Raises:
        ValueError: for a corpus without text or with too little, or a tokenizer that cannot be loaded.
    """
    say(f"reading {settings.corpus}")
    if settings.tokenizer is not None:
        tokenizer = load_tokenizer(settings.tokenizer)
    if settings.streaming:
        return _streamed(settings, say, tokenizer)
    if settings.pairs == "none":
        documents = list(read_corpus(settings.corpus, text_field=settings.text_field))
        if tokenizer is None:
            say(f"training a tokenizer of {settings.vocab_size} entries on {len(documents)} documents")
            tokenizer = train_tokenizer(documents, settings.vocab_size)
        say("packing the text into rows")
        rows = _packed(documents, settings, tokenizer)
    else:
        tokenizer, rows = _pairs(settings, say, tokenizer)
    if settings.heldout is not None:
        training, heldout = rows, _heldout(settings, tokenizer)
    else:
        count = min(settings.heldout_rows, max(1, len(rows) // 20))
        count += -count % rows_together(settings)
        if len(rows) <= count:
            raise ValueError(
                "the corpus fills only one row, so nothing can be held out; give a heldout corpus or a shorter length"
            )
        training, heldout = rows[:-count], rows[-count:]
    steps = settings.steps
    if settings.epochs is not None:
        steps = math.ceil(settings.epochs * len(training) / settings.batch)
    sha256 = data_hash(tokenizer, training.ids_RS, heldout.ids_RS)
    return Text(tokenizer, training, heldout, steps, sha256)


def rows_together(settings: TrainSettings) -> int:
    """Rows that one question is made into, and that are held out together."""
    return 2 if settings.pairs in ("published", "corrected") else 1


def _packed(documents: Any, settings: TrainSettings, tokenizer: PreTrainedTokenizerBase) -> Columns:
    ids_RS, documents_RS = pack_with_documents(documents, tokenizer, settings.length)
    return Columns(ids_RS, documents_RS if settings.documents == "separate" else None)


def _heldout(settings: TrainSettings, tokenizer: PreTrainedTokenizerBase) -> Columns:
    assert settings.heldout is not None
    if settings.pairs != "none":
        rows = _paired(read_pairs(settings.heldout), settings, tokenizer)[0]
    else:
        rows = _packed(read_corpus(settings.heldout, text_field=settings.text_field), settings, tokenizer)
    # evenly spaced, so that every document has its share; the two rows of a question stay together
    together = rows_together(settings)
    chosen = torch.arange(len(rows)).view(-1, together)[:: max(1, len(rows) // settings.heldout_rows)].flatten()
    return rows[chosen[: max(together, settings.heldout_rows)]]


def _pairs(
    settings: TrainSettings, say: Say, tokenizer: PreTrainedTokenizerBase | None
) -> tuple[PreTrainedTokenizerBase, Columns]:
    pairs = read_pairs(settings.corpus)
    if tokenizer is None:
        say(f"training a tokenizer of {settings.vocab_size} entries on {len(pairs)} questions")
        tokenizer = train_tokenizer([" ".join(pair.texts()) for pair in pairs], settings.vocab_size)
    rows, counts = _paired(pairs, settings, tokenizer)
    dropped = f", {counts.dropped} too long for {settings.length} tokens and left out" if counts.dropped else ""
    skipped = f", {pairs.skipped} lines of another form skipped" if pairs.skipped else ""
    say(f"{counts.lines} questions in rows{dropped}{skipped}")
    return tokenizer, rows


def _paired(pairs: Pairs, settings: TrainSettings, tokenizer: PreTrainedTokenizerBase) -> tuple[Columns, Any]:
    made = pair_rows(pairs, tokenizer, settings.length, style=settings.pairs, answer_length=settings.answer_length)
    return Columns(made.ids_RS, None, made.maskable_RS, made.attention_RS), made.counts


def _streamed(settings: TrainSettings, say: Say, tokenizer: PreTrainedTokenizerBase | None) -> Text:
    if tokenizer is None:
        say(f"training a tokenizer of {settings.vocab_size} entries on the first {TOKENIZER_DOCUMENTS} documents")
        documents = read_corpus(settings.corpus, text_field=settings.text_field)
        tokenizer = train_tokenizer(islice(documents, TOKENIZER_DOCUMENTS), settings.vocab_size)
    stream = StreamedRows(
        settings.corpus,
        tokenizer,
        settings.length,
        text_field=settings.text_field,
        seed=settings.seed,
        shuffle_rows=settings.shuffle_rows,
        documents=settings.documents,
        skip_rows=0 if settings.heldout is not None else settings.heldout_rows,
    )
    if settings.heldout is not None:
        heldout = _heldout(settings, tokenizer)
    else:
        ids_RS, documents_RS = stream.heldout()
        heldout = Columns(ids_RS, documents_RS if settings.documents == "separate" else None)
    glance = fingerprint(settings.corpus, text_field=settings.text_field)
    sha256 = hashlib.sha256((glance + data_hash(tokenizer, heldout.ids_RS)).encode()).hexdigest()
    return Text(tokenizer, stream, heldout, settings.steps, sha256)


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or Hub name; no code of it is run.

    Raises:
        ValueError: if there is none.
    """
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"no tokenizer can be loaded from {name!r}: {reason}") from error


def data_hash(tokenizer: PreTrainedTokenizerBase, *rows: Tensor) -> str:
    """SHA-256 of the vocabulary and the packed rows: what a run learned from."""
    digest = hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode())
    for ids_RS in rows:
        digest.update(json.dumps(list(ids_RS.shape)).encode() + ids_RS.to(torch.int64).contiguous().numpy().tobytes())
    return digest.hexdigest()
