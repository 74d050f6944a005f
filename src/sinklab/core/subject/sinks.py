"""Kinds of added sink: the token of «One Token Is Enough», and others to compare it with.

Nothing here imports torch: reports and help ask for labels alone.
"""

# B batch, N sinks, K key/value heads, D head dim or hidden size
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from sinklab.core.registry import sinks

if TYPE_CHECKING:
    from torch import Tensor

    from sinklab.core.subject.prefix import SinkPrefix

SIDES = ("front", "end")


@dataclass(frozen=True)
class Sink:
    """A kind of added sink: its parameters, and the keys and values that every query of the text
    sees besides the text.

    A subclass under a name (``@sinks.register("token")``) is a ``sink_kind`` of a model's config.
    With a position it is a token: :meth:`embeddings` run through the layers, each seeing itself
    alone (Eq. 5–6), and :meth:`values` may change their values. Without one it gives
    :meth:`prefix`. A frozen dataclass has its fields as options: ``sink_kind="name:field=value"``.
    """

    label: ClassVar[str | None] = None
    """Text before the word «sink» in reports; None for the kind's name."""
    tensors: ClassVar[tuple[str, ...]] = ("sink_embeddings",)
    """Names of the model's parameters that are the sink."""
    positions = 1
    """Positions of the context that each sink takes: 1 for a token, 0 for keys without one."""
    weight_decay = False
    """Whether AdamW's weight decay applies to its parameters."""
    needs_mask = False
    """Whether attention gets a mask even where nothing is blocked."""

    @property
    def sides(self) -> tuple[str, ...]:
        """Sides on which it can stand: in front of the text (Eq. 5) or after it (Eq. 7)."""
        if not self.positions:
            return SIDES[:1]
        return SIDES

    def shape(self, config: Any, name: str) -> tuple[int, ...]:
        """Shape of the parameter of this name; (N, D) by default."""
        return (config.sink_count, config.backbone.hidden_size)

    def initialize(self, name: str, tensor: Tensor, std: float) -> None:
        """Fill a new parameter in place; by default from N(0, std²), as the backbone's weights."""
        tensor.normal_(std=std)

    def attach(self, decoder: Any) -> None:
        """Add hooks to a new decoder, after those that give each layer the sinks."""

    def embeddings(self, model: Any) -> Tensor:
        """The sinks (N, D) as the first layer gets them; the parameter itself by default."""
        return model.sink_embeddings

    def values(self, v_BKND: Tensor) -> Tensor:
        """A layer's value states of the sinks, as they are to be used there."""
        return v_BKND

    def prefix(self, model: Any, length: int, lengths_B: Tensor | None = None) -> SinkPrefix:
        """Keys and values of every layer, for texts of this length, or of these if rows differ.

        Gradients flow through it. By default the embeddings are run through the layers.
        """
        from sinklab.core.subject.prefix import positions, run_alone

        sinks_ND = self.embeddings(model)
        positions_UN = positions(model.config, length, lengths_B, sinks_ND.device)
        return run_alone(model.model, sinks_ND, positions_UN, self.values)


def sink_of(config: Any) -> Sink | None:
    """The added sink that a model's config names; None for any model without one.

    Raises:
        ValueError: for a kind that is not registered here.
    """
    kind = getattr(config, "sink_kind", "none")
    if kind == "none":
        return None
    return sinks.parse(kind)


def tensors_of(config: Any) -> tuple[str, ...]:
    """Names of the model's parameters that are its sink."""
    sink = sink_of(config)
    if sink is None:
        return ()
    return sink.tensors


@sinks.register("token")
class TokenSink(Sink):
    """A learned embedding, run through the layers, that sees itself alone (Eq. 5–6)."""

    label = ""


@sinks.register("zero")
class ZeroValueSink(Sink):
    """A learned embedding, run through the layers, with value states of zero in each (Table 5)."""

    label = "zero-value"

    def values(self, v_BKND: Tensor) -> Tensor:
        """Zeros."""
        return v_BKND.new_zeros(v_BKND.shape)
