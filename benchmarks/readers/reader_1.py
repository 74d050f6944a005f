"""Five ideas of reader 1, one of each kind."""

# B batch, H heads, Q queries, S keys, D head dim
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sinklab.core.instrument.call import Call
from sinklab.core.instrument.edits.edit import Edit
from sinklab.core.instrument.edits.removals import Removal
from sinklab.core.instrument.edits.selectors import Selector, chosen_queries
from sinklab.core.instrument.statistics import Statistic
from sinklab.core.registry import interventions, removals, rules, selectors, statistics
from sinklab.core.sinks import Rule


@rules.register("times_median")
@dataclass(frozen=True)
class TimesMedian(Rule):
    """A sink receives so many times the median received attention of its head."""

    times: float = 10.0

    def __call__(self, received_BHS: Any, seen_by_BHS: Any, exists_BHS: Any) -> Any:
        """Sinks, bool (B, H, S), among the keys that exist; of tensors or NumPy's arrays."""
        real_BHS = torch.as_tensor(received_BHS)
        real_BHS = real_BHS.where(torch.as_tensor(exists_BHS), torch.nan)
        bound_BH1: Any = self.times * real_BHS.nanmedian(-1, keepdim=True).values
        if not isinstance(received_BHS, Tensor):
            bound_BH1 = bound_BH1.numpy()
        return exists_BHS & (received_BHS > bound_BH1)


@selectors.register("small_values")
@dataclass(frozen=True)
class SmallValues(Selector):
    """The k keys of each head whose values have the smallest norm."""

    k: int = 1

    def select(self, call: Call) -> Tensor:
        """Flags (B, H, S)."""
        return call.top(-call.values_BHSD.float().norm(dim=-1), self.k)


@statistics.register("received_rank")
@dataclass(frozen=True)
class ReceivedRank(Statistic):
    """Rank of each key by received attention in its head, 0 for the most."""

    axes = ("batch", "layer", "head", "key")

    def measure(self, call: Call) -> Tensor:
        """Ranks (B, H, S)."""
        order_BHS = call.received_BHS.argsort(dim=-1, descending=True, stable=True)
        return order_BHS.argsort(dim=-1).float()


@removals.register("scale_value")
@dataclass(frozen=True)
class ScaleValue(Removal):
    """The values of the keys are multiplied by a factor; queries attend as before."""

    blocks = False
    factor: float = 0.1

    def apply(self, call: Call, blocked_BHS: Tensor, random_BHS: Tensor) -> Call:
        """The call with other values, of every query head its own."""
        v_BHSD = call.expand_kv(call.v_BKSD)
        k_BHSD = call.expand_kv(call.k_BKSD)
        v_BHSD = torch.where(blocked_BHS.unsqueeze(-1), v_BHSD * self.factor, v_BHSD)
        return replace(call, k_BKSD=k_BHSD, v_BKSD=v_BHSD)


@interventions.register("flatten_masked")
@dataclass(frozen=True)
class FlattenMasked(Edit):
    """Scores of masked queries are divided by a temperature."""

    temperature: float = 2.0

    def before(self, call: Call) -> Call:
        """The call with shorter masked queries."""
        chosen_BHQ = chosen_queries("masked", call).unsqueeze(1).repeat(1, call.q_BHQD.shape[1], 1)
        if call.heads is not None:
            edited_H = torch.zeros(chosen_BHQ.shape[1], dtype=torch.bool, device=chosen_BHQ.device)
            edited_H[call.heads] = True
            chosen_BHQ &= edited_H[:, None]
        q_BHQD = call.q_BHQD
        return replace(
            call, q_BHQD=torch.where(chosen_BHQ.unsqueeze(-1), q_BHQD / self.temperature, q_BHQD)
        )
