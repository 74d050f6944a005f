"""Byte-level BPE tokenizers trained on one's own corpus."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<|pad|>", "<|endoftext|>", "<|mask|>")


def train_tokenizer(documents: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer; any text can be encoded and decoded without loss.

    Args:
        documents: training text.
        vocab_size: entries in all, the 256 bytes and the special tokens (pad, end of text, mask) included.

    Raises:
        ValueError: if the vocabulary cannot hold the bytes and special tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

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
        tokenizer_object=tokenizer, pad_token=pad, eos_token=end, mask_token=mask, clean_up_tokenization_spaces=False
    )
