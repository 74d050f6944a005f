"""Documents to rows of equal length."""

# R rows, S sequence
from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BATCH_DOCUMENTS = 64
_BATCH_CHARACTERS = 500_000


def pack(documents: Iterable[str], tokenizer: PreTrainedTokenizerBase, length: int) -> Tensor:
    """Concatenate documents, each followed by the end-of-text token, and cut them into rows.

    A document longer than a row runs on over the next ones.

    Args:
        documents: texts.
        tokenizer: must have an ``eos_token``.
        length: tokens a row, S ≥ 2. What is left at the end is dropped.

    Returns:
        ids of shape (R, S), int32 (to keep a corpus small in memory).

    Raises:
        ValueError: if the length is too small, the tokenizer has no end token, or the text does not fill one row.
    """
    return pack_with_documents(documents, tokenizer, length)[0]


def pack_with_documents(
    documents: Iterable[str], tokenizer: PreTrainedTokenizerBase, length: int
) -> tuple[Tensor, Tensor]:
    """As :func:`pack`, with the number of each token's document inside its row, (R, S) int32, from 0 in every row.

    The end-of-text token belongs to the document that it ends.
    """
    check_packing(tokenizer, length)
    pieces = list(encode(documents, tokenizer))
    stream = torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int32)
    rows = stream.numel() // length
    if rows == 0:
        raise ValueError(
            f"the corpus has {stream.numel()} tokens, which do not fill one row of {length}; use a shorter length"
        )
    numbers = torch.arange(len(pieces), dtype=torch.int32)
    owners = numbers.repeat_interleave(torch.tensor([piece.numel() for piece in pieces]))
    kept = rows * length
    return stream[:kept].view(rows, length), numbered_in_rows(owners[:kept].view(rows, length))


def numbered_in_rows(owners_RS: Tensor) -> Tensor:
    """Document numbers that start from 0 in every row, from numbers that run on over rows."""
    return owners_RS - owners_RS[:, :1]


def check_packing(tokenizer: PreTrainedTokenizerBase, length: int) -> None:
    """Refuse what cannot be packed.

    Raises:
        ValueError: if the length is below 2 or the tokenizer has no end token.
    """
    if length < 2:
        raise ValueError(f"a row must have at least 2 tokens, but length is {length}")
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no eos_token, which separates documents; set tokenizer.eos_token")


def encode(documents: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[Tensor]:
    """The ids of each document with the end-of-text token behind, int32."""
    for texts in _batches(documents):
        # split: where a document spells out a special token, it is text and not the token
        encoded: Any = tokenizer(texts, add_special_tokens=False, split_special_tokens=True, verbose=False)
        for ids in encoded["input_ids"]:
            yield torch.tensor([*ids, tokenizer.eos_token_id], dtype=torch.int32)


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    """Some documents at a time, because fast tokenizers work on those of a batch in parallel."""
    texts: list[str] = []
    size = 0
    for text in documents:
        texts.append(text)
        size += len(text)
        if len(texts) == _BATCH_DOCUMENTS or size >= _BATCH_CHARACTERS:
            yield texts
            texts, size = [], 0
    if texts:
        yield texts


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, rows: int) -> None:
    """Refuse a tokenizer with ids that a model's embedding of ``rows`` rows does not have; spare rows are fine.

    Raises:
        ValueError: naming the largest id.
    """
    token, largest = max(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    if largest >= rows:
        raise ValueError(
            f"every id of the tokenizer must have a row in the model's embedding, but its largest id is {largest} "
            f"({token!r}) and the embedding has {rows} rows; take the tokenizer that belongs to the model, or resize "
            "the embedding"
        )
