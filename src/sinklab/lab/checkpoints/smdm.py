"""SMDM and One-Token checkpoints: lit-gpt names, query, key and value in one matrix, sink and gate
as tensors.
"""

# G key/value heads, P query heads for each of them, D head dim, E hidden size
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import LlamaConfig, PreTrainedTokenizerFast

from sinklab.core.registry import families
from sinklab.lab.checkpoints.families import FORMATS, CheckpointPlan, Config, Family, Shapes, Source

EMBEDDING = "transformer.wte.weight"
# lit-gpt's build_rope_cache; its Config has no field for it
ROPE_THETA = 10000.0


@families.register("smdm")
class SMDM(Family):
    """lit-gpt's ``Config`` as JSON. The variant is seen in the tensors: a second row of the
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
        rows = (shapes or {}).get(EMBEDDING, (text + 1,))[0]
        gated = any(name.endswith(".attn.gate.weight") for name in shapes or ())
        sinks = int(rows == text + 2)
        fields = self.fields(config, FORMATS["smdm"]["fields"])
        # the sink takes a place of its own
        fields["max_position_embeddings"] += sinks
        backbone = LlamaConfig(
            **fields,
            vocab_size=text + 1,
            num_key_value_heads=config.get("n_query_groups") or fields["num_attention_heads"],
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
            "sink_kind": ("none", "token")[sinks],
            "sink_count": sinks,
            "gate": "none",
        }
        if gated:
            settings["gate"] = "elementwise"
        unseen = (
            "whether there is a sink or a gate is seen in the weights, not in config.json: "
            "assumed none"
        )
        return CheckpointPlan(self, backbone, settings, (unseen,) if shapes is None else ())

    def source(self, plan: CheckpointPlan, target: str) -> Source:
        """Rows of the embedding, and of the fused projections, are taken apart."""
        backbone: Any = plan.backbone
        sinks = (plan.settings or {})["sink_count"]
        if sinks and target == "sink_embeddings":
            return EMBEDDING, partial(torch.narrow, dim=0, start=backbone.vocab_size, length=sinks)
        name, _ = super().source(plan, target)
        if name == EMBEDDING:
            return name, partial(
                torch.narrow, dim=0, start=0, length=backbone.vocab_size
            ) if sinks else None
        if not name.endswith(".attn.attn.weight"):
            return name, None
        kind = target.rsplit(".", 2)[1][0]
        head_dim = backbone.hidden_size // backbone.num_attention_heads
        return name, partial(
            _projection, kind=kind, groups=backbone.num_key_value_heads, head_dim=head_dim
        )

    def missing_config(self, folder: Path) -> str:
        """SMDM's training writes none."""
        pickled = sorted(path.name for path in folder.glob("*.pth"))
        if not pickled:
            return ""
        fixed = ", ".join(f"{field}={values[0]!r}" for field, values in self.represented.items())
        return (
            f"; for SMDM's {pickled[0]} write one beside it, a JSON object with the fields of the "
            "lit-gpt Config it was trained with: "
            f"{', '.join(['padded_vocab_size', *FORMATS['smdm']['fields'].values()])}, "
            "n_query_groups where key/value heads are shared, and, where they differ from "
            f"{fixed}, these too"
        )


def _projection(fused: Tensor, kind: str, groups: int, head_dim: int) -> Tensor:
    """Query, key or value rows of a fused matrix, which holds group after group: its queries, its
    key, its value.
    """
    heads_GPDE = fused.view(groups, -1, head_dim, fused.shape[1])
    rows = {"q": slice(None, -2), "k": slice(-2, -1), "v": slice(-1, None)}[kind]
    return heads_GPDE[:, rows].flatten(0, 2)
