"""A removal of a part of the attention that keys hold: how much of a sink does a model need?

A blocked key shows what a model does without it, and not how the cost grows with the dose. A bias
is added to the scores of the keys, so that the rest of a row grows in proportion: a row with output
o, of which the keys have the weight p and the weighted mean value v, becomes
o′ = o + (1 − β) p (o − v) / (1 − (1 − β) p). The mask has a number for every query and key.
"""

# B batch, H query heads, Q queries, S keys
import math
from dataclasses import MISSING, dataclass, replace

import torch
from torch import Tensor

from sinklab.core.errors import limited
from sinklab.core.instrument.call import Call
from sinklab.core.instrument.edits.removals import Removal
from sinklab.core.instrument.keys import dense_mask
from sinklab.core.registry import removals


@removals.register("weaken")
@dataclass(frozen=True)
class Weaken(Removal):
    """Keep the fraction β of the keys' weights before the softmax: log β is added to their scores.
    β = 0 is `Mask`, and 1 changes nothing.
    """

    beta: float = limited(MISSING, at_least=0, at_most=1)
    """Fraction β that stays."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "blocks", self.beta == 0)

    def apply(self, call: Call, blocked_BHS: Tensor, random_BHS: Tensor) -> Call:
        """The call with log β added to the scores of these keys."""
        mask = dense_mask(call)
        if mask.dtype == torch.bool:
            seen = mask
            mask = call.q_BHQD.new_zeros(seen.shape).masked_fill_(~seen, -math.inf)
        bias_BHQS = blocked_BHS.unsqueeze(2) * call.q_BHQD.new_tensor(math.log(self.beta))
        return replace(call, mask=mask + bias_BHQS.to(mask.dtype), is_causal=False)
