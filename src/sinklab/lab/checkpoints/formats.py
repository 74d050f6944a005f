"""The published formats of both papers, and their causal baselines: LLaDA, MMaDA, Dream, SMDM;
Llama, Qwen and GLM-4-MoE.
"""

# in a fused projection: G key/value heads, P query heads for each, D head dim, E hidden size
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2Tokenizer,
)

from sinklab.lab.checkpoints.families import (
    FORMATS,
    CheckpointPlan,
    Config,
    Family,
    Shapes,
    Source,
)
from sinklab.lab.registry import families

_LLADA_OFF = (
    "bias_for_layer_norm",
    "attention_layer_norm",
    "input_emb_norm",
    "alibi",
    "scale_logits",
    "include_bias",
)
"""Fields of LLaDA's config that a Llama does not have."""


@families.register("llada")
class LLaDA(Family):
    """``LLaDAModelLM``: LLaDA 8B and 1.5, a bidirectional Llama under other names."""

    architectures = ("LLaDAModelLM",)
    model_types = ("llada",)
    represented: ClassVar = {
        **dict.fromkeys(_LLADA_OFF, (False, None)),
        "block_type": ("llama",),
        "block_group_size": (1, None),
        "layer_norm_type": ("rms",),
        "layer_norm_with_affine": (True, None),
        "activation_type": ("silu",),
        "rope": (True,),
        "rope_full_precision": (True, None),
        "rope_scaling": (None,),
        "clip_qkv": (None,),
        # no published one has these
        "include_qkv_bias": (False, None),
        "multi_query_attention": (False, None),
        "embedding_dropout": (0, None),
        "residual_dropout": (0, None),
    }
    tensor_names: ClassVar = FORMATS["llada"]["tensors"]
    end_of_turn = "<|eot_id|>"
    chat_template = FORMATS["llada"]["chat_template"]
    tokenizer_class = PreTrainedTokenizerFast

    def read(self, config: Config, shapes: Shapes | None) -> CheckpointPlan:
        """A Llama."""
        backbone = LlamaConfig(
            **self.fields(config, FORMATS["llada"]["fields"]),
            vocab_size=config.get("embedding_size") or self.field(config, "vocab_size"),
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

    def read(self, config: Config, shapes: Shapes | None) -> CheckpointPlan:
        """Read it like LLaDA's; the ids of the text end before the image codes begin."""
        plan = super().read(config, shapes)
        text = config.get("llm_vocab_size")
        if not text and config.get("codebook_size"):
            text = plan.backbone.vocab_size - config["codebook_size"]
        return CheckpointPlan(
            self, plan.backbone, {**(plan.settings or {}), "text_vocab_size": text or None}
        )


@families.register("dream")
class Dream(Family):
    """Dream, also DiffuCoder and Dream-Coder: Qwen2 made bidirectional, with shifted
    logits. Its tokenizer names a class of its own, but is Qwen2's with two more special tokens.
    """

    architectures = ("DreamModel",)
    model_types = ("Dream",)
    represented: ClassVar = {
        "use_sliding_window": (False, None),
        "use_mrope": (False, None),
        "hidden_act": ("silu",),
        # DreamOn's, which changes the length of the text
        "expand_token_id": (None,),
    }
    end_of_turn = "<|im_end|>"
    unread_token = "<|expand|>"
    tokenizer_class = Qwen2Tokenizer

    def read(self, config: Config, shapes: Shapes | None) -> CheckpointPlan:
        """Qwen2 with logits at position i − 1 for the token at i."""
        same = {name: config[name] for name in FORMATS["dream"]["same_fields"] if name in config}
        backbone = Qwen2Config(**same, rope_parameters=self.rope(config), use_sliding_window=False)
        settings = {"mask_token_id": config.get("mask_token_id"), "logit_shift": True}
        return CheckpointPlan(self, backbone, settings)


SMDM_EMBEDDING = "transformer.wte.weight"
# lit-gpt's build_rope_cache; its Config has no field for it
SMDM_ROPE_THETA = 10000.0


@families.register("smdm")
class SMDM(Family):
    """SMDM and One-Token checkpoints: lit-gpt's ``Config`` as JSON, and query, key and value in one
    matrix. The variant is seen in the tensors: a second row of the
    embedding beyond the text is the sink, ``attn.gate`` the gate. [MASK] is the row after the text.
    """

    represented: ClassVar = {
        "rotary_percentage": (1.0,),
        "condense_ratio": (1,),
        "parallel_residual": (False,),
        "shared_attention_norm": (False,),
        "bias": (False,),
        "_norm_class": ("RMSNorm", "FusedRMSNorm"),
        "_mlp_class": ("LLaMAMLP",),
    }
    tensor_names: ClassVar = FORMATS["smdm"]["tensors"]
    tokenizer_class = PreTrainedTokenizerFast

    def recognises(self, config: Config) -> bool:
        """Recognise by two fields, since its config names no class."""
        return {"n_embd", "padded_vocab_size"} <= config.keys()

    def read(self, config: Config, shapes: Shapes | None) -> CheckpointPlan:
        """The plan of a Llama whose head has no row for [MASK]."""
        text = self.field(config, "padded_vocab_size")
        rows = (shapes or {}).get(SMDM_EMBEDDING, (text + 1,))[0]
        gated = any(name.endswith(".attn.gate.weight") for name in shapes or ())
        sinks = int(rows == text + 2)
        fields = self.fields(config, FORMATS["smdm"]["fields"])
        # the sink takes a place of its own
        fields["max_position_embeddings"] += sinks
        backbone = LlamaConfig(
            **fields,
            vocab_size=text + 1,
            num_key_value_heads=config.get("n_query_groups") or fields["num_attention_heads"],
            rope_parameters={"rope_type": "default", "rope_theta": SMDM_ROPE_THETA},
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
            "sink_kind": ("none", "token")[sinks],
            "sink_count": sinks,
            "gate": "none",
        }
        if gated:
            settings["gate"] = "elementwise"
        notes: tuple[str, ...] = ()
        if shapes is None:
            notes = (
                "whether there is a sink or a gate is seen in the weights, not in config.json: "
                "assumed none",
            )
        return CheckpointPlan(self, backbone, settings, notes)

    def source(self, plan: CheckpointPlan, target: str) -> Source:
        """Rows of the embedding, and of the fused projections, are taken apart."""
        backbone: Any = plan.backbone
        sinks = (plan.settings or {})["sink_count"]
        if sinks and target == "sink_embeddings":
            return SMDM_EMBEDDING, partial(
                torch.narrow, dim=0, start=backbone.vocab_size, length=sinks
            )
        name, _ = super().source(plan, target)
        if sinks and name == SMDM_EMBEDDING:
            return name, partial(torch.narrow, dim=0, start=0, length=backbone.vocab_size)
        if not name.endswith(".attn.attn.weight"):
            return name, None
        kind = target.rsplit(".", 2)[1][0]
        head_dim = backbone.hidden_size // backbone.num_attention_heads
        return name, partial(
            _projection, kind=kind, groups=backbone.num_key_value_heads, head_dim=head_dim
        )


def _projection(fused: Tensor, kind: str, groups: int, head_dim: int) -> Tensor:
    """Query, key or value rows of a fused matrix, which holds group after group: its queries, its
    key, its value.
    """
    heads_GPDE = fused.view(groups, -1, head_dim, fused.shape[1])
    rows = {"q": slice(None, -2), "k": slice(-2, -1), "v": slice(-1, None)}[kind]
    return heads_GPDE[:, rows].flatten(0, 2)


class Causal(Family):
    """A decoder of transformers, under its own ``model_type`` and with its own names: a baseline,
    and the start of a diffusion model.
    """

    mask_token = "<|mask|>"

    def recognises(self, config: Config) -> bool:
        """Recognise by the ``model_type``, which chooses the decoder: one of another kind may be
        read into the same class.
        """
        return config.get("model_type") in self.model_types

    def read(self, config: Config, shapes: Shapes | None) -> CheckpointPlan:
        """The config is transformers' own."""
        fields = {name: value for name, value in config.items() if name != "model_type"}
        return CheckpointPlan(self, AutoConfig.for_model(config["model_type"], **fields))


@families.register("llama")
class Llama(Causal):
    """Llama, also Mistral-shaped checkpoints that name its ``model_type``."""

    architectures = ("LlamaForCausalLM",)
    model_types = ("llama",)
    end_of_turn = "<|eot_id|>"


@families.register("qwen2")
class Qwen2(Causal):
    """Qwen2 and Qwen2.5."""

    architectures = ("Qwen2ForCausalLM",)
    model_types = ("qwen2",)
    end_of_turn = "<|im_end|>"
    foreign_tokenizer_class = Qwen2Tokenizer


@families.register("qwen3")
class Qwen3(Causal):
    """Qwen3, the dense ones."""

    architectures = ("Qwen3ForCausalLM",)
    model_types = ("qwen3",)
    end_of_turn = "<|im_end|>"
    foreign_tokenizer_class = Qwen2Tokenizer


@families.register("qwen3_moe")
class Qwen3Moe(Qwen3):
    """Qwen3's mixtures of experts."""

    architectures = ("Qwen3MoeForCausalLM",)
    model_types = ("qwen3_moe",)


@families.register("glm4_moe")
class Glm4Moe(Causal):
    """GLM-4.5's mixtures of experts, without the layers that predict further tokens."""

    architectures = ("Glm4MoeForCausalLM",)
    model_types = ("glm4_moe",)
