"""Tokenizers of checkpoints, read as data: no class of a checkpoint is imported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import transformers
from transformers import (
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from sinklab.checkpoints.families import CheckpointPlan, Published, known_families
from sinklab.models.config import DiffusionLMConfig

PLAIN = ("TokenizersBackend", "PreTrainedTokenizerFast")
"""Classes that are their ``tokenizer.json`` and nothing besides."""


def read_tokenizer(folder: Path, plan: CheckpointPlan, name: str) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a checkpoint folder, or None if it has no tokenizer files.

    The class follows from family and files, never from code: that of the family, or where the files name a class that
    only code has, what it stands for with this backbone (Dream's is Qwen2's, also beside a model of another format).

    Args:
        folder: of the checkpoint.
        plan: of the checkpoint.
        name: for messages.

    Raises:
        ValueError: if there are tokenizer files and they cannot be read.
    """
    single = (folder / "tokenizer.json").is_file()
    pair = (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file()
    if not single and not pair and not (folder / "tokenizer.model").is_file():
        return None
    reader: Any = AutoTokenizer
    settings: dict[str, Any] = {"trust_remote_code": False}
    kind = _named_class(folder / "tokenizer_config.json")
    foreign = kind is not None and not hasattr(transformers, kind)
    family, own = plan.family, plan.family.tokenizer_class
    if foreign and pair:
        own = known_families()[plan.backbone.model_type].foreign_tokenizer_class or own
    if own is None and (foreign or kind in PLAIN):
        # beside a Qwen2 model transformers would put Qwen's own splitting of words in place of the file's
        own = PreTrainedTokenizerFast
    if own is not None and (single or own is not PreTrainedTokenizerFast):
        reader, settings = own, {}
    try:
        tokenizer = reader.from_pretrained(str(folder), **settings)
    except Exception as error:  # the tokenizers library raises bare Exception
        remedy = ""
        if not single and not pair:
            remedy = (
                "it has tokenizer.model only: install sentencepiece, or put a tokenizer.json beside it "
                "(AutoTokenizer's save_pretrained writes one where sentencepiece is installed); "
            )
        raise ValueError(f"{name} has a model but no tokenizer that can be read: {remedy}{error}") from error
    if family.chat_template and (family.replaces_chat_template or not tokenizer.chat_template):
        tokenizer.chat_template = family.chat_template
    return tokenizer


def _named_class(settings: Path) -> str | None:
    """The class that a ``tokenizer_config.json`` names; one that only code has is called ``code``."""
    try:
        named = json.loads(settings.read_text("utf-8"))
    except (OSError, ValueError):
        # absent, or the reader will say what is wrong with it
        return None
    if not isinstance(named, dict):
        return None
    kind = named.get("tokenizer_class")
    return "code" if "auto_map" in named else None if kind is None else str(kind)


def context(config: PreTrainedConfig, row: Published | None) -> int:
    """Tokens that a text may have: what the authors state, and no more than the positions allow."""
    one: Any = config
    limits = [row.context if row else None, getattr(config, "context", None)]
    if isinstance(config, DiffusionLMConfig):
        limits.append(one.text_positions)
    else:
        limits.append(one.max_position_embeddings)
    return min(limit for limit in limits if limit is not None)


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, rows: int, name: str = "the model") -> None:
    """Refuse a tokenizer with ids that an embedding of ``rows`` rows does not have; spare rows are fine.

    Raises:
        ValueError: naming the largest id.
    """
    token, largest = max(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    if largest >= rows:
        raise ValueError(
            f"every id of the tokenizer must have a row in the embedding of {name}, but its largest id is {largest} "
            f"({token!r}) and the embedding has {rows} rows; take the tokenizer that belongs to the model, or resize "
            "the embedding"
        )
