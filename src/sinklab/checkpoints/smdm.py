"""SMDM and One-Token checkpoints: lit-gpt names, query, key and value in one matrix, sink and gate as tensors."""

# G key/value heads, P query heads for each of them, D head dim, E hidden size, V rows of the head
from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from sinklab.checkpoints.weights import Part, Plan, Recipe, Shapes, field_of, require

FAMILY = "smdm"
REPRESENTED: dict[str, tuple] = {
    "rotary_percentage": (1.0,),
    "condense_ratio": (1,),
    "parallel_residual": (False,),
    "shared_attention_norm": (False,),
    "bias": (False,),
    "_norm_class": ("RMSNorm", "FusedRMSNorm"),
    "_mlp_class": ("LLaMAMLP",),
}
LAYER = {
    "norm_1": "input_layernorm",
    "norm_2": "post_attention_layernorm",
    "attn.proj": "self_attn.o_proj",
    "mlp.swiglu.w1": "mlp.gate_proj",
    "mlp.swiglu.w2": "mlp.up_proj",
    "mlp.swiglu.w3": "mlp.down_proj",
}
EMBEDDING = "transformer.wte.weight"
# lit-gpt's build_rope_cache; its Config has no field for it
ROPE_THETA = 10000.0


NEEDED = ("padded_vocab_size", "n_embd", "n_layer", "n_head", "intermediate_size", "block_size", "norm_eps")


def missing_config(folder: Path) -> str:
    """What to do about a folder without ``config.json``, for its error message: SMDM's training writes none."""
    pickled = sorted(path.name for path in folder.glob("*.pth"))
    if not pickled:
        return ""
    return (
        f"; for SMDM's {pickled[0]} write one beside it, a JSON object with the fields of the lit-gpt Config it was "
        f"trained with: {', '.join(NEEDED)}, n_query_groups where key/value heads are shared, and, where they differ "
        f"from {', '.join(f'{field}={values[0]!r}' for field, values in REPRESENTED.items())}, these too"
    )


def recipe(config: Mapping[str, Any], shapes: Shapes | None) -> Recipe:
    """Read lit-gpt's ``Config``. The variant is seen in the tensors: a second row of the embedding beyond the text
    is the sink, ``attn.gate`` the gate. [MASK] is the row after the text.

    Raises:
        ValueError: for a field that is missing or has no counterpart, by name.
    """
    require(config, FAMILY, REPRESENTED)
    text = field_of(config, FAMILY, "padded_vocab_size")
    notes: tuple[str, ...] = ()
    if shapes is None:
        notes = ("whether there is a sink or a gate is seen in the weights, not in config.json: assumed none",)
    rows = (shapes or {}).get(EMBEDDING, (text + 1,))[0]
    gated = any(name.endswith(".attn.gate.weight") for name in shapes or ())
    sinks = 1 if rows == text + 2 else 0
    heads = field_of(config, FAMILY, "n_head")
    backbone = LlamaConfig(
        vocab_size=text + 1,
        hidden_size=field_of(config, FAMILY, "n_embd"),
        intermediate_size=field_of(config, FAMILY, "intermediate_size"),
        num_hidden_layers=field_of(config, FAMILY, "n_layer"),
        num_attention_heads=heads,
        num_key_value_heads=config.get("n_query_groups") or heads,
        # the sink takes a place of its own
        max_position_embeddings=field_of(config, FAMILY, "block_size") + sinks,
        rms_norm_eps=field_of(config, FAMILY, "norm_eps"),
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    settings = {
        "mask_token_id": text,
        "text_vocab_size": text,
        "output_vocab_size": text,
        "rope_dtype": "bfloat16",
        "sink_kind": "token" if sinks else "none",
        "sink_count": sinks,
        "gate": "elementwise" if gated else "none",
    }
    return Recipe(FAMILY, backbone, settings, _plan(backbone, sinks, gated), notes)


def _plan(backbone: LlamaConfig, sinks: int, gated: bool) -> Plan:
    vocabulary = backbone.vocab_size
    embedding: tuple[Part, ...] = (Part("model.embed_tokens.weight"),)
    if sinks:
        embedding = (
            Part("model.embed_tokens.weight", partial(torch.narrow, dim=0, start=0, length=vocabulary)),
            Part("sink_embeddings", partial(torch.narrow, dim=0, start=vocabulary, length=sinks)),
        )
    plan: Plan = {
        EMBEDDING: embedding,
        "transformer.ln_f.weight": (Part("model.norm.weight"),),
        "lm_head.weight": (Part("lm_head.weight"),),
    }
    groups = backbone.num_key_value_heads or backbone.num_attention_heads
    head_dim = backbone.hidden_size // backbone.num_attention_heads
    for layer in range(backbone.num_hidden_layers):
        here, there = f"transformer.h.{layer}.", f"model.layers.{layer}."
        plan |= {f"{here}{theirs}.weight": (Part(f"{there}{ours}.weight"),) for theirs, ours in LAYER.items()}
        plan[here + "attn.attn.weight"] = tuple(
            Part(
                f"{there}self_attn.{kind}_proj.weight",
                partial(_projection, kind=kind, groups=groups, head_dim=head_dim),
            )
            for kind in "qkv"
        )
        if gated:
            plan[here + "attn.gate.weight"] = (Part(f"gates.{layer}.weight"),)
    return plan


def _projection(fused: Tensor, kind: str, groups: int, head_dim: int) -> Tensor:
    """Query, key or value rows of a fused matrix, which holds group after group: its queries, its key, its value."""
    heads_GPDE = fused.view(groups, -1, head_dim, fused.shape[1])
    rows = {"q": slice(None, -2), "k": slice(-2, -1), "v": slice(-1, None)}[kind]
    return heads_GPDE[:, rows].flatten(0, 2)
