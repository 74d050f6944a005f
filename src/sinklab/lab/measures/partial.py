"""Removals of a part of the attention that keys hold: how much of a sink does a model need?

A blocked key shows what a model does without it, and not how the cost grows with the dose. Both
removals add a bias to the scores of the keys, so that the rest of a row grows in proportion. A row
with output o, of which the keys have the weight p and the weighted mean value v, becomes
o′ = o + (1 − β) p (o − v) / (1 − (1 − β) p). Their mask has a number for every query and key.
"""

# B batch, H query heads, Q queries, S keys
import math
from dataclasses import MISSING, dataclass, replace

import torch
from torch import Tensor

from sinklab.core.attention.received import row_logsumexp
from sinklab.core.errors import limited
from sinklab.core.instrument.call import Call
from sinklab.core.instrument.edits.removals import Removal
from sinklab.core.instrument.keys import and_mask, dense_mask
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
        bias = call.q_BHQD.new_tensor(math.log(self.beta))
        return with_bias(call, blocked_BHS, bias)


@removals.register("share")
@dataclass(frozen=True)
class Share(Removal):
    """Bring the keys of every row together to a share α of it.

    With the weight p that they have, log[α (1 − p) / ((1 − α) p)] is added to their scores. A row
    that sees none of them, or nothing else (p = 1), stays as it is. Keys that had less gain: the
    attention removed is then below 0.
    """

    to: float = limited(MISSING, above=0, below=1)
    """Share α of a row."""

    def apply(self, call: Call, blocked_BHS: Tensor, random_BHS: Tensor) -> Call:
        """The call with the bias that gives these keys the share."""
        mask = dense_mask(call)
        ours_BHQ, others_BHQ = (
            row_logsumexp(
                call.q_BHQD,
                call.k_BKSD,
                mask=and_mask(mask, keys_BHS.unsqueeze(2)),
                scale=call.scale,
            )
            for keys_BHS in (blocked_BHS, ~blocked_BHS)
        )
        # the logarithm of p / (1 − p) is a difference of denominators, exact for p near 1
        bias_BHQ = math.log(self.to / (1 - self.to)) - (ours_BHQ - others_BHQ)
        bias_BHQ = bias_BHQ.masked_fill(~bias_BHQ.isfinite(), 0.0)
        return with_bias(call, blocked_BHS, bias_BHQ.unsqueeze(-1))


def with_bias(call: Call, keys_BHS: Tensor, bias: Tensor) -> Call:
    """The call with a bias, broadcastable to (B, H, Q, S), added to the scores of keys."""
    mask = dense_mask(call)
    if mask.dtype == torch.bool:
        seen = mask
        mask = call.q_BHQD.new_zeros(seen.shape).masked_fill_(~seen, -math.inf)
    bias_BHQS = torch.where(keys_BHS.unsqueeze(2), bias.to(mask.dtype), 0.0)
    return replace(call, mask=mask + bias_BHQS, is_causal=False)
