"""LLaDA and MMaDA checkpoints: a Llama under other names, its attention bidirectional."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config

from sinklab.checkpoints.weights import Part, Plan, Recipe, Shapes, field_of, require

# Fields that change the arithmetic, and the values whose arithmetic is that of the backbones.
REPRESENTED: dict[str, tuple] = {
    "block_type": ("llama",),
    "block_group_size": (1, None),
    "layer_norm_type": ("rms",),
    "layer_norm_with_affine": (True, None),
    "bias_for_layer_norm": (False, None),
    "attention_layer_norm": (False, None),
    "input_emb_norm": (False, None),
    "activation_type": ("silu",),
    "rope": (True,),
    "rope_full_precision": (True, None),
    "alibi": (False, None),
    "scale_logits": (False, None),
    "include_bias": (False, None),
    "clip_qkv": (None,),
    "embedding_dropout": (0, None),
    "residual_dropout": (0, None),
}
LAYER = {
    "attn_norm": "input_layernorm",
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj",
    "ff_norm": "post_attention_layernorm",
    "ff_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "ff_out": "mlp.down_proj",
}


def recipe(config: Mapping[str, Any], shapes: Shapes | None, family: str = "llada") -> Recipe:
    """Read a ``LLaDAModelLM`` (or, as ``mmada``, an ``MMadaModelLM``) config.

    Raises:
        ValueError: for a field that is missing or has no counterpart, by name.
    """
    require(config, family, REPRESENTED)
    backbone = _backbone(config, family)
    settings: dict[str, Any] = {
        "mask_token_id": config.get("mask_token_id"),
        "pad_token_id": config.get("pad_token_id"),
    }
    if family == "mmada":
        settings["text_vocab_size"] = _text_vocabulary(config, backbone.vocab_size)
    return Recipe(family, backbone, settings, _plan(backbone))


def _backbone(config: Mapping[str, Any], family: str) -> PreTrainedConfig:
    width, heads = field_of(config, family, "d_model"), field_of(config, family, "n_heads")
    # absent in old files: one key/value head for multi-query attention, else as many as heads
    kv_heads = config.get("n_kv_heads") or (1 if config.get("multi_query_attention") else heads)
    fields: dict[str, Any] = {
        "vocab_size": config.get("embedding_size") or field_of(config, family, "vocab_size"),
        "hidden_size": width,
        "intermediate_size": config.get("mlp_hidden_size") or field_of(config, family, "mlp_ratio") * width,
        "num_hidden_layers": field_of(config, family, "n_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": field_of(config, family, "max_sequence_length"),
        "rms_norm_eps": field_of(config, family, "rms_norm_eps"),
        "rope_parameters": {"rope_type": "default", "rope_theta": field_of(config, family, "rope_theta")},
        "tie_word_embeddings": bool(config.get("weight_tying")),
        "attention_dropout": config.get("attention_dropout") or 0.0,
        "initializer_range": config.get("init_std") or 0.02,
        "bos_token_id": config.get("bos_token_id"),
        "eos_token_id": config.get("eos_token_id"),
        # not here: the backbone would freeze the row of its padding, and LLaDA's padding is its eos
        "pad_token_id": None,
    }
    # Qwen2 is Llama with biases on q, k and v
    return Qwen2Config(**fields) if config.get("include_qkv_bias") else LlamaConfig(**fields)


def _text_vocabulary(config: Mapping[str, Any], vocabulary: int) -> int | None:
    if config.get("llm_vocab_size"):
        return config["llm_vocab_size"]
    return vocabulary - config["codebook_size"] if config.get("codebook_size") else None


def _plan(backbone: PreTrainedConfig) -> Plan:
    plan: Plan = {
        "model.transformer.wte.weight": (Part("model.embed_tokens.weight"),),
        "model.transformer.ln_f.weight": (Part("model.norm.weight"),),
    }
    if not backbone.tie_word_embeddings:
        plan["model.transformer.ff_out.weight"] = (Part("lm_head.weight"),)
    biased = ("q_proj", "k_proj", "v_proj") if backbone.model_type == "qwen2" else ()
    for layer in range(backbone.num_hidden_layers):
        for theirs, ours in LAYER.items():
            for kind in ("weight", "bias") if theirs in biased else ("weight",):
                name = f"model.transformer.blocks.{layer}.{theirs}.{kind}"
                plan[name] = (Part(f"model.layers.{layer}.{ours}.{kind}"),)
    return plan
