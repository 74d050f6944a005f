"""The heads of a layer over processes: each may hold a share of them (`sinklab.extras.parallel`).

Code that listens to attention, or chooses by it, is given the whole model's heads, in every process
the same: so numbers of heads, means over them and random draws mean the same as in one process, for
every statistic and edit.
"""

from typing import Any

from torch import Tensor, distributed

from sinklab.core.compat import is_divided
from sinklab.core.registry import fast_path, head_shares


class HeadShare:
    """This process's share of the heads: all of them, unless a subclass says otherwise."""

    group: Any = None
    """Process group that holds one model together."""
    count = 1
    """Number of processes that hold one model together."""
    rank = 0
    """Rank of this process in the group."""

    def own(self, whole: Tensor, axis: int = 1) -> Tensor:
        """This process's part of an axis of all heads."""
        return whole

    def whole(self, own: Tensor, axis: int = 1) -> Tensor:
        """An axis of all heads, of which every process holds its part; gradients flow through the
        part of this one.
        """
        return own

    def whole_mask(self, mask: Tensor | None, heads: int) -> Tensor | None:
        """A mask (…, heads or 1, queries, keys) of so many heads as that of all; one for all heads
        stays as it is.
        """
        if mask is None or mask.dim() != 4 or mask.shape[1] != heads:
            return mask
        return self.whole(mask)


ALL = HeadShare()
"""Share of a process that holds the model alone."""


def share_of(attention: Any, width: int | None = None) -> HeadShare:
    """Share of the heads of an attention module; `ALL` if its projections are whole.

    Args:
        attention: the module.
        width: query heads × head dim of the call that it makes; None where no call is made.

    Raises:
        ValueError: for projections divided in a way that leaves the owner of each head unknown.
    """
    # asked in every layer: one process holds all heads
    if not (distributed.is_available() and distributed.is_initialized()):
        return ALL
    return fast_path(head_shares, attention, width) or ALL


def share_of_model(model: Any) -> HeadShare:
    """Share of the heads of a decoder with a head; `ALL` if it is not divided."""
    if not is_divided(model):
        return ALL
    return share_of(model.model.layers[0].self_attn)
