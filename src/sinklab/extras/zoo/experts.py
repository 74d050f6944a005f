"""Mixtures of experts: LLaDA-MoE, a bidirectional Qwen3-MoE; and LLaDA2.0 and 2.1, a GLM-4-MoE that
attends in blocks.
"""

from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from torch import Tensor
from transformers import (
    Glm4MoeConfig,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
)

from sinklab.lab.checkpoints.families import (
    CheckpointPlan,
    Config,
    Family,
    Shapes,
    Source,
    formats_of,
)
from sinklab.lab.registry import families

FORMATS = formats_of(__package__)
# type that the authors of LLaDA2 decode in; no config has it
BLOCK_LENGTH = 32


@families.register("llada_moe")
class LLaDAMoE(Family):
    """``LLaDAMoEModelLM``, with LLaDA's ``model_type``. Its code does not read the config's score
    function, groups, scale or norm of the router, so neither does this.
    """

    architectures = ("LLaDAMoEModelLM",)
    model_types: ClassVar[tuple[str, ...]] = ("lladamoe",)
    represented: ClassVar = {
        "qk_layernorm": (True,),
        "clip_qkv": (None,),
        "partial_rotary_factor": (1, None),
        # no published one has these
        "shared_expert_intermediate_size": (None,),
        "moe_router_enable_expert_bias": (False, None),
    }
    tensor_names: ClassVar = FORMATS["llada_moe"]["tensors"]
    end_of_turn = "<|role_end|>"
    chat_template = FORMATS["llada_moe"]["chat_template"]
    tokenizer_class = PreTrainedTokenizerFast

    def read(self, config: Config, shapes: Shapes | None) -> CheckpointPlan:
        """Qwen3-MoE."""
        dense = [
            layer for layer, is_moe in enumerate(self.field(config, "moe_layer_freq")) if not is_moe
        ]
        fields = self.fields(config, FORMATS["llada_moe"]["fields"])
        fields |= {"mlp_only_layers": dense, "norm_topk_prob": False, **self.usual(config)}
        return self.plan(Qwen3MoeConfig(**fields), config)

    def usual(self, config: Config) -> dict[str, Any]:
        """Fields of the backbone that a config may leave out, and its rotary positions."""
        same = {
            name: config[name] for name in FORMATS["llada_moe"]["same_fields"] if name in config
        }
        return {
            **same,
            "rope_parameters": self.rope(config),
            # as LLaDA: the backbone would freeze the row of its padding, which is the eos
            "pad_token_id": None,
        }

    def plan(self, backbone: Any, config: Config) -> CheckpointPlan:
        """The plan, with the [MASK] of the authors' code if the config names none."""
        settings = {name: config.get(name) for name in ("mask_token_id", "pad_token_id")}
        usual = FORMATS["llada_moe"]["mask"]
        if settings["mask_token_id"] is not None or usual >= backbone.vocab_size:
            return CheckpointPlan(self, backbone, settings)
        settings["mask_token_id"] = usual
        note = f"[MASK] is id {usual}, as in its authors' code: config.json does not name it"
        return CheckpointPlan(self, backbone, settings, (note,))


@families.register("llada2")
class LLaDA2(LLaDAMoE):
    """``LLaDA2MoeModelLM``: 2.0 and 2.1 differ in how they write alone. Its code does not read the
    config's score function or norm of the router, so neither does this.
    """

    architectures = ("LLaDA2MoeModelLM",)
    model_types = ("llada2_moe", "llada21_moe")
    represented: ClassVar = {
        "use_qk_norm": (True,),
        "use_bias": (False, None),
        "use_sliding_window": (False, None),
        "norm_head": (False, None),
        "norm_softmax": (False, None),
        "embedding_dropout": (0, None),
        "output_dropout": (0, None),
    }
    tensor_names: ClassVar = FORMATS["llada2"]["tensors"]

    def read(self, config: Config, shapes: Shapes | None) -> CheckpointPlan:
        """GLM-4-MoE with norms of queries and keys."""
        fields = {**self.fields(config, FORMATS["llada2"]["fields"]), **self.usual(config)}
        fields["rope_parameters"]["partial_rotary_factor"] = self.field(
            config, "partial_rotary_factor"
        )
        fields |= {
            "head_dim": config.get("head_dim")
            or fields["hidden_size"] // fields["num_attention_heads"],
            "attention_bias": bool(config.get("use_qkv_bias")),
            "use_qk_norm": True,
            "norm_topk_prob": fields["num_experts_per_tok"] > 1,
        }
        plan = self.plan(Glm4MoeConfig(**fields), config)
        return replace(plan, settings={**(plan.settings or {}), "block_length": BLOCK_LENGTH})

    def source(self, plan: CheckpointPlan, target: str) -> Source:
        """Query, key and value are in one matrix: all queries, then all keys, then all values."""
        name, _ = super().source(plan, target)
        backbone: Any = plan.backbone
        if ".query_key_value." not in name:
            return name.replace("e_score_correction_bias", "expert_bias"), None
        keys = backbone.num_key_value_heads
        rows = [heads * backbone.head_dim for heads in (backbone.num_attention_heads, keys, keys)]
        return name, partial(_part, rows=rows, index="qkv".index(target.rsplit(".", 2)[1][0]))


def _part(fused: Tensor, rows: list[int], index: int) -> Tensor:
    return fused.split(rows)[index]
