"""Kinds of added sink: the token of «One Token Is Enough», and others to compare it with.

Nothing here imports torch, as reports and help need only labels.
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
    """A kind of added sink: its parameters, and keys and values that every query sees.

    A registered subclass is a ``sink_kind`` of a config, with its fields as options:
    ``sink_kind="name:field=value"``. With a position it is a token, run through the layers alone
    (Eq. 5–6); without one it overrides :meth:`prefix`.
    """

    label: ClassVar[str | None] = None
    """Text before the word «sink» in reports; None for the kind's name."""
    tensors: ClassVar[tuple[str, ...]] = ("sink_embeddings",)
    """Names of the model's parameters that are the sink."""
    positions = 1
    """Positions that each sink takes: 1 for a token, or 0."""
    weight_decay = False
    """Whether weight decay applies to its parameters."""
    needs_mask = False
    """Whether attention gets a mask even where nothing is blocked."""

    @property
    def sides(self) -> tuple[str, ...]:
        """Sides allowed: in front of the text (Eq. 5), after it (Eq. 7)."""
        if not self.positions:
            return SIDES[:1]
        return SIDES

    def shape(self, config: Any, name: str) -> tuple[int, ...]:
        """Shape of this parameter."""
        return (config.sink_count, config.backbone.hidden_size)

    def initialize(self, name: str, tensor: Tensor, std: float) -> None:
        """Fill a new parameter in place, by default from N(0, std²)."""
        tensor.normal_(std=std)

    def attach(self, decoder: Any) -> None:
        """Add hooks to a new decoder."""

    def embeddings(self, model: Any) -> Tensor:
        """Input (N, D) of the first layer."""
        return model.sink_embeddings

    def values(self, v_BKND: Tensor) -> Tensor:
        """Value states of a layer, changed."""
        return v_BKND

    def prefix(self, model: Any, length: int, lengths_B: Tensor | None = None) -> SinkPrefix:
        """Keys and values of every layer, for texts of this length, or of these if rows differ;
        gradients flow through them.
        """
        from sinklab.core.subject.prefix import positions, run_alone

        sinks_ND = self.embeddings(model)
        positions_UN = positions(model.config, length, lengths_B, sinks_ND.device)
        return run_alone(model.model, sinks_ND, positions_UN, self.values)


def sink_of(config: Any) -> Sink | None:
    """The added sink that a config names, or None. Raises ValueError for an unknown kind."""
    kind = getattr(config, "sink_kind", "none")
    if kind == "none":
        return None
    return sinks.parse(kind)


def tensors_of(config: Any) -> tuple[str, ...]:
    """Names of the parameters of a model's sink."""
    sink = sink_of(config)
    if sink is None:
        return ()
    return sink.tensors


@sinks.register("token")
class TokenSink(Sink):
    """A learned embedding that sees only itself (Eq. 5–6)."""

    label = ""


@sinks.register("zero")
class ZeroValueSink(Sink):
    """A learned embedding whose value states are zero in each layer (Table 5)."""

    label = "zero-value"

    def values(self, v_BKND: Tensor) -> Tensor:
        """Zeros."""
        return v_BKND.new_zeros(v_BKND.shape)
