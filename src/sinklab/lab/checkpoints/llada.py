"""LLaDA and MMaDA checkpoints: a Llama under other names, its attention bidirectional."""

from typing import Any, ClassVar

from transformers import LlamaConfig, PreTrainedTokenizerFast, Qwen2Config

from sinklab.core.registry import families
from sinklab.lab.checkpoints.families import (
    FORMATS,
    CheckpointPlan,
    Config,
    Family,
    Shapes,
    published,
)

# fields that a Llama does not have
_OFF = (
    "bias_for_layer_norm",
    "attention_layer_norm",
    "input_emb_norm",
    "alibi",
    "scale_logits",
    "include_bias",
)


@families.register("llada")
class LLaDA(Family):
    """``LLaDAModelLM``: LLaDA 8B and 1.5."""

    architectures = ("LLaDAModelLM",)
    model_types = ("llada",)
    represented: ClassVar = {
        **dict.fromkeys(_OFF, (False, None)),
        "block_type": ("llama",),
        "block_group_size": (1, None),
        "layer_norm_type": ("rms",),
        "layer_norm_with_affine": (True, None),
        "activation_type": ("silu",),
        "rope": (True,),
        "rope_full_precision": (True, None),
        "rope_scaling": (None,),
        "clip_qkv": (None,),
        "embedding_dropout": (0, None),
        "residual_dropout": (0, None),
    }
    tensor_names: ClassVar = FORMATS["llada"]["tensors"]
    end_of_turn = "<|eot_id|>"
    chat_template = FORMATS["llada"]["chat_template"]
    tokenizer_class = PreTrainedTokenizerFast
    published: ClassVar = published("llada")

    def read(self, config: Config, shapes: Shapes | None) -> CheckpointPlan:
        """A Llama, or with biases on query, key and value a Qwen2."""
        fields = self.fields(config, FORMATS["llada"]["fields"])
        width = fields["hidden_size"]
        # absent in old files
        kv_heads = config.get("n_kv_heads") or fields["num_attention_heads"]
        if config.get("multi_query_attention") and not config.get("n_kv_heads"):
            kv_heads = 1
        decoder: Any = LlamaConfig
        if config.get("include_qkv_bias"):
            decoder = Qwen2Config
        backbone = decoder(
            **fields,
            vocab_size=config.get("embedding_size") or self.field(config, "vocab_size"),
            intermediate_size=config.get("mlp_hidden_size")
            or self.field(config, "mlp_ratio") * width,
            num_key_value_heads=kv_heads,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": self.field(config, "rope_theta"),
            },
            tie_word_embeddings=bool(config.get("weight_tying")),
            attention_dropout=config.get("attention_dropout") or 0.0,
            initializer_range=config.get("init_std") or 0.02,
            bos_token_id=config.get("bos_token_id"),
            eos_token_id=config.get("eos_token_id"),
            # not here: the backbone would freeze the row of its padding, and LLaDA's padding is its
            # eos
            pad_token_id=None,
        )
        return CheckpointPlan(
            self, backbone, {name: config.get(name) for name in ("mask_token_id", "pad_token_id")}
        )


@families.register("mmada")
class MMaDA(LLaDA):
    """``MMadaModelLM``: LLaDA with image codes behind the text of its vocabulary."""

    architectures = ("MMadaModelLM",)
    model_types = ("mmada",)
    chat_template = FORMATS["mmada"]["chat_template"]
    replaces_chat_template = True
    published: ClassVar = published("mmada")

    def read(self, config: Config, shapes: Shapes | None) -> CheckpointPlan:
        """Read it like LLaDA's; the ids of the text end before the image codes begin."""
        plan = super().read(config, shapes)
        text = config.get("llm_vocab_size")
        if not text and config.get("codebook_size"):
            text = plan.backbone.vocab_size - config["codebook_size"]
        return CheckpointPlan(
            self, plan.backbone, {**(plan.settings or {}), "text_vocab_size": text or None}
        )
