"""Rows of equal length in the order of a run, and batches of them."""

# R rows, S sequence, B batch
from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<|pad|>", "<|endoftext|>", "<|mask|>")
"""Padding, end of text and [MASK] of a tokenizer that is trained here."""
START_TOKEN = "<|startoftext|>"
_MARK = "row_start"


def spread(total: int, wanted: int) -> Tensor:
    """Numbers of so many of all rows, evenly spaced; all if there are no more."""
    count = max(1, min(total, wanted))
    return torch.arange(count) * total // count


def train_tokenizer(documents: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer; any text can be encoded and decoded without loss.

    Args:
        documents: training text.
        vocab_size: entries in all, the 256 bytes and the special tokens (pad, end of text, mask)
            included.

    Raises:
        ValueError: if the vocabulary cannot hold the bytes and special tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    least = 256 + len(SPECIAL_TOKENS)
    if vocab_size < least:
        raise ValueError(
            f"vocab_size must be at least {least} (256 bytes and {len(SPECIAL_TOKENS)} special "
            f"tokens), but is {vocab_size}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    pad, end, mask = SPECIAL_TOKENS
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        eos_token=end,
        mask_token=mask,
        clean_up_tokenization_spaces=False,
    )


def begin_rows(tokenizer: PreTrainedTokenizerBase) -> None:
    """Have every text and every packed row begin with the start token; the tokenizer remembers it
    when it is saved.

    A tokenizer without a start token is given one, with the id behind all others.
    """
    from tokenizers.processors import TemplateProcessing

    if tokenizer.bos_token is None:
        tokenizer.add_special_tokens({"bos_token": START_TOKEN})
    token = str(tokenizer.bos_token)
    if cast(Any, tokenizer("a")["input_ids"])[0] != tokenizer.bos_token_id:
        begins = TemplateProcessing(
            single=f"{token} $A", special_tokens=[(token, tokenizer.bos_token_id)]
        )
        cast(Any, tokenizer).backend_tokenizer.post_processor = begins
    tokenizer.init_kwargs[_MARK] = True


def row_start(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids with which a packed row begins: the start token if :func:`begin_rows` said so, else
    none.
    """
    if not tokenizer.init_kwargs.get(_MARK):
        return []
    return [int(cast(Any, tokenizer.bos_token_id))]


_BATCH_DOCUMENTS = 64
_BATCH_CHARACTERS = 4_000_000


def pack(documents: Iterable[str], tokenizer: PreTrainedTokenizerBase, length: int) -> Tensor:
    """Concatenate documents, each followed by the end-of-text token, and cut them into rows.

    A document longer than a row runs on over the next ones. Each row begins with :func:`row_start`,
    inside its length.

    Args:
        documents: texts.
        tokenizer: must have an ``eos_token``.
        length: tokens a row, S ≥ 2. The rest at the end is dropped.

    Returns:
        ids of shape (R, S), int32 (to keep a corpus small in memory).

    Raises:
        ValueError: if the length is too small, the tokenizer has no end token, or the text does not
            fill one row.
    """
    check_packing(tokenizer, length)
    pieces = list(encode(documents, tokenizer))
    stream = torch.cat([torch.empty(0, dtype=torch.int32), *pieces])
    start = torch.tensor(row_start(tokenizer), dtype=torch.int32)
    inside = length - len(start)
    rows = stream.numel() // inside
    if rows == 0:
        raise ValueError(
            f"the corpus has {stream.numel()} tokens, which do not fill one row of {length}; use "
            "a shorter length"
        )
    ids_RS = stream[: rows * inside].view(rows, inside)
    return torch.cat([start.expand(rows, -1), ids_RS], dim=1)


def check_packing(tokenizer: PreTrainedTokenizerBase, length: int) -> None:
    """Refuse a length or a tokenizer that cannot be packed with.

    Raises:
        ValueError: if the length is below 2 or the tokenizer has no end token.
    """
    if length < 2:
        raise ValueError(f"a row must have at least 2 tokens, but length is {length}")
    if tokenizer.eos_token_id is None:
        raise ValueError(
            "the tokenizer has no eos_token, which separates documents; set tokenizer.eos_token"
        )


def encode(documents: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[Tensor]:
    """The ids of each document with the end-of-text token behind, int32."""
    for texts in _batches(documents):
        for ids in encode_texts(texts, tokenizer):
            yield torch.tensor([*ids, tokenizer.eos_token_id], dtype=torch.int32)


def encode_texts(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """The ids of each text, nothing added; a text that spells out a special token stays text."""
    encoded: Any = tokenizer(
        texts, add_special_tokens=False, split_special_tokens=True, verbose=False
    )
    return encoded["input_ids"]


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    """Some documents at a time, because fast tokenizers work on those of a batch in parallel."""
    texts: list[str] = []
    size = 0
    for text in documents:
        texts.append(text)
        size += len(text)
        if len(texts) == _BATCH_DOCUMENTS or size >= _BATCH_CHARACTERS:
            yield texts
            texts = []
            size = 0
    if texts:
        yield texts


def place_generator(seed: int, *place: int) -> torch.Generator:
    """A CPU generator for one place (pass, block, …) of a run: it does not depend on earlier
    draws.
    """
    mixed = seed
    for part in place:
        # any odd multiplier spreads neighbouring places; the generator scrambles the rest
        mixed = (mixed * 0x9E3779B97F4A7C15 + part + 1) & (2**63 - 1)
    return torch.Generator().manual_seed(mixed)


COLUMNS = {"input_ids": "ids_RS", "maskable": "maskable_RS", "attention_mask": "attention_RS"}
"""Name in a batch -> tensor of `Rows`."""


@dataclass(eq=False)
class Rows(Dataset[dict[str, Tensor]]):
    """Rows in memory in the order in which a run consumes them: item n is row n of the run.

    Each pass over the rows has a permutation of its own that depends on (seed, pass) alone; so row
    n is the same on every rank, in every process and after a restart, and is read with a sequential
    sampler.

    Args:
        ids_RS: token ids, any integer type.
        maskable_RS: True for tokens that noise may mask; without it everywhere.
        attention_RS: True at tokens, False at padding.
        seed: of the order; None keeps it, for evaluation.
        total: rows of the whole run; one pass when left out.
    """

    ids_RS: Tensor
    _: KW_ONLY
    maskable_RS: Tensor | None = None
    attention_RS: Tensor | None = None
    seed: int | None = None
    total: int | None = None

    def __post_init__(self) -> None:
        stored = {key: getattr(self, name) for key, name in COLUMNS.items()}
        self.columns = {key: one for key, one in stored.items() if one is not None}
        self._order: tuple[int, Tensor] = (-1, torch.empty(0))

    def part(self, rows: slice | Tensor) -> Rows:
        """Some of the rows, in their own order."""
        some: dict[str, Any] = {COLUMNS[key]: own[rows] for key, own in self.columns.items()}
        return Rows(**some)

    def __len__(self) -> int:
        if self.total is None:
            return len(self.ids_RS)
        return self.total

    def place(self, row: int) -> int:
        """Index in the stored rows of row ``row`` of the run."""
        if self.seed is None:
            return row
        number, inside = divmod(row, len(self.ids_RS))
        if self._order[0] != number:
            generator = place_generator(self.seed, number)
            self._order = (number, torch.randperm(len(self.ids_RS), generator=generator))
        return int(self._order[1][inside])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        at = self.place(index)
        return row_of_batch({name: column[at] for name, column in self.columns.items()}, index)


def row_of_batch(columns: Mapping[str, Tensor], ordinal: int) -> dict[str, Tensor]:
    """One row as batches hold it: ids int64, the rest as it is, and the ordinal in the run."""
    ids_S = columns["input_ids"].long()
    return {**columns, "input_ids": ids_S, "row": torch.tensor(ordinal)}
