"""Private names of other packages still do what `sinklab.compat` says."""

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers import initialization as init

from sinklab import compat

CONFIG = LlamaConfig(
    vocab_size=20,
    hidden_size=8,
    intermediate_size=8,
    num_hidden_layers=1,
    num_attention_heads=2,
    attn_implementation="eager",
)


def test_an_attention_is_chosen_without_a_look_at_the_hub():
    config = LlamaConfig(**CONFIG.to_dict())
    compat.choose_attention(config, "sdpa")
    assert LlamaForCausalLM(config).config._attn_implementation == "sdpa"


def test_layers_that_may_not_be_divided_are_named():
    assert compat.indivisible_layers(LlamaForCausalLM(CONFIG)) == ["LlamaDecoderLayer"]


def test_what_is_marked_as_initialized_keeps_its_values():
    layer = nn.Linear(2, 2)
    before = layer.weight.detach().clone()
    compat.mark_initialized(layer.weight, True)
    compat.mark_initialized(layer.bias, False)
    init.zeros_(layer.weight)
    init.constant_(layer.bias, 3.0)
    assert torch.equal(layer.weight, before)
    assert (layer.bias == 3.0).all()
