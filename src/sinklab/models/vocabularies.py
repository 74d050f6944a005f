"""Tokenizers and special ids of checkpoints, read as data: no class of a checkpoint is imported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import (
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Tokenizer,
)

from sinklab.models.published import CHAT_TEMPLATES, END_OF_TURN, NO_IDS, Published, SpecialIds


def read_tokenizer(folder: Path, family: str, name: str) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a checkpoint folder, or None if it has no tokenizer files.

    The class follows from the family, not from the checkpoint: LLaDA's and MMaDA's is a plain ``tokenizer.json``;
    Dream's names a class of its own but is Qwen2's with two more special tokens.

    Raises:
        ValueError: if there are tokenizer files and they cannot be read.
    """
    single = (folder / "tokenizer.json").is_file()
    pair = (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file()
    if not single and not pair and not (folder / "tokenizer.model").is_file():
        return None
    reader: Any = AutoTokenizer
    settings: dict[str, Any] = {"trust_remote_code": False}
    if family == "dream":
        reader, settings = Qwen2Tokenizer, {}
    elif single and family in ("llada", "mmada", "smdm"):
        reader, settings = PreTrainedTokenizerFast, {}
    try:
        tokenizer = reader.from_pretrained(str(folder), **settings)
    except Exception as error:  # the tokenizers library raises bare Exception
        raise ValueError(f"{name} has a model but no tokenizer that can be read: {error}") from error
    if family == "mmada" or (family == "llada" and not tokenizer.chat_template):
        tokenizer.chat_template = CHAT_TEMPLATES[family]
    return tokenizer


def special_ids(
    config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase | None, row: Published | None, family: str
) -> SpecialIds:
    """Special ids from the model's config, then the tokenizer, then the table of published checkpoints."""
    known = row.special if row else NO_IDS
    listed = _as_tuple(getattr(config, "eos_token_id", None)) or _as_tuple(getattr(tokenizer, "eos_token_id", None))
    eos = listed or _as_tuple(known.eos)
    eot = getattr(config, "eot_token_id", None)
    if eot is None and tokenizer is not None:
        eot = tokenizer.get_vocab().get(END_OF_TURN.get(family, ""))
    eot = known.eot if eot is None else eot

    def first(name: str, fallback: int | None) -> int | None:
        for source in (config, tokenizer):
            if (value := getattr(source, name, None)) is not None:
                return value
        return fallback

    return SpecialIds(
        mask=first("mask_token_id", known.mask),
        eos=eos[0] if eos else None,
        eot=eot,
        pad=first("pad_token_id", known.pad),
        bos=first("bos_token_id", known.bos),
        stop=tuple(dict.fromkeys([*eos, *_as_tuple(eot)])),
    )


def adopt(tokenizer: PreTrainedTokenizerBase | None, special: SpecialIds) -> None:
    """Tell a tokenizer its mask and pad token, where the checkpoint has them and left it untold."""
    if tokenizer is None:
        return
    for name, token_id in (("mask_token", special.mask), ("pad_token", special.pad)):
        if getattr(tokenizer, name) is None and token_id is not None and token_id < len(tokenizer):
            setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(token_id))


def _as_tuple(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
