"""A checkpoint family in one file: Llama under other names. ``sinklab info FOLDER --plugin
FILE.py`` reads it.
"""

import json
import tempfile
from pathlib import Path
from typing import ClassVar

from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from sinklab.lab.checkpoints import CheckpointPlan, Family
from sinklab.lab.cli import main
from sinklab.lab.registry import families

FIELDS = {
    "hidden_size": "width",
    "num_hidden_layers": "depth",
    "num_attention_heads": "heads",
    "vocab_size": "words",
}


@families.register("toy")
class Toy(Family):
    """Toy diffusion models: their layers are blocks, and [MASK] is the last word."""

    architectures = ("ToyDLM",)
    tensor_names: ClassVar = {
        "model.embed_tokens": "words",
        "model.norm": "last_norm",
        "lm_head": "scores",
    }
    tensor_names |= {
        f"model.layers.{{}}.self_attn.{one}_proj": f"blocks.{{}}.{one}" for one in "qkvo"
    }

    def read(self, config, shapes):
        backbone = LlamaConfig(**self.fields(config, FIELDS), intermediate_size=2 * config["width"])
        return CheckpointPlan(self, backbone, {"mask_token_id": backbone.vocab_size - 1})


if __name__ == "__main__":
    config = {"architectures": ["ToyDLM"], "width": 32, "depth": 2, "heads": 4, "words": 50}
    plan = Toy().read(config, None)
    weights = LlamaForCausalLM(plan.backbone).state_dict()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        tensors = {plan.family.source(plan, name)[0]: weights[name] for name in weights}
        save_file(tensors, Path(folder, "model.safetensors"))
        raise SystemExit(main(["generate", "1 2 3", "--model", folder, "--plugin", __file__]))
