"""A tiny autoregressive model with a tokenizer, built in process."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sinklab.models import Loaded, SpecialIds
from tiny_diffusion import tiny_tokenizer


def tiny_llama(context: int = 64) -> Loaded:
    tokenizer = tiny_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    special = SpecialIds(bos=7, stop=(11,))
    return Loaded(LlamaForCausalLM(config).eval(), tokenizer, "tiny llama", None, "autoregressive", "llama", special)
