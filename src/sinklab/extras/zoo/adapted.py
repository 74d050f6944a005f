"""Decoders of transformers that were made diffusion models under names of their own, with the
tensors unchanged.

dLLM's A2D, SDAR (also TraDo), Fast-dLLM v2 and iLLaDA. All but iLLaDA may attend block by block.
"""

from dataclasses import replace
from typing import Any, ClassVar

from transformers import LlamaConfig, Qwen2Config, Qwen2Tokenizer, Qwen3Config

from sinklab.lab.checkpoints.families import (
    CheckpointPlan,
    Config,
    Family,
    Shapes,
    formats_of,
)
from sinklab.lab.registry import families

FORMATS = formats_of(__package__)
_FIELDS = FORMATS["adapted"]


class Adapted(Family):
    """A decoder with the fields of its config; subclasses name them, and the additions of the new
    objective.
    """

    backbone: ClassVar[Any] = Qwen3Config
    """Class of its config."""
    block_field: ClassVar[str | None] = None
    """Field that holds the length of a block of its attention, if there is one."""
    blocks_from = "text"
    logit_shift = False
    first_alone = False
    unknown_blocks = ""
    """Note to add if the config gives no length of a block."""
    end_of_turn = "<|im_end|>"

    def read(self, config: Config, shapes: Shapes | None) -> CheckpointPlan:
        """The decoder, with full attention in every layer: that of one in blocks is the model's,
        not the layer's.
        """
        named = [*_FIELDS["fields"]]
        if not config.get("rope_parameters"):
            named.append("rope_theta")
        fields = self.fields(config, {name: name for name in named})
        fields |= {
            name: config[name] for name in _FIELDS["same_fields"] if config.get(name) is not None
        }
        # not the backbone's own defaults; its padding's row would be frozen
        ends = {name: config.get(name) for name in ("bos_token_id", "eos_token_id")}
        backbone = self.backbone(**fields, **ends, pad_token_id=None)
        block = None
        if self.block_field is not None:
            block = config.get(self.block_field)
        settings = {
            "mask_token_id": config.get("mask_token_id"),
            "pad_token_id": config.get("pad_token_id"),
            "logit_shift": self.logit_shift,
            "block_length": block,
            "blocks_from": self.blocks_from,
            "first_alone": self.first_alone,
        }
        plan = CheckpointPlan(self, backbone, settings)
        if self.unknown_blocks and block is None:
            plan = replace(plan, notes=(self.unknown_blocks,))
        return plan


@families.register("a2d-qwen3")
class A2DQwen3(Adapted):
    """dLLM's A2D of Qwen3. Nothing in its config tells a model trained by MDLM from one trained by
    BD3LM.
    """

    architectures = ("A2DQwen3LMHeadModel",)
    model_types = ("a2d-qwen3",)
    blocks_from = "column"
    unknown_blocks = (
        "config.json does not say whether it was trained with full attention (MDLM) or in blocks "
        "(BD3LM): it attends to everything unless block_length= is given (dLLM's BD3LM models: 32)"
    )
    mask_token = "<|mask|>"
    foreign_tokenizer_class = Qwen2Tokenizer


@families.register("a2d-qwen2")
class A2DQwen2(A2DQwen3):
    """dLLM's A2D of Qwen2 and Qwen2.5."""

    architectures = ("A2DQwen2LMHeadModel",)
    model_types = ("a2d-qwen2",)
    backbone = Qwen2Config


@families.register("a2d-llama")
class A2DLlama(A2DQwen3):
    """dLLM's A2D of Llama."""

    architectures = ("A2DLlamaLMHeadModel",)
    model_types = ("a2d-llama",)
    backbone = LlamaConfig
    end_of_turn = "<|eot_id|>"


@families.register("sdar")
class SDAR(Adapted):
    """SDAR and TraDo: Qwen3 in blocks."""

    architectures = ("SDARForCausalLM",)
    model_types = ("sdar",)
    block_field = "block_size"
    unknown_blocks = (
        "config.json has no block_size: it attends to everything unless "
        "block_length= is given (SDAR's chat models: 4)"
    )
    mask_token = "<|MASK|>"


@families.register("fast-dllm-v2")
class FastDLLM(Adapted):
    """Fast-dLLM v2: Qwen2.5 in blocks, logits at position i − 1 for the token at i."""

    architectures = ("Fast_dLLM_QwenForCausalLM",)
    model_types = ("Fast_dLLM_Qwen",)
    backbone = Qwen2Config
    block_field = "bd_size"
    logit_shift = True
    first_alone = True
    unknown_blocks = (
        "config.json has no bd_size: it attends to everything unless block_length= "
        "is given (published: 32)"
    )
    mask_token = "|<MASK>|"


@families.register("illada")
class ILLaDA(Adapted):
    """iLLaDA, LLaDA's successor, with the names of Llama."""

    architectures = ("ILLaDAForCausalLM",)
    model_types = ("illada",)
    represented: ClassVar = {
        "layer_norm_eps": (None,),
        "rope_scaling": (None,),
        "resid_pdrop": (0, None),
    }
    backbone = LlamaConfig
    mask_token = "<[MASK]>"
