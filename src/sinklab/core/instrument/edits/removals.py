"""Ways to take keys away from an attention call. The core has one, `Mask`; those that take a part
of their weight, or change their values, are in `sinklab.lab.measures`.
"""

# B batch, H query heads, S keys
from dataclasses import dataclass

from torch import Tensor

from sinklab.core.errors import Checked
from sinklab.core.instrument.call import Call
from sinklab.core.registry import removals


@dataclass(frozen=True)
class Removal(Checked):
    """Way to take keys away from the queries of a head: `Mask` blocks them, and others take a part
    of their weight, or leave the attention as it is and change what the keys give.
    """

    blocks = False
    """Whether queries no longer see the keys (`Call.block`): then `apply` is not called."""
    draws = False
    """Whether random numbers enter."""

    def apply(self, call: Call, blocked_BHS: Tensor, random_BHS: Tensor) -> Call:
        """The call without these keys.

        Args:
            call: the attention call.
            blocked_BHS: keys to take away, bool, for every query head.
            random_BHS: with `draws`, numbers uniform in [0, 1) that follow from the seed; else an
                empty tensor.
        """
        raise NotImplementedError(f"{self} has no method apply of its own; write it")


@removals.register("mask")
@dataclass(frozen=True)
class Mask(Removal):
    """Block keys before the softmax: their mass goes to other keys."""

    blocks = True
