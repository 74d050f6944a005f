"""Documents to rows of equal length."""

# R rows, S sequence
from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def pack(documents: Iterable[str], tokenizer: PreTrainedTokenizerBase, length: int) -> Tensor:
    """Concatenate documents, each followed by the end-of-text token, and cut them into rows.

    Args:
        documents: texts.
        tokenizer: must have an ``eos_token``.
        length: tokens a row, S ≥ 2. What is left at the end is dropped.

    Returns:
        ids of shape (R, S), int32 (to keep a corpus small in memory).

    Raises:
        ValueError: if the length is too small, the tokenizer has no end token, or the text does not fill one row.
    """
    if length < 2:
        raise ValueError(f"a row must have at least 2 tokens, but length is {length}")
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no eos_token, which separates documents; set tokenizer.eos_token")
    pieces = []
    for text in documents:
        # split: where a document spells out a special token, it is text and not the token
        encoded = tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)
        ids = encoded["input_ids"]
        pieces.append(torch.tensor([*ids, tokenizer.eos_token_id], dtype=torch.int32))
    stream = torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int32)
    rows = stream.numel() // length
    if rows == 0:
        raise ValueError(
            f"the corpus has {stream.numel()} tokens, which do not fill one row of {length}; use a shorter length"
        )
    return stream[: rows * length].view(rows, length)
