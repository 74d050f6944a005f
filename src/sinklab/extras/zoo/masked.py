"""Masked language models of transformers as denoisers: BERT, RoBERTa, ModernBERT, ESM-2, each run
by its own class.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from transformers import AutoConfig, PreTrainedTokenizerBase

from sinklab.core.compat import stated
from sinklab.lab.checkpoints.families import (
    CheckpointPlan,
    Config,
    Family,
    Published,
    Shapes,
    formats_of,
)
from sinklab.lab.checkpoints.wrapping import sizes_of, wrapped
from sinklab.lab.registry import families

FORMATS = formats_of(__package__)


class MaskedLanguageModel(Family):
    """Base of these families: a class …ForMaskedLM of transformers, which reads [CLS] … [SEP] from
    both sides.
    """

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

    def finished(
        self,
        model: Any,
        tokenizer: PreTrainedTokenizerBase | None,
        row: Published | None,
        facts: Mapping[str, Any],
    ) -> dict[str, Any]:
        """The model wrapped: it has [CLS] and [SEP] around a text, and in a chat other ends."""
        sizes = sizes_of(model)
        if sizes is None:
            raise ValueError(
                f"the config.json of a {self.name} does not say its layers, heads and sizes; use "
                "sinklab.wrap"
            )
        if row is not None and tokenizer is not None and not tokenizer.chat_template:
            tokenizer.chat_template = FORMATS[self.name]["chat_template"]
        parts = wrapped(
            model, tokenizer, None if row is None else row.special.mask, "masked", sizes
        )
        if row is not None:
            parts["special"] = replace(parts["special"], eos=row.special.eos, stop=row.special.stop)
            parts["model"].config.eos_ids = row.special.stop
        parts["notes"] += facts["notes"]
        return parts | {"published_family": self.name}


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


@families.register("esm")
class Esm(MaskedLanguageModel):
    """ESM-2, of proteins; the share of masks scales its embeddings (``token_dropout``), so the
    input says the noise.
    """

    architectures = ("EsmForMaskedLM",)
    model_types = ("esm",)
    own_class = "EsmForMaskedLM"
