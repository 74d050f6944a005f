"""Causal Llama, Qwen2 and Qwen3 checkpoints: baselines, and starts of diffusion models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from transformers import AutoConfig, Qwen2Tokenizer

from sinklab.checkpoints.families import CheckpointPlan, Family, Published, Shapes, SpecialIds
from sinklab.registry import families


class Causal(Family):
    """A decoder of transformers, under its own ``model_type`` and with its own names."""

    def read(self, config: Mapping[str, Any], shapes: Shapes | None) -> CheckpointPlan:
        """The config is transformers' own."""
        fields = {name: value for name, value in config.items() if name != "model_type"}
        return CheckpointPlan(self, AutoConfig.for_model(config["model_type"], **fields))


_LLAMA = SpecialIds(eos=128001, bos=128000, stop=(128001,))
_LLAMA_CHAT = SpecialIds(eos=128001, bos=128000, stop=(128001, 128008, 128009))


@families.register("llama")
class Llama(Causal):
    """Llama, also Mistral-shaped checkpoints that name its ``model_type``."""

    model_types = ("llama",)
    end_of_turn = "<|eot_id|>"
    published: ClassVar = {
        "meta-llama/Llama-3.1-8B": Published("llama", 128256, _LLAMA, 131072),
        "meta-llama/Llama-3.1-8B-Instruct": Published("llama", 128256, _LLAMA_CHAT, 131072, "llama3"),
    }


_QWEN = SpecialIds(eos=151643, bos=151643, stop=(151643,))
_QWEN_CHAT = SpecialIds(eos=151645, bos=151643, eot=151645, stop=(151645,))


@families.register("qwen2")
class Qwen2(Causal):
    """Qwen2 and Qwen2.5."""

    model_types = ("qwen2",)
    end_of_turn = "<|im_end|>"
    foreign_tokenizer_class = Qwen2Tokenizer
    published: ClassVar = {
        "Qwen/Qwen2.5-0.5B": Published("qwen2", 151936, _QWEN, 32768),
        "Qwen/Qwen2.5-0.5B-Instruct": Published("qwen2", 151936, _QWEN_CHAT, 32768, "chatml"),
        "Qwen/Qwen2.5-1.5B-Instruct": Published("qwen2", 151936, _QWEN_CHAT, 32768, "chatml"),
    }


@families.register("qwen3")
class Qwen3(Causal):
    """Qwen3, the dense ones."""

    model_types = ("qwen3",)
    end_of_turn = "<|im_end|>"
    foreign_tokenizer_class = Qwen2Tokenizer
