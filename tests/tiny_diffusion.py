"""Tiny diffusion models, built in process; the tokenizer that goes with them is the lab's."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import LlamaConfig, PreTrainedTokenizerFast

from sinklab.core.models import DiffusionLM, DiffusionLMConfig

if TYPE_CHECKING:
    from sinklab.lab.checkpoints import Loaded

TEXT = (
    "The old man sat by the sea, and the boy looked at the boats. “Will it rain?” he said; the "
    "wind was rising.\n"
)
VOCABULARY = 280
PAD, END, MASK = 0, 1, 2
"""ids that the tokenizer has too"""


@cache
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    from sinklab.lab.data import train_tokenizer

    return train_tokenizer([TEXT] * 4, VOCABULARY)


def tiny_backbone(context: int = 64, **changes: object) -> LlamaConfig:
    """Two layers, 32 wide, with weights large enough that attention is not uniform."""
    fields = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": context,
        "initializer_range": 0.3,
        "bos_token_id": None,
    }
    return LlamaConfig(**(fields | changes))


def tiny_model(
    sink: int = 0, *, seed: int = 0, context: int = 64, **settings: object
) -> DiffusionLM:
    backbone = tiny_backbone(context, pad_token_id=PAD, eos_token_id=END)
    kind = "token" if sink else "none"
    torch.manual_seed(seed)
    fields = {
        "mask_token_id": MASK,
        "sink_kind": kind,
        "sink_count": sink,
        **settings,
    }
    return DiffusionLM(DiffusionLMConfig(backbone, **fields)).eval()


def tiny_loaded(sink: int = 0, *, family: str = "diffusion", **settings: object) -> Loaded:
    from sinklab.lab.checkpoints import Loaded

    return Loaded(tiny_model(sink, **settings), tiny_tokenizer(), "tiny test model", None, family)


def save_tiny(folder: Path, sink: int = 0, **settings: object) -> Path:
    """A folder that `load` and the command line can read."""
    tiny_model(sink, **settings).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
