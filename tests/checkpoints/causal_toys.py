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

CAUSAL = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def save_causal(folder, family="llama", *, tokenizer=None, dtype=torch.float32, **fields):
    """The model that was saved."""
    config, model = CAUSAL[family]
    sizes = {
        "vocab_size": 280,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,
        "head_dim": 8,
    }
    torch.manual_seed(0)
    causal = model(config(**{**sizes, **fields})).eval()
    for name, tensor in causal.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(tensor)
    causal.to(dtype).save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return causal
