"""A tiny autoregressive model with a tokenizer, built in process."""

import torch
from transformers import LlamaForCausalLM

from sinklab.lab.checkpoints import Loaded, SpecialIds
from tiny_diffusion import tiny_backbone, tiny_tokenizer


def tiny_llama(context=64):
    config = tiny_backbone(
        context, eos_token_id=None, pad_token_id=None, attn_implementation="sdpa"
    )
    torch.manual_seed(0)
    special = SpecialIds(bos=7, stop=(11,))
    return Loaded(
        LlamaForCausalLM(config).eval(),
        tiny_tokenizer(),
        "tiny llama",
        None,
        "autoregressive",
        "llama",
        special,
    )
