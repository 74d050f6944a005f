"""DiffusionGemma checkpoints: an encoder that reads causally, a decoder that denoises a canvas, one
set of weights.
"""

from typing import Any

import transformers
from packaging.version import Version
from transformers import AutoConfig

from sinklab.lab.checkpoints.families import (
    CheckpointPlan,
    Config,
    Family,
    Shapes,
)
from sinklab.lab.registry import families


@families.register("diffusion_gemma")
class DiffusionGemma(Family):
    """``DiffusionGemmaForBlockDiffusion``, run by transformers' class of that name: it has no
    [MASK], but noise.
    """

    architectures = ("DiffusionGemmaForBlockDiffusion",)
    model_types = ("diffusion_gemma",)
    own_class = "DiffusionGemmaForBlockDiffusion"
    end_of_turn = "<turn|>"

    def read(self, config: Config, shapes: Shapes | None) -> CheckpointPlan:
        """The config is transformers' own; names of tensors are as well."""
        version, lacks = transformers.__version__, not hasattr(transformers, self.own_class)
        if lacks or Version(version) < Version("5.23"):
            # 5.17 has the class, and other numbers from the second canvas on
            fact = (
                f"lacks {self.own_class}, which runs it"
                if lacks
                else "goes on otherwise behind a finished canvas"
            )
            raise ValueError(f"transformers {version} {fact}; pip install 'transformers>=5.23'")
        self.field(config, "text_config")
        whole = AutoConfig.for_model(**config)
        return CheckpointPlan(self, whole.get_text_config(), whole=whole)

    def generate(self, model: Any, ids_BP: Any, **options: Any) -> Any:
        """The whole texts of some prompts, int64 ids (B, S); the options are fields of
        `Renoising`.
        """
        from sinklab.extras.zoo.renoising import Renoising, renoise

        *_, last = renoise(model, ids_BP, Renoising.of(model, **options))
        return last.ids_BS
