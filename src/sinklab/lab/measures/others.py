"""The selector that keeps: all keys but those of another selector, to ask whether these suffice."""

# B batch, H query heads, S keys
from dataclasses import dataclass

from torch import Tensor

from sinklab.core.probing.interventions.selectors import KeyView, Wrapper
from sinklab.core.registry import selectors


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
