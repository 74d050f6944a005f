"""Folders of small causal models, with biases and weights that are not zero and grouped keys."""

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tiny_models import SIZES

CAUSAL = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def save_causal(folder, family="llama", *, tokenizer=None, dtype=torch.float32, **fields):
    """The model that was saved."""
    config, model = CAUSAL[family]
    sizes = {**SIZES, "vocab_size": 280, "head_dim": 8}
    torch.manual_seed(0)
    causal = model(config(**sizes | fields)).eval()
    for name, tensor in causal.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(tensor)
    causal.to(dtype).save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return causal
