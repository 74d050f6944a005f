"""What a model is and what it needs, from its ``config.json`` alone."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sinklab.checkpoints import families, materialize, published, special_tokens, vocabularies
from sinklab.checkpoints.families import SpecialIds
from sinklab.checkpoints.resolve import read_plan
from sinklab.errors import one_of
from sinklab.models.config import DiffusionLMConfig

BYTES = {"float32": 4, "bfloat16": 2}
# no canvas fills Llama-3.1's 131,072 positions
CANVAS = 4096


@dataclass(frozen=True)
class ModelInfo:
    """A model's family, sizes and needs."""

    name: str
    family: str
    """``diffusion`` or ``autoregressive``."""
    published_family: str
    architecture: str
    """As its ``config.json`` names it."""
    backbone: str
    """The transformers decoder that runs it: llama, qwen2 or qwen3."""
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    vocabulary: int
    text_vocabulary: int
    """Ids below this are text."""
    parameters: int
    """Tied ones count once."""
    special: SpecialIds
    context: int
    """Tokens; what the authors state, else what the positions allow. Advice: only the positions are enforced."""
    logit_shift: bool
    sink: str
    gate: str
    chat_template: str | None
    notes: tuple[str, ...]
    """What was assumed."""

    def weight_bytes(self, dtype: str) -> int:
        """Memory of the weights in ``float32`` or ``bfloat16``, bytes."""
        return self.parameters * _size(dtype)

    def canvas_bytes(self, dtype: str, length: int | None = None) -> int:
        """Memory that one canvas needs besides the weights, bytes; an estimate from shapes, not a measurement.

        The largest layer's states, keys and values of all layers (a cache), and logits at every position.

        Args:
            dtype: ``float32`` or ``bfloat16``.
            length: tokens of prompt and completion; the context by default, at most 4,096.
        """
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer = 3 * self.hidden + max(2 * queries + 2 * keys, 3 * self.intermediate)
        per_token = layer + 2 * self.layers * keys + self.vocabulary
        return (length or min(self.context, CANVAS)) * per_token * _size(dtype)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        memory = {dtype: {"weights": self.weight_bytes(dtype), "canvas": self.canvas_bytes(dtype)} for dtype in BYTES}
        return {**asdict(self), "memory_bytes": memory}

    def lines(self) -> list[str]:
        """The same for a reader, one fact a line."""
        ids = {name: value for name, value in asdict(self.special).items() if value not in (None, ())}
        listed = ", ".join(
            f"{name} {' '.join(map(str, value)) if isinstance(value, tuple) else value}" for name, value in ids.items()
        )
        text = "" if self.text_vocabulary == self.vocabulary else f", text below {self.text_vocabulary:,}"
        extras = [
            f"sink             {self.sink}",
            f"gate             {self.gate}",
            f"logit shift      {'position i is predicted at i − 1' if self.logit_shift else 'none'}",
        ]
        return [
            f"model            {self.name}",
            f"family           {self.family}, {self.published_family} ({self.architecture}) on {self.backbone}",
            f"parameters       {self.parameters:,}",
            f"layers           {self.layers}, {self.hidden} wide, inner {self.intermediate}",
            f"heads            {self.heads}, key/value {self.kv_heads}, {self.head_dim} wide",
            f"vocabulary       {self.vocabulary:,}{text}",
            f"special ids      {listed or 'not known'}",
            f"context          {self.context:,} tokens",
            f"chat template    {self.chat_template or 'not known'}",
            *(extras if self.family == "diffusion" else []),
            *(
                f"memory {dtype:9s} weights {_readable(self.weight_bytes(dtype))}, "
                f"a canvas of {min(self.context, CANVAS):,} tokens about {_readable(self.canvas_bytes(dtype))}"
                for dtype in BYTES
            ),
            *(f"note             {note}" for note in self.notes),
        ]


def _size(dtype: str) -> int:
    one_of("dtype", dtype, BYTES)
    return BYTES[dtype]


def _readable(number: int) -> str:
    return f"{number / 2**30:.2f} GiB" if number >= 2**28 else f"{number / 2**20:.1f} MiB"


def describe(name_or_folder: str | Path, *, revision: str | None = None) -> ModelInfo:
    """What a model is, without reading its weights.

    Args:
        name_or_folder: as for :func:`sinklab.load`, or a ``config.json`` itself.
        revision: commit, branch or tag on the Hub.

    Raises:
        ValueError: if there is no such model, or its config cannot be represented.
    """
    name = str(name_or_folder)
    plan, raw, path = read_plan(name, revision)
    config = families.configured(plan, {}, name)
    backbone: Any = plan.backbone
    model = materialize.empty_model(config, name)
    local = path.parent if Path(name).exists() else None
    row, notes = published.of_checkpoint(name, raw.get("_name_or_path"), local, plan.family.name, backbone.vocab_size)
    diffusion = isinstance(config, DiffusionLMConfig)
    sinks = (
        f"{config.sink_count} ({config.sink_kind}, {config.sink_side})" if diffusion and config.sink_count else "none"
    )
    heads = backbone.num_attention_heads
    return ModelInfo(
        name=name,
        family="diffusion" if diffusion else "autoregressive",
        published_family=plan.family.name,
        architecture=", ".join(families.architectures_of(raw) or [str(raw.get("name", "not named"))]),
        backbone=backbone.model_type,
        layers=backbone.num_hidden_layers,
        heads=heads,
        kv_heads=backbone.num_key_value_heads or heads,
        head_dim=getattr(backbone, "head_dim", None) or backbone.hidden_size // heads,
        hidden=backbone.hidden_size,
        intermediate=backbone.intermediate_size,
        vocabulary=backbone.vocab_size,
        text_vocabulary=(config.text_vocab_size if diffusion else None) or backbone.vocab_size,
        # a tied head is the same tensor, and parameters() yields it once
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        special=special_tokens.special_ids(config, None, row, plan.family),
        context=vocabularies.context(config, row),
        logit_shift=bool(diffusion and config.logit_shift),
        sink=sinks,
        gate=config.gate if diffusion else "none",
        chat_template=row.chat_template if row else None,
        notes=(*plan.notes, *notes),
    )
