"""Helpers that the suites share: the message of a refused call, and a tiny model."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import LlamaConfig

from sinklab.core.subject import DiffusionLM, DiffusionLMConfig


def refusal(of: type[ValueError], call: Callable[..., object], *args: Any) -> str:
    """The message with which a call is refused, by an error of this class; empty if it is not
    refused.
    """
    try:
        call(*args)
    except of as error:
        return str(error)
    return ""


MASK_ID = 59
"""[MASK] of `tiny_model`, its last id."""


def tiny_model(**settings: Any) -> Any:
    """A random `DiffusionLM` of two layers, the same every time; ``settings`` are fields of its
    config.
    """
    sizes: dict[str, Any] = {
        "vocab_size": 60,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
    }
    sizes |= {"max_position_embeddings": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    backbone = LlamaConfig(initializer_range=0.3, **sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return DiffusionLM(DiffusionLMConfig(backbone, mask_token_id=MASK_ID, **settings)).eval()
