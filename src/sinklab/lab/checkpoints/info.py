"""Facts of a model and the memory it needs, from its config alone."""

from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from sinklab.core.compat import stated
from sinklab.core.errors import one_of
from sinklab.core.subject.sinks import sink_of
from sinklab.lab.checkpoints import families, gguf_files, materialize, published
from sinklab.lab.checkpoints.families import SpecialIds

BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class ModelInfo:
    """A model's family, sizes and needs."""

    name: str
    family: str
    """``diffusion`` or ``autoregressive``."""
    published_family: str
    architecture: str
    """Architecture named by its ``config.json``."""
    backbone: str
    """The decoder that runs it, by transformers' name: llama, qwen2, qwen3_moe, …"""
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
    experts: int
    """Experts of a layer that only some tokens pass; 0 for a model without."""
    experts_per_token: int
    active_parameters: int
    """Parameters that a token meets: all but the experts that are not chosen for it."""
    special: SpecialIds
    context: int
    """Context in tokens: the number the authors state, else the number the positions allow. Advice:
    only the positions are enforced.
    """
    logit_shift: bool
    attention: str
    """Keys that a token sees, as in a model's config: full, causal or first_alone; and the number
    of layers that see a window.
    """
    block_length: int | None
    """Tokens of a block of attention; None if everything is seen."""
    sink: str
    gate: str
    stored: str
    """Type of its weights in the files, as its config says."""
    notes: tuple[str, ...]
    """Assumptions made."""

    def weight_bytes(self, dtype: str) -> int:
        """Memory of the weights in ``float32`` or ``bfloat16``, bytes."""
        one_of("dtype", dtype, BYTES)
        return self.parameters * BYTES[dtype]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        memory = {dtype: {"weights": self.weight_bytes(dtype)} for dtype in BYTES}
        return {**asdict(self), "memory_bytes": memory}

    def lines(self) -> list[str]:
        """The facts for a reader, one a line."""
        words = resources.files("sinklab.lab.checkpoints").joinpath("info.jinja").read_text("utf-8")
        card = Environment(
            undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
        ).from_string(words)
        return card.render(info=self, special=asdict(self.special)).splitlines()


def describe(name_or_folder: str | Path, *, revision: str | None = None) -> ModelInfo:
    """Describe a model without reading its weights. Raises ValueError if its config cannot be
    represented.

    Args:
        name_or_folder: as for :func:`sinklab.load`, or a ``config.json`` itself. For a GGUF file
            the header is read.
        revision: commit, branch or tag on the Hub.
    """
    name = str(name_or_folder)
    plan, raw = published.read_plan(name, revision)
    config: Any = families.configured(plan, {}, name)
    backbone: Any = plan.backbone
    model = materialize.empty_model(config, name)
    heads = backbone.num_attention_heads
    # a tied head is the same tensor, and parameters() yields it once
    total = sum(parameter.numel() for parameter in model.parameters())
    experts = [tensor for name, tensor in model.named_parameters() if ".experts." in name]
    counts = (stated(backbone, name, 0) for name in ("num_experts_per_tok", "top_k_experts"))
    chosen: int = next(filter(None, counts), 0)
    layer = backbone
    if plan.whole is not None:
        # if layers differ, a config of transformers says per layer what this one has
        layer = backbone.per_layer_config[0]
    stored = str(materialize.weight_type("auto", raw, "auto")).removeprefix("torch.")
    file = gguf_files.find(name)
    if file is not None:
        stored = gguf_files.stored_as(file, name)
    attention = stated(config, "attention", "full")
    local = (stated(backbone, "layer_types") or []).count("sliding_attention")
    if local:
        attention = f"{attention}, in a window in {local} of {backbone.num_hidden_layers} layers"
    sink = "none"
    if sink_of(config):
        sink = f"{config.sink_count} ({config.sink_kind}, {config.sink_side})"
    return ModelInfo(
        name=name,
        **published.facts_of(name, raw, plan, config, None)[1],
        architecture=", ".join(
            families.architectures_of(raw) or [str(raw.get("name", "not named"))]
        ),
        backbone=backbone.model_type,
        layers=backbone.num_hidden_layers,
        heads=heads,
        kv_heads=stated(layer, "num_key_value_heads") or heads,
        head_dim=stated(layer, "head_dim") or backbone.hidden_size // heads,
        hidden=backbone.hidden_size,
        intermediate=backbone.intermediate_size,
        vocabulary=backbone.vocab_size,
        text_vocabulary=stated(config, "text_vocab_size") or backbone.vocab_size,
        parameters=total,
        experts=max(map(len, experts), default=0),
        experts_per_token=chosen,
        active_parameters=total - sum(tensor[chosen:].numel() for tensor in experts),
        logit_shift=stated(config, "logit_shift", False),
        attention=attention,
        block_length=stated(config, "block_length"),
        sink=sink,
        gate=stated(config, "gate", "none"),
        stored=stored,
    )
