"""Five ideas of a reader: a rule, a selector, a statistic, a removal and an edit."""

from dataclasses import dataclass, replace

from sinklab.core.instrument.edits.removals import Removal
from sinklab.core.instrument.edits.selectors import chosen_queries
from sinklab.core.registry import interventions, removals, rules, selectors, statistics
from sinklab.core.sinks import STATES, namespace


@rules.register("own_deviation")
def own_deviation(received, seen_by, exists, deviations=2.0):
    """A sink's mean weight exceeds the mean of its head's keys by so many standard deviations."""
    xp = namespace(received)
    share = xp.where(exists, received / seen_by, 0.0)
    count = exists.sum(-1, keepdims=True)
    mean = share.sum(-1, keepdims=True) / count
    spread = xp.where(exists, (share - mean) ** 2, 0.0).sum(-1, keepdims=True) / count
    return share > mean + deviations * xp.sqrt(spread)


@selectors.register("small_values")
def small_values(call, k=1):
    """The k keys of a head whose values have the smallest norms."""
    return call.top(-call.values_BHSD.float().norm(dim=-1), k)


@statistics.register("position_rank", axes="head", reads=("received",))
def position_rank(call):
    """Rank correlation, over the keys that are seen, of mean weight received and position."""
    seen = call.seen_by_BHS[..., call.prefix :]
    weight = call.received_BHS[..., call.prefix :] / seen.clamp(min=1)
    seen = (seen > 0).to(weight)
    x = weight.argsort(-1).argsort(-1).to(weight)
    y = call.positions_S[call.prefix :].to(weight).expand_as(x)
    x, y = (
        (r - (r * seen).sum(-1, keepdim=True) / seen.sum(-1, keepdim=True)) * seen for r in (x, y)
    )
    return (x * y).sum(-1) / (x.norm(dim=-1) * y.norm(dim=-1)).clamp(min=1e-9)


@removals.register("scale_value")
@dataclass(frozen=True)
class ScaleValue(Removal):
    """Keys keep their attention and give only a part of their value."""

    factor: float = 0.5

    def apply(self, call, blocked_BHS, random_BHS):
        """The call whose blocked keys have scaled values."""
        # heads that share values may lose different keys
        v_BHSD = call.expand_kv(call.v_BKSD)
        scaled_BHSD = v_BHSD.where(~blocked_BHS.unsqueeze(-1), v_BHSD * self.factor)
        return replace(call, k_BKSD=call.expand_kv(call.k_BKSD), v_BKSD=scaled_BHSD)


@interventions.register("lonely_masks")
def lonely_masks(call):
    """A masked query does not see other masked positions."""
    masked_BS = call.state_BS == STATES.index("masked")
    batch, heads = call.q_BHQD.shape[:2]
    keys_BHS = masked_BS.new_zeros(batch, heads, call.k_BKSD.shape[2])
    keys_BHS[:, call.heads, call.prefix :] = masked_BS.unsqueeze(1)
    return call.block(keys_BHS, chosen_queries("masked", call), call.near_QS())
