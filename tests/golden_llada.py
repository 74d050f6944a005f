"""The golden LLaDA checkpoint, read into a stock transformers Llama made bidirectional. Shared by
parity tests.
"""

import json
import re

import torch

from shared_data import shared

# B batch rows, S positions, M wanted positions, V vocabulary, D width

RENAMED = [
    (r"^model\.transformer\.blocks\.(\d+)\.attn_norm\.", r"model.layers.\1.input_layernorm."),
    (r"^model\.transformer\.blocks\.(\d+)\.([qkv])_proj\.", r"model.layers.\1.self_attn.\2_proj."),
    (r"^model\.transformer\.blocks\.(\d+)\.attn_out\.", r"model.layers.\1.self_attn.o_proj."),
    (
        r"^model\.transformer\.blocks\.(\d+)\.ff_norm\.",
        r"model.layers.\1.post_attention_layernorm.",
    ),
    (r"^model\.transformer\.blocks\.(\d+)\.ff_proj\.", r"model.layers.\1.mlp.gate_proj."),
    (r"^model\.transformer\.blocks\.(\d+)\.up_proj\.", r"model.layers.\1.mlp.up_proj."),
    (r"^model\.transformer\.blocks\.(\d+)\.ff_out\.", r"model.layers.\1.mlp.down_proj."),
    (r"^model\.transformer\.wte\.", "model.embed_tokens."),
    (r"^model\.transformer\.ln_f\.", "model.norm."),
    (r"^model\.transformer\.ff_out\.", "lm_head."),
]


def golden_folder(family):
    """The folder of one golden family; skips the calling test where the golden data are not at
    hand.
    """
    return shared(f"golden/{family}/cases.json").parent


def golden_cases(family):
    return json.loads((golden_folder(family) / "cases.json").read_text())


def golden_tensors(family):
    from safetensors.torch import load_file

    return load_file(golden_folder(family) / "expected.safetensors")


def load_llada(dtype=torch.float32):
    """A bidirectional `LlamaForCausalLM` with the golden weights; every tensor of both sides must
    find its partner.
    """
    from safetensors.torch import load_file
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = golden_folder("llada")
    raw = json.loads((folder / "config.json").read_text())
    config = LlamaConfig(
        vocab_size=raw["embedding_size"],
        hidden_size=raw["d_model"],
        intermediate_size=raw["mlp_hidden_size"],
        num_hidden_layers=raw["n_layers"],
        num_attention_heads=raw["n_heads"],
        num_key_value_heads=raw["n_kv_heads"],
        max_position_embeddings=raw["max_sequence_length"],
        rms_norm_eps=raw["rms_norm_eps"],
        rope_parameters={"rope_type": "default", "rope_theta": raw["rope_theta"]},
        tie_word_embeddings=raw["weight_tying"],
        attn_implementation="sdpa",
    )
    config.is_causal = False
    model = LlamaForCausalLM(config).eval().to(dtype)
    model.load_state_dict(
        {_native(name): w for name, w in load_file(folder / "model.safetensors").items()},
        strict=True,
    )
    return model


def llada_denoiser(model, attention_BS=None):
    """(ids_BS, wanted_BS) -> logits_MV; without an attention mask every position is real."""

    def denoiser(ids_BS, wanted_BS):
        mask_BS = None if attention_BS is None else attention_BS.long()
        hidden_BSD = model.model(ids_BS, attention_mask=mask_BS, use_cache=False).last_hidden_state
        return model.lm_head(hidden_BSD[wanted_BS])

    return denoiser


def _native(name):
    for pattern, replacement in RENAMED:
        name, hits = re.subn(pattern, replacement, name)
        if hits:
            return name
    raise KeyError(f"no rule for the golden tensor {name}")
