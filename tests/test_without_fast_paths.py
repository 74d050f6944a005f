"""Fast paths by purpose, and what they leave alone."""

import torch
from transformers import Olmo2Config, Olmo2Model

from sinklab.core.registry import (
    Registry,
    fast_decoders,
    fast_losses,
    fast_passes,
    fast_path,
)
from sinklab.extras.fast.decoder import FastDenoiser


def test_every_purpose_has_its_fast_path():
    purposes = (
        fast_decoders,
        fast_losses,
        fast_passes,
    )
    assert [list(paths) for paths in purposes] == [
        ["layers"],
        ["one_pass"],
        ["triton"],
    ]
    assert fast_path(Registry("fast nothing", "absent.folder"), "anything") is None


def test_layers_of_another_kind_are_asked_before_they_are_read():
    """OLMo-2 norms what a layer adds, not what it reads: it has no input_layernorm."""
    config = Olmo2Config(
        vocab_size=20,
        hidden_size=16,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    model = torch.nn.Module()
    model.model = Olmo2Model(config)
    assert not hasattr(model.model.layers[0], "input_layernorm")
    assert FastDenoiser.serving(model, None) is None
    assert fast_path(fast_decoders, model, None) is None
