"""The table of architectures: tiny configs of transformers, shared by the test and the
benchmark.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

LAYERS, HEADS, WINDOW, VOCABULARY = 2, 4, 5, 64
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {"num_key_value_heads": 2}
EXPERTS = {
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
WINDOWS = {"sliding_window": WINDOW}
MIXED = WINDOWS | {"layer_types": ["sliding_attention", "full_attention"], "head_dim": 8}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
LATENT |= {
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
}
LATENT |= {"num_key_value_heads": HEADS, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
OLD = {"n_embd": 32, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 64, "n_inner": 48}
MAMBA = {
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
}
MAMBA |= {"mamba_n_groups": 1, "mamba_chunk_size": 8}
PERIOD = (
    GROUPED | EXPERTS | {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False}
)
RECURRENT = GROUPED | {
    "attention_window_size": WINDOW,
    "lru_width": 32,
    "block_types": ["recurrent", "attention"],
}
LINEAR = GROUPED | EXPERTS | {"layer_types": ["linear_attention", "full_attention"], "head_dim": 8}
LINEAR |= {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "shared_expert_intermediate_size": 16,
}
LINEAR |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
LOCAL = {"num_layers": LAYERS, "num_heads": HEADS, "attention_types": [[["global", "local"], 1]]}
XLNET = {
    "max_position_embeddings": None,
    "d_model": 32,
    "n_layer": LAYERS,
    "n_head": HEADS,
    "d_inner": 48,
}
MODERN = {
    "local_attention": 4,
    "global_attn_every_n_layers": 2,
    "cls_token_id": 1,
    "sep_token_id": 2,
}


@dataclass(frozen=True)
class Architecture:
    """One kind of model."""

    name: str
    """`model_type` of transformers."""
    kind: str
    """"decoder" or "encoder"."""
    form: str
    """What is particular about its attention."""
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def cls(self):
        """The class of transformers that is run."""
        from transformers import AutoModel, AutoModelForCausalLM

        return {"decoder": AutoModelForCausalLM, "encoder": AutoModel}[self.kind]

    def model(self, attention="sdpa"):
        """With weights wide enough for attention to be uneven."""
        from transformers import AutoConfig

        def built(attention):
            fields = {
                name: value for name, value in (COMMON | self.fields).items() if value is not None
            }
            config = AutoConfig.for_model(self.name, **fields)
            torch.manual_seed(0)
            return self.cls.from_config(config, attn_implementation=attention)

        try:
            model = built(attention)
        except ValueError:
            # it has no other
            model = built("eager")
        generator = torch.Generator().manual_seed(1)
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and "embed" not in name:
                parameter.data.normal_(0, 0.25, generator=generator)
        if self.kind != "encoder":
            # every row is to have the same number of steps
            model.generation_config.eos_token_id = None
        return model.eval()


def _of(kind, form, *names, **fields):
    return [Architecture(name, kind, form, fields) for name in names]


ZOO = [
    *_of("decoder", "heads of their own", "phi", "persimmon", "olmo", "biogpt", "gpt_neox"),
    *_of("decoder", "heads of their own", "gpt2", **OLD),
    *_of("decoder", "heads of their own", "opt", ffn_dim=48, word_embed_proj_dim=32),
    *_of("decoder", "one key head", "gpt_bigcode", multi_query=True, **OLD),
    *_of(
        "decoder",
        "one key head",
        "falcon",
        multi_query=True,
        new_decoder_architecture=False,
        alibi=False,
    ),
    *_of(
        "decoder",
        "bias by distance",
        "falcon",
        multi_query=True,
        new_decoder_architecture=False,
        alibi=True,
    ),
    *_of(
        "decoder",
        "grouped heads",
        "llama",
        "qwen2",
        "qwen3",
        "olmo2",
        "granite",
        "nemotron",
        "smollm3",
        **GROUPED,
    ),
    *_of("decoder", "grouped heads", "gemma", "glm", "helium", "seed_oss", head_dim=8, **GROUPED),
    *_of("decoder", "grouped heads", "phi3", "cohere", "arcee", "ernie4_5", **GROUPED),
    *_of(
        "decoder",
        "grouped heads, experts",
        "mixtral",
        "olmoe",
        "qwen3_moe",
        head_dim=8,
        **GROUPED,
        **EXPERTS,
    ),
    *_of("decoder", "windows", "mistral", "starcoder2", **GROUPED, **WINDOWS),
    *_of("decoder", "windows and full", "gemma3_text", "cohere2", "exaone4", **GROUPED, **MIXED),
    *_of(
        "decoder",
        "windows and full",
        "qwen2",
        use_sliding_window=True,
        max_window_layers=1,
        **GROUPED,
        **WINDOWS,
    ),
    *_of("decoder", "latent", "deepseek_v2", "deepseek_v3", **LATENT),
    *_of("decoder", "two calls a layer", "diffllama", **GROUPED),
    *_of("decoder", "hybrid", "bamba", attn_layer_indices=[1], head_dim=8, **GROUPED, **MAMBA),
    *_of("decoder", "hybrid", "falcon_h1", mamba_d_ssm=64, head_dim=8, **GROUPED, **MAMBA),
    *_of("decoder", "hybrid", "jamba", **PERIOD),
    *_of("decoder", "hybrid", "lfm2", layer_types=["conv", "full_attention"], **GROUPED),
    *_of("decoder", "hybrid, windows", "recurrent_gemma", head_dim=8, **RECURRENT),
    *_of("decoder", "hybrid", "qwen3_next", **LINEAR),
    *_of("decoder", "capped scores", "gemma2", **GROUPED, **MIXED),
    *_of("decoder", "learned sink logits", "gpt_oss", **GROUPED, **MIXED, **EXPERTS),
    *_of("decoder", "an attention of its own", "xglm"),
    *_of("decoder", "an attention of its own", "bloom", n_layer=LAYERS, n_head=HEADS),
    *_of(
        "decoder",
        "an attention of its own",
        "mpt",
        d_model=32,
        n_layers=LAYERS,
        n_heads=HEADS,
        max_seq_len=64,
    ),
    *_of("decoder", "an attention of its own", "gptj", "codegen", rotary_dim=4, **OLD),
    *_of("decoder", "an attention of its own", "gpt_neo", **LOCAL),
    *_of("decoder", "an attention of its own", "xlnet", **XLNET),
    *_of(
        "encoder",
        "heads of their own",
        "bert",
        "roberta",
        "electra",
        "camembert",
        "xlm-roberta",
        "ernie",
        "esm",
    ),
    *_of(
        "encoder",
        "heads of their own",
        "distilbert",
        dim=32,
        n_layers=LAYERS,
        n_heads=HEADS,
        hidden_dim=48,
    ),
    *_of("encoder", "one layer, twice", "albert", embedding_size=16, num_hidden_groups=1),
    *_of("encoder", "windows and full", "modernbert", **MODERN),
    *_of("encoder", "grouped heads", "eurobert", **GROUPED),
    *_of("encoder", "an attention of its own", "deberta-v2", "mpnet"),
]
