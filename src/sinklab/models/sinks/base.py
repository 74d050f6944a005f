"""What a kind of added sink says of itself. Nothing here costs torch: reports and help ask for labels alone."""

# B batch, N sinks, G key/value heads, D head dim, E hidden size, U rows with positions of their own (1 or B)
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from sinklab.registry import sinks

if TYPE_CHECKING:
    from torch import Tensor

    from sinklab.models.sinks.prefix import SinkPrefix

SIDES = ("front", "end")


@dataclass(frozen=True)
class Sink:
    """A kind of added sink: its parameters, and the keys and values that every query of the text sees besides the text.

    A subclass under a name (``@sinks.register("token")``) is a kind, ``sink_kind`` of a model's config. It gives one of
    two methods: :meth:`embeddings` of tokens that run through the layers, each seeing itself alone (Eq. 5–6), where
    :meth:`values` may change what they hand on; or :meth:`prefix`, keys and values of every layer. A subclass that is
    a frozen dataclass has its fields as options: ``sink_kind="name:field=value"``.
    """

    label: ClassVar[str | None] = None
    """What comes before the word «sink» in reports; None for the kind's name."""
    tensors: ClassVar[tuple[str, ...]] = ("sink_embeddings",)
    """Names of the model's parameters that are the sink; the names of other kinds may be taken again."""
    positions: ClassVar[int] = 1
    """Positions of the context that each sink takes: 1, or 0 for one without a position, which has no side."""
    weight_decay: ClassVar[bool] = False
    """Whether AdamW's weight decay applies to its parameters."""

    @property
    def sides(self) -> tuple[str, ...]:
        """Where it can stand: in front of the text (Eq. 5) or behind it (Eq. 7)."""
        return SIDES if self.positions else SIDES[:1]

    def shape(self, config: Any, name: str) -> tuple[int, ...]:
        """Shape of the parameter of this name; (N, E) if the kind does not say."""
        return (config.sink_count, config.backbone.hidden_size)

    def initialize(self, name: str, tensor: Tensor, std: float) -> None:
        """Fill a new parameter in place; from N(0, std²) if the kind does not say, as the backbone's weights are."""
        tensor.normal_(std=std)

    def embeddings(self, model: Any) -> Tensor | None:
        """The sinks (N, E) as the first layer gets them; None for a kind that is no token."""
        return None

    def values(self, v_BGND: Tensor) -> Tensor:
        """A layer's value states of the sinks, as they are to be used there; those given if the kind does not say."""
        return v_BGND

    def prefix(self, model: Any, length: int, lengths_B: Tensor | None = None) -> SinkPrefix:
        """Keys and values (U, G, N, D) of every layer, for texts of this length, or of these where rows differ.

        Gradients flow through it. If the kind does not say, its embeddings are run.
        """
        from sinklab.models.sinks.prefix import positions, run_alone

        embeddings_NE = self.embeddings(model)
        if embeddings_NE is None:
            raise NotImplementedError(f"the sink kind {type(self).__name__} needs embeddings() or prefix()")
        return run_alone(
            model.model, embeddings_NE, positions(model.config, length, lengths_B, embeddings_NE.device), self.values
        )


def sink_of(config: Any) -> Sink | None:
    """The added sink that a model's config names; None for a model without one, diffusion model or not.

    Raises:
        ValueError: for a kind that is not registered here.
    """
    kind = getattr(config, "sink_kind", "none")
    return None if kind == "none" else sinks.parse(kind)


def tensors_of(config: Any) -> tuple[str, ...]:
    """Names of the model's parameters that are its sink."""
    sink = sink_of(config)
    return () if sink is None else sink.tensors


def known_tensors() -> tuple[str, ...]:
    """Names of the parameters of every kind that is registered."""
    return tuple(dict.fromkeys(name for kind in sinks.values() for name in kind.tensors))
