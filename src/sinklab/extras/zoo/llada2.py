"""LLaDA2.0 and 2.1 checkpoints: a GLM-4-MoE that attends in blocks; query, key and value are in one
matrix.
"""

from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from torch import Tensor
from transformers import Glm4MoeConfig

from sinklab.core.registry import families
from sinklab.extras.zoo.llada_moe import FORMATS, LLaDAMoE
from sinklab.lab.checkpoints.families import CheckpointPlan, Config, Shapes, Source, published

# type that the authors' code decodes in; no config has it
BLOCK_LENGTH = 32


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
    published: ClassVar = published("llada2", FORMATS)

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
        """The fused projection holds all queries, then all keys, then all values."""
        name, _ = super().source(plan, target)
        backbone: Any = plan.backbone
        if ".query_key_value." not in name:
            return name.replace("e_score_correction_bias", "expert_bias"), None
        keys = backbone.num_key_value_heads
        rows = [heads * backbone.head_dim for heads in (backbone.num_attention_heads, keys, keys)]
        return name, partial(_part, rows=rows, index="qkv".index(target.rsplit(".", 2)[1][0]))


def _part(fused: Tensor, rows: list[int], index: int) -> Tensor:
    return fused.split(rows)[index]
