"""Five ideas for sinklab, one of each kind: a rule, a selector, a statistic, a removal, an edit."""

from dataclasses import dataclass, replace

import numpy
import torch
from torch import Tensor

from sinklab.core.instrument.call import Call
from sinklab.core.instrument.edits.edit import Edit
from sinklab.core.instrument.edits.removals import Removal
from sinklab.core.instrument.edits.selectors import Selector, chosen_queries
from sinklab.core.instrument.statistics import Statistic
from sinklab.core.registry import interventions, removals, rules, selectors, statistics
from sinklab.core.sinks import Rule


@rules.register("share_of_top")
@dataclass(frozen=True)
class ShareOfTop(Rule):
    """A sink is a key with at least this share of what its head's greatest key receives."""

    share: float = 0.5

    def __call__(self, received: Tensor, positions: Tensor, seen: Tensor) -> Tensor:
        module = torch if isinstance(received, Tensor) else numpy
        top = module.amax(module.nan_to_num(received), -1, keepdims=True)  # padding is NaN
        return (received >= self.share * top) & seen


@selectors.register("large_values")
@dataclass(frozen=True)
class LargeValues(Selector):
    """The keys whose value vectors are longest, in each head."""

    k: int = 1

    def select(self, call: Call) -> Tensor:
        return call.top(call.values_BHSD.float().norm(dim=-1), self.k)


@statistics.register("keys_of_half")
@dataclass(frozen=True)
class KeysOfHalf(Statistic):
    """How few keys hold half of the attention of a head, (B, H)."""

    axes = ("batch", "layer", "head")

    def measure(self, call: Call) -> Tensor:
        falling_BHS = call.received_BHS.sort(dim=-1, descending=True).values
        half_BH1 = falling_BHS.sum(-1, keepdim=True) / 2
        return (falling_BHS.cumsum(-1) < half_BH1).sum(-1) + 1


@removals.register("scale_value")
@dataclass(frozen=True)
class ScaleValue(Removal):
    """Chosen keys keep their attention, and their values are multiplied by a factor."""

    factor: float = 0.1
    blocks = False

    def apply(self, call: Call, blocked_BHS: Tensor, random_BHS: Tensor) -> Call:
        values_BHSD = call.expand_kv(call.v_BKSD)
        weak_BHSD = torch.where(blocked_BHS[..., None], values_BHSD * self.factor, values_BHSD)
        keys_BHSD = call.expand_kv(call.k_BKSD)
        return replace(call, k_BKSD=keys_BHSD, v_BKSD=weak_BHSD)


@interventions.register("blur_masked")
@dataclass(frozen=True)
class BlurMasked(Edit):
    """Queries of masked positions attend less sharply: their scores are multiplied by a factor."""

    factor: float = 0.5

    def before(self, call: Call) -> Call:
        masked_BQ = chosen_queries("masked", call)
        heads = slice(None) if call.heads is None else call.heads
        query_BHQD = call.q_BHQD.clone()
        soft_BHQD = torch.where(masked_BQ[:, None, :, None], self.factor, 1.0) * query_BHQD
        query_BHQD[:, heads] = soft_BHQD[:, heads].to(query_BHQD)
        return replace(call, q_BHQD=query_BHQD)
