"""Helpers that the suites share: text of a registered value, the message of a refused call, and a
tiny model.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from transformers import LlamaConfig

from sinklab.core.models import DiffusionLM, DiffusionLMConfig
from sinklab.core.registry import Registry


def check_text(registry: Registry, value: Any) -> Any:
    """Hold a registered value, or the one that a text stands for, to the contract of run folders
    and the command line.

    Returns the value.

    Raises:
        AssertionError: unless its class is a documented frozen dataclass, and its text is read as
            it is.
        ValueError: if its class is not registered.
    """
    value = registry.parse(value)
    kind: Any = type(value)
    text = registry.as_text(value)
    is_record = dataclasses.is_dataclass(value)
    assert is_record and kind.__doc__, f"{text}: {kind.__name__} is no dataclass with a docstring"
    assert kind.__dataclass_params__.frozen, (
        f"{text}: {kind.__name__} can be changed; write @dataclass(frozen=True)"
    )
    again = registry.parse(text)
    assert again == value, f"{text!r} is read as {again!r}"
    assert hash(again) == hash(value), f"{text}: equal values have different hashes"
    return value


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
