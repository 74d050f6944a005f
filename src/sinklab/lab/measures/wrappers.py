"""Selectors that wrap another one: its keys alike in all heads, its choice but for some keys, or
the keys that it leaves. Those that stand for another one as its control are in controls.py.
"""

# B batch, H query heads, S keys
from dataclasses import dataclass, replace

from torch import Tensor

from sinklab.core.probing.interventions.selectors import KeyView, Selector
from sinklab.core.probing.scope import whole_numbers
from sinklab.core.registry import registered, selectors
from sinklab.core.sinks.rules import Rule


@dataclass(frozen=True)
class Wrapper(Selector):
    """Base of selectors that wrap another one."""

    like: Selector = registered(selectors)  # noqa: RUF009

    @property
    def most(self) -> int | None:
        return self.like.most

    @property
    def draws(self) -> bool:
        return self.like.draws

    @property
    def sink_rule(self) -> Rule | None:
        return self.like.sink_rule

    @property
    def last_position(self) -> int:
        return self.like.last_position


@selectors.register("by_layer")
@dataclass(frozen=True)
class ByLayer(Wrapper):
    """The same keys in all edited heads of a layer, chosen by the mean of their scores, or of the
    order that a selector gives to `KeyView.top`.

    Raises ValueError in the run for a selector that answers for each head by itself.
    """

    def select(self, view: KeyView) -> Tensor:
        scores_BHS = view.scores_BHS.mean(1, keepdim=True)
        visible_BHS = view.visible_BHS.amax(1, keepdim=True)
        shared = replace(view, scores_BHS=scores_BHS, visible_BHS=visible_BHS, is_shared=True)
        flags_BHS = self.like.select(shared)
        if flags_BHS.shape[1] > 1:
            raise ValueError(
                f"by_layer takes the same keys in all heads, but {selectors.as_text(self.like)} "
                f"chose for {flags_BHS.shape[1]} heads: choose with view.top"
            )
        return flags_BHS


@selectors.register("sparing")
@dataclass(frozen=True)
class Sparing(Wrapper):
    """The choice of another selector among the keys that are not spared."""

    positions: tuple[int, ...] = ()
    """Canvas positions that are never chosen."""
    prefix: bool = False
    """Whether added sinks are never chosen."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "positions", whole_numbers("spare", self.positions))

    def select(self, view: KeyView) -> Tensor:
        columns = [view.prefix + position for position in self.positions]
        if self.prefix:
            columns += range(view.prefix)
        return self.like.select(replace(view, spared=(*view.spared, *columns)))


@selectors.register("others")
@dataclass(frozen=True)
class Others(Wrapper):
    """All keys but those that another selector chooses: with a window
    (``BlockKeys(Others(SinkKeys()), beyond=8)``) a query reads its neighbours and the sinks alone.
    """

    @property
    def most(self) -> int | None:
        return None

    @property
    def last_position(self) -> int:
        return -1

    def select(self, view: KeyView) -> Tensor:
        return view.free_BHS & ~self.like.select(view)
