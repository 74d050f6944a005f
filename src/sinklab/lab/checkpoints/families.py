"""Checkpoint families: the description of one published format, and the family of a checkpoint.

A family is a class registered in :data:`sinklab.lab.registry.families`, the built-in ones in
formats.py. One of Llama's shape needs the names of its tensors and a `read`
(examples/add_a_family.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from sinklab.core.errors import near
from sinklab.core.subject.config import DiffusionLMConfig
from sinklab.lab.files import read_json, refused, toml_of
from sinklab.lab.registry import families

Config = Mapping[str, Any]
"""A ``config.json``."""
Shapes = Mapping[str, tuple[int, ...]]
"""Tensor names of a checkpoint and their shapes."""


SIZES = [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "rms_norm_eps",
]
"""Fields of the config of a decoder of transformers that has none but the usual parts."""


Part = Callable[[Tensor], Tensor]
Source = tuple[str, Part | None]
"""Name of a tensor in the checkpoint, and the part to take from it; None takes all of it."""

# What would choose the code that runs: an attention may be a repository of compiled kernels,
# output_attentions makes another attention, auto_map names classes.
_CODE = re.compile(r"_?(attn|experts)_implementation|_?output_attentions|auto_map")


@dataclass(frozen=True)
class SpecialIds:
    """Ids of special tokens; None if there is none or it is not known."""

    mask: int | None = None
    eos: int | None = None
    eot: int | None = None
    """End of a turn of a chat."""
    pad: int | None = None
    bos: int | None = None
    stop: tuple[int, ...] = ()
    """Every id that ends a text: all eos ids and eot."""


NO_IDS = SpecialIds()


@dataclass(frozen=True)
class Published:
    """One published checkpoint: the facts its ``config.json`` leaves out. None if no source could
    be checked.
    """

    family: str
    vocabulary: int | None = None
    """Rows of the embedding."""
    special: SpecialIds = NO_IDS
    context: int | None = None
    """Tokens, as its authors state it; its positions may reach further."""


PUBLISHED: dict[str, Published] = {}
"""Name on the Hub -> known facts of the checkpoint: those of the families, and of plug-ins that add
theirs.
"""


@cache
def formats_of(package: str) -> dict[str, Any]:
    """Facts of a package's families, from its ``formats.toml``: names of tensors and config fields,
    chat formats. Fields that are ``needed`` stand among the others, with the sizes of a decoder.
    Published checkpoints become known.
    """
    formats = toml_of(package, "formats.toml")
    for family, facts in formats.items():
        if "tensors" in facts:
            facts["tensors"] = {
                ours.replace("[qkv]", one): theirs.replace("[qkv]", one)
                for ours, theirs in facts["tensors"].items()
                for one in "qkv"
            }
        if "needed" in facts:
            named = SIZES + facts["needed"]
            facts["fields"] = {name: name for name in named} | facts.get("fields", {})
        for name, row in facts.get("published", {}).items():
            ids = dict(formats["ids"][row["ids"]])
            vocabulary, stop = ids.pop("vocabulary", None), tuple(ids.pop("stop"))
            special = SpecialIds(**ids, stop=stop)
            PUBLISHED[name] = Published(family, vocabulary, special, row.get("context"))
    return formats


FORMATS = formats_of(__package__)
"""Facts of the families of the papers, and special texts."""


@dataclass(frozen=True)
class CheckpointPlan:
    """How a checkpoint becomes a model."""

    family: Family
    backbone: PreTrainedConfig
    """Config of the Hugging Face decoder."""
    settings: dict[str, Any] | None = None
    """Fields of :class:`DiffusionLMConfig` besides the backbone; None for an autoregressive
    model.
    """
    notes: tuple[str, ...] = ()
    """Assumptions made."""
    whole: PreTrainedConfig | None = None
    """Config of the model that transformers' own class runs (`Family.own_class`), the backbone's
    being a part of it; None for a causal decoder, and if :class:`DiffusionLM` runs it.
    """


class Family:
    """One published format. Subclasses are registered, and say by their attributes how they differ
    from Llama.
    """

    architectures: ClassVar[tuple[str, ...]] = ()
    """Classes that its ``config.json`` may name."""
    model_types: ClassVar[tuple[str, ...]] = ()
    """Values its ``config.json`` may have as ``model_type``, if no class decides."""
    represented: ClassVar[Mapping[str, tuple]] = {}
    """Fields that change the arithmetic -> values whose arithmetic is the backbone's; a field may
    be absent.
    """
    tensor_names: ClassVar[Mapping[str, str]] = {}
    """Module of the model -> module in the checkpoint, if they differ; ``{}`` stands for the layer.
    """
    own_class = ""
    """Class of transformers that runs its models as they are; empty if :class:`DiffusionLM` does.
    """
    end_of_turn = ""
    """Token that ends a turn of a chat, if the tokenizer has it."""
    mask_token = ""
    """[MASK], if the tokenizer has it and neither it nor the config says so."""
    unread_token: ClassVar[str | None] = None
    """Token that tells, in a tokenizer, a kind of model that is not read."""
    chat_template: ClassVar[str | None] = None
    """Jinja template for tokenizers that bring none."""
    replaces_chat_template = False
    """Whether the authors' code puts its template in place of the tokenizer's."""
    tokenizer_class: ClassVar[type[PreTrainedTokenizerBase] | None] = None
    """Class of its tokenizers, whatever their files name; None goes by the files."""
    foreign_tokenizer_class: ClassVar[type[PreTrainedTokenizerBase] | None] = None
    """For a backbone: the replacement of a tokenizer class that exists as code of a checkpoint
    only.
    """

    @property
    def name(self) -> str:
        """The name it is registered under."""
        return families.name_of(self)

    def recognises(self, config: Config) -> bool:
        """Whether a checkpoint with this ``config.json`` is one of this family."""
        return self.is_named(config) or config.get("model_type") in self.model_types

    def is_named(self, config: Config) -> bool:
        """Whether the config names one of the family's classes."""
        return any(one in self.architectures for one in architectures_of(config))

    def read(self, config: Config, shapes: Shapes | None) -> CheckpointPlan:
        """The plan for a checkpoint.

        Args:
            config: its ``config.json``, without the fields that would choose code.
            shapes: of its tensors; None when only the config is at hand.

        Raises:
            ValueError: for a field that is missing or has no counterpart, by name.
        """
        raise NotImplementedError

    def source(self, plan: CheckpointPlan, target: str) -> Source:
        """Location in the checkpoint of a tensor of the model (its name in the state dict)."""
        module, dot, leaf = target.rpartition(".")
        number = re.compile(r"(?<=\.)\d+")
        theirs = self.tensor_names.get(number.sub("{}", module))
        if theirs is None:
            return target, None
        return theirs.format(*number.findall(module)) + dot + leaf, None

    def finished(
        self,
        model: Any,
        tokenizer: PreTrainedTokenizerBase | None,
        row: Published | None,
        facts: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Model and tokenizer as `sinklab.load` returns them, and whatever replaces these facts.

        Args:
            model: with its weights.
            tokenizer: of its folder.
            row: known facts of the checkpoint, by its name.
            facts: fields of the result that were found out.
        """
        return {"model": model, "tokenizer": tokenizer}

    def field(self, config: Config, name: str) -> Any:
        """A field that must be there. Raises ValueError if it is absent, with the near names that
        are there.
        """
        if config.get(name) is None:
            remedy = near(name, config) or "take the config.json of its authors"
            raise ValueError(
                f"the config.json of a {self.name} checkpoint needs {name!r}, which is not there; "
                f"{remedy}"
            )
        return config[name]

    def rope(self, config: Config) -> dict[str, Any]:
        """The backbone's ``rope_parameters``, from ``rope_theta`` and, if there is one,
        ``rope_scaling``.
        """
        rope = config.get("rope_scaling") or {}
        kind = rope.get("rope_type") or rope.get("type") or "default"
        return {**rope, "rope_type": kind, "rope_theta": self.field(config, "rope_theta")}

    def fields(self, config: Config, names: Mapping[str, str]) -> dict[str, Any]:
        """Fields of the backbone's config (the keys of ``names``) from fields that must be there
        (its values).
        """
        return {ours: self.field(config, theirs) for ours, theirs in names.items()}


@families.register("sinklab")
class Sinklab(Family):
    """The format that `DiffusionLM` saves: every setting stands in
    ``config.json``.
    """

    architectures = ("DiffusionLM",)
    model_types = (DiffusionLMConfig.model_type,)

    def read(self, config: Config, shapes: Shapes | None) -> CheckpointPlan:
        """The config is read by its own class, which refuses unknown fields."""
        backbone = DiffusionLMConfig(**config).backbone
        return CheckpointPlan(
            self, backbone, {name: value for name, value in config.items() if name != "backbone"}
        )


def known_families() -> dict[str, Family]:
    """Every family by name."""
    return {name: kind() for name, kind in families.items()}


def read_config(path: Path, name: str) -> dict[str, Any]:
    """The ``config.json`` at ``path``; nothing it refers to is looked at.

    Raises:
        ValueError: if there is none or it is no JSON object.
    """
    try:
        return read_json(path, dict)
    except OSError as error:
        hints = ""
        of_run = path.parent / "model"
        if of_run.is_dir():
            hints = f"; it is a run, whose model is {of_run}"
        raise unloadable(name, f"it has no readable config.json ({error}){hints}") from error
    except ValueError as error:
        raise unloadable(name, f"its config.json is damaged ({error})") from error


def unloadable(name: str, why: object) -> ValueError:
    """The error for a name or folder that no model can be loaded from."""
    return ValueError(f"no model can be loaded from {name!r}: {why}")


def without_code(value: Any) -> Any:
    """A config without the fields, at any depth, that choose which code runs: a checkpoint may not
    choose this.
    """
    if isinstance(value, Mapping):
        return {key: without_code(one) for key, one in value.items() if not _CODE.match(str(key))}
    if isinstance(value, list):
        return [without_code(one) for one in value]
    return value


def blamed_on(name: str) -> AbstractContextManager[None]:
    """Turn whatever a config that cannot be used leads to into a ValueError that names the
    checkpoint.
    """
    return refused(f"no model can be loaded from {name!r} as its config.json and the settings say")


def read(config: Config, name: str, shapes: Shapes | None = None) -> CheckpointPlan:
    """The plan for a checkpoint, by the family that recognises its config.

    Args:
        config: its ``config.json``.
        name: for messages.
        shapes: of its tensors; None when only the config is at hand.

    Raises:
        ValueError: if no family or more than one recognises it, or this config of it cannot be
            represented.
    """
    config = without_code(config)
    known = known_families()
    found = [family for family in known.values() if family.recognises(config)]
    named = ", ".join(architectures_of(config)) or "no architecture named"
    # a config may name the class of one family and the model_type of another: MMaDA's and LLaDA's
    is_named = [family for family in found if family.is_named(config)]
    if is_named:
        found = is_named
    elif any(family.architectures for family in found) and architectures_of(config):
        # it computes something else than the others of its model_type
        found = []
    if not found:
        listed = ", ".join(
            " ".join([one, *map("({})".format, known[one].architectures)]) for one in known
        )
        raise ValueError(
            f"{name} is a {config.get('model_type')!r} model ({named}), but sinklab loads "
            f"{listed}; if a plug-in defines its family, install that or name its file: --plugin; "
            "or load it by the code that knows it, and give it to sinklab.wrap(model, tokenizer)"
        )
    if len(found) > 1:
        both = " and ".join(family.name for family in found)
        raise ValueError(
            f"{name} ({named}) is claimed by the families {both}; leave out the plug-in of one"
        )
    with blamed_on(name):
        _refuse_unrepresented(found[0], config)
        family = found[0]
        quantised = config.get("quantization_config")
        if not quantised:
            return family.read(config, shapes)
        if family.own_class or family.tensor_names or type(family).source is not Family.source:
            raise ValueError(
                f"its weights are quantised (quantization_config: {quantised}), which is read "
                f"where tensors have the model's names, but {family.name} has others; take the "
                "checkpoint that they were made from"
            )
        plan = family.read(config, None)
        return replace(
            plan, notes=(*plan.notes, f"its weights are quantised: {quantised.get('quant_method')}")
        )


def _refuse_unrepresented(family: Family, config: Config) -> None:
    """Refuse a config whose values have no counterpart here."""
    for name, values in family.represented.items():
        if name in config and config[name] not in values:
            raise ValueError(
                f"this {family.name} checkpoint has {name} = {config[name]!r}, which sinklab has "
                "no counterpart for "
                f"(it reads {' or '.join(map(repr, values))}); load it with the code of its authors"
            )


def architectures_of(config: Config) -> list[str]:
    """The classes that a ``config.json`` names."""
    listed = config.get("architectures")
    if not isinstance(listed, list):
        return []
    return [str(one) for one in listed]


def configured(plan: CheckpointPlan, overrides: Mapping[str, Any], name: str) -> PreTrainedConfig:
    """The config of the model called ``name``: the plan's, with the caller's settings over it.

    Raises:
        ValueError: for settings of an autoregressive model, of the backbone, or that are unknown.
    """
    if plan.settings is None:
        return plan.whole or plan.backbone
    with blamed_on(name):
        return DiffusionLMConfig(backbone=plan.backbone, **{**plan.settings, **overrides})
