"""Causal Llama, Qwen and GLM-4-MoE checkpoints: baselines, and starts of diffusion models."""

from typing import ClassVar

from transformers import AutoConfig, Qwen2Tokenizer

from sinklab.core.registry import families
from sinklab.lab.checkpoints.families import CheckpointPlan, Config, Family, Shapes, published


class Causal(Family):
    """A decoder of transformers, under its own ``model_type`` and with its own names."""

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
    published: ClassVar = published("llama")


@families.register("qwen2")
class Qwen2(Causal):
    """Qwen2 and Qwen2.5."""

    architectures = ("Qwen2ForCausalLM",)
    model_types = ("qwen2",)
    end_of_turn = "<|im_end|>"
    foreign_tokenizer_class = Qwen2Tokenizer
    published: ClassVar = published("qwen2")


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
