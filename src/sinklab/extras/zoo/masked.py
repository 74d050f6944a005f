"""Masked language models of transformers as denoisers: BERT, RoBERTa, ModernBERT, ESM-2, each run
by its own class.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from sinklab.core.compat import stated
from sinklab.lab.checkpoints.families import (
    CheckpointPlan,
    Config,
    Family,
    Published,
    Shapes,
    formats_of,
    published,
)
from sinklab.lab.checkpoints.wrapping import sizes_of, wrapped
from sinklab.lab.files import refused
from sinklab.lab.registry import families

FORMATS = formats_of(__package__)

TOKENIZERS = ("tokenizer.json", "vocab.txt", "vocab.json", "tokenizer.model")


class MaskedLanguageModel(Family):
    """Base of these families: a class …ForMaskedLM of transformers, which reads [CLS] … [SEP] from
    both sides.
    """

    reads_itself = True

    def recognises(self, config: Config) -> bool:
        """Recognise by the class: a decoder may have the same ``model_type``."""
        return self.is_named(config)

    def read(self, config: Config, shapes: Shapes | None) -> CheckpointPlan:
        """The config is transformers' own."""
        fields = {name: value for name, value in config.items() if name != "model_type"}
        whole = AutoConfig.for_model(self.model_types[0], **fields)
        if stated(whole, "is_decoder"):
            raise ValueError(
                f"{self.own_class} fills masks, but config.json has is_decoder = true; set it to "
                "false"
            )
        return CheckpointPlan(self, whole, whole=whole)

    def read_whole(
        self,
        folder: Path,
        plan: CheckpointPlan,
        row: Published | None,
        *,
        dtype: torch.dtype,
    ) -> dict[str, Any]:
        """The model as transformers reads it. Raises ValueError if it cannot, or a tensor of the
        model is not there.
        """
        build: Any = getattr(transformers, self.own_class)
        name = folder.name
        how: dict[str, Any] = {"config": plan.whole, "dtype": dtype, "attn_implementation": "sdpa"}
        how["use_safetensors"] = True
        with refused(f"the weights of {name} cannot be read"):
            model, found = build.from_pretrained(str(folder), output_loading_info=True, **how)
        lacking = sorted({*found["missing_keys"], *map(str, found["mismatched_keys"])})
        if lacking:
            raise ValueError(
                f"{name} lacks {lacking[0]}, which {self.own_class} has; take a checkpoint with "
                "its head"
            )
        sizes = sizes_of(model)
        if sizes is None:
            raise ValueError(
                f"the config.json of {name} does not say its layers, heads and sizes; use "
                "sinklab.wrap"
            )
        tokenizer = _tokenizer(folder, name)
        if row is None:
            return wrapped(model, tokenizer, None, "masked", sizes) | {
                "published_family": self.name
            }
        if tokenizer is not None and not tokenizer.chat_template:
            tokenizer.chat_template = FORMATS[self.name]["chat_template"]
        parts = wrapped(model, tokenizer, row.special.mask, "masked", sizes)
        # a chat ends otherwise than a text between [CLS] and [SEP]
        parts["special"] = replace(parts["special"], eos=row.special.eos, stop=row.special.stop)
        parts["model"].config.eos_ids = row.special.stop
        return parts | {"published_family": self.name, "chat_template": row.chat_template}


def _tokenizer(folder: Path, name: str) -> PreTrainedTokenizerBase | None:
    """The tokenizer of the folder; None if it has no file of one."""
    if not any((folder / file).is_file() for file in TOKENIZERS):
        return None
    with refused(f"{name} has a model but no tokenizer that can be read"):
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)


@families.register("bert")
class Bert(MaskedLanguageModel):
    """BERT (1810.04805)."""

    architectures = ("BertForMaskedLM",)
    model_types = ("bert",)
    own_class = "BertForMaskedLM"


@families.register("roberta")
class Roberta(MaskedLanguageModel):
    """RoBERTa; its positions begin behind the number of its padding."""

    architectures = ("RobertaForMaskedLM",)
    model_types = ("roberta",)
    own_class = "RobertaForMaskedLM"


@families.register("modernbert")
class ModernBert(MaskedLanguageModel):
    """ModernBERT, also dLLM's chats: two of three layers see a window alone, so no key further away
    is a sink there.
    """

    architectures = ("ModernBertForMaskedLM",)
    model_types = ("modernbert",)
    own_class = "ModernBertForMaskedLM"
    published: ClassVar = published("modernbert", FORMATS)

    def details(self, plan: CheckpointPlan) -> dict[str, str]:
        """Number of layers that see a window alone."""
        config: Any = plan.whole
        local = config.layer_types.count("sliding_attention")
        return {
            "local layers": f"{local} of {config.num_hidden_layers}, window "
            f"{config.local_attention} tokens"
        }


@families.register("esm")
class Esm(MaskedLanguageModel):
    """ESM-2, of proteins; the share of masks scales its embeddings (``token_dropout``), so the
    input says the noise.
    """

    architectures = ("EsmForMaskedLM",)
    model_types = ("esm",)
    own_class = "EsmForMaskedLM"
