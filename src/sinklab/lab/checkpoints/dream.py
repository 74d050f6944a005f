"""Dream checkpoints, also DiffuCoder, Dream-Coder and DreamOn: Qwen2 made bidirectional, with
shifted logits.
"""

from typing import ClassVar

from transformers import Qwen2Config, Qwen2Tokenizer

from sinklab.core.registry import families
from sinklab.lab.checkpoints.families import (
    FORMATS,
    CheckpointPlan,
    Config,
    Family,
    Shapes,
    published,
)


@families.register("dream")
class Dream(Family):
    """Its tokenizer names a class of its own, but is Qwen2's with two more special tokens."""

    architectures = ("DreamModel",)
    model_types = ("Dream",)
    represented: ClassVar = {
        "use_sliding_window": (False, None),
        "use_mrope": (False, None),
        "hidden_act": ("silu",),
    }
    end_of_turn = "<|im_end|>"
    expand_token = "<|expand|>"
    tokenizer_class = Qwen2Tokenizer
    published: ClassVar = published("dream")

    def read(self, config: Config, shapes: Shapes | None) -> CheckpointPlan:
        """Qwen2 with logits at position i − 1 for the token at i."""
        same = {name: config[name] for name in FORMATS["dream"]["same_fields"] if name in config}
        backbone = Qwen2Config(**same, rope_parameters=self.rope(config), use_sliding_window=False)
        ids = {name: config.get(name) for name in ("mask_token_id", "expand_token_id")}
        return CheckpointPlan(self, backbone, {**ids, "logit_shift": True})
