"""Kinds of added sink: the token of «One Token Is Enough», and others to compare it with.

Nothing here imports torch: reports and help ask for labels alone.
"""

# B batch, N sinks, K key/value heads, D head dim or hidden size
# U rows with positions of their own: one, or B
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from sinklab.core.registry import sinks

if TYPE_CHECKING:
    from torch import Tensor

    from sinklab.core.models.prefix import SinkPrefix

SIDES = ("front", "end")


@dataclass(frozen=True)
class Sink:
    """A kind of added sink: its parameters, and the keys and values that every query of the text
    sees besides the text.

    A subclass under a name (``@sinks.register("token")``) is a kind, ``sink_kind`` of a model's
    config. With a position it is a token: :meth:`embeddings` run through the layers, each seeing
    itself alone (Eq. 5–6), and :meth:`values` may change the values they hand on. Without one it
    gives :meth:`prefix`, keys and values of every layer. A subclass that is a frozen dataclass has
    its fields as options: ``sink_kind="name:field=value"``.
    """

    label: ClassVar[str | None] = None
    """Text before the word «sink» in reports; None for the kind's name."""
    tensors: ClassVar[tuple[str, ...]] = ("sink_embeddings",)
    """Names of the model's parameters that are the sink; the names of other kinds may be taken
    again.
    """
    positions = 1
    """Positions of the context that each sink takes: 1 for a token, 0 for keys without one, which
    have no side.
    """
    weight_decay = False
    """Whether AdamW's weight decay applies to its parameters."""

    @property
    def sides(self) -> tuple[str, ...]:
        """Sides on which it can stand: in front of the text (Eq. 5) or behind it (Eq. 7)."""
        if not self.positions:
            return SIDES[:1]
        return SIDES

    def shape(self, config: Any, name: str) -> tuple[int, ...]:
        """Shape of the parameter of this name; (N, E) if the kind does not say."""
        return (config.sink_count, config.backbone.hidden_size)

    def initialize(self, name: str, tensor: Tensor, std: float) -> None:
        """Fill a new parameter in place; from N(0, std²) if the kind does not say, as the
        backbone's weights are.
        """
        tensor.normal_(std=std)

    def embeddings(self, model: Any) -> Tensor:
        """The sinks (N, E) as the first layer gets them; the parameter itself if the kind does not
        say.
        """
        return model.sink_embeddings

    def values(self, v_BKND: Tensor) -> Tensor:
        """A layer's value states of the sinks, as they are to be used there; those given if the
        kind does not say.
        """
        return v_BKND

    def prefix(self, model: Any, length: int, lengths_B: Tensor | None = None) -> SinkPrefix:
        """Keys and values (U, G, N, D) of every layer, for texts of this length, or of these if
        rows differ.

        Gradients flow through it. Unless the kind overrides this, its embeddings are run.
        """
        from sinklab.core.models.prefix import positions, run_alone

        sinks_ND = self.embeddings(model)
        positions_UN = positions(model.config, length, lengths_B, sinks_ND.device)
        return run_alone(model.model, sinks_ND, positions_UN, self.values)


def sink_of(config: Any) -> Sink | None:
    """The added sink that a model's config names; None for a model without one, diffusion model or
    not.

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


@sinks.register("kv")
class KeyValueSink(Sink):
    """Learned keys and values of each layer, without rotary positions: the text starts at 0."""

    label = "key/value"
    tensors = ("sink_keys", "sink_values")
    positions = 0

    def shape(self, config: Any, name: str) -> tuple[int, ...]:
        """(layers, N, key/value heads, head dim)."""
        return (
            config.backbone.num_hidden_layers,
            config.sink_count,
            config.kv_heads,
            config.head_dim,
        )

    def initialize(self, name: str, tensor: Tensor, std: float) -> None:
        """Values of zero: a new sink takes attention, and adds nothing yet."""
        if name == "sink_values":
            tensor.zero_()
        else:
            tensor.normal_(std=std)

    def prefix(self, model: Any, length: int, lengths_B: Tensor | None = None) -> SinkPrefix:
        """The parameters themselves, the same in every row; keys are not rotated."""
        from sinklab.core.models.prefix import per_layer

        return per_layer(model.sink_keys, model.sink_values)


@sinks.register("logit")
class LogitSink(Sink):
    """Learned logits b of each layer and query head, as one more term of its softmax.

    Weights become exp(s_ij) / (exp(b) + Σ_k exp(s_ik)).

    A key and a value of zero with b added to the scores; equal to the output without it times
    sigmoid(lse − b), with lse the log-sum-exp of the query's scores.
    """

    tensors = ("sink_logits",)
    positions = 0

    def shape(self, config: Any, name: str) -> tuple[int, ...]:
        """(layers, query heads, N)."""
        backbone = config.backbone
        return (backbone.num_hidden_layers, backbone.num_attention_heads, config.sink_count)

    def prefix(self, model: Any, length: int, lengths_B: Tensor | None = None) -> SinkPrefix:
        """Keys and values of zero, with the parameters as their logits."""
        from sinklab.core.models.prefix import per_layer

        config = model.config
        logits_LHN = model.sink_logits
        zeros = logits_LHN.new_zeros(
            len(logits_LHN), config.sink_count, config.kv_heads, config.head_dim
        )
        return replace(per_layer(zeros, zeros), logits=tuple(logits_LHN))
