"""Attention that keys receive from some queries alone: masked ones, and successive windows."""

# B batch, H query heads (those recorded), G groups of queries, Q queries, S keys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sinklab.core.errors import Checked, limited
from sinklab.core.probing.statistics import KEYS, CallView, Statistic
from sinklab.core.registry import statistics
from sinklab.core.sinks.states import MASKED


@statistics.register("received_from_masked")
@dataclass(frozen=True)
class ReceivedFromMasked(Statistic, Checked):
    """Attention every key receives from masked queries alone, as if all queries were masked.

    This attention decides the tokens.

    The mean weight that the masked queries which see the key give it, times the queries that see
    it: an even share is the same as in "received", and a rule may read it in its place
    (``find_sinks(…, rule, recording.visible)``). NaN if fewer than `least` masked queries see the
    key: too few to tell.
    """

    least: int = limited(8, at_least=1)
    """Masked queries that it takes."""

    axes = KEYS
    reads = ("received_by_state",)
    needs_canvas = True

    def measure(self, view: CallView) -> Tensor:
        received_BHS = view.shared["received_by_state"][:, MASKED]
        visibility = view.call.visibility
        state_BQ: Any = view.state_BQ
        every_head = (-1, view.call.query_BHQD.shape[1], -1)
        masked_BHS = visibility.seen_by(state_BQ == MASKED).to(received_BHS).expand(every_head)
        masked_BHS = view.of_heads(masked_BHS)
        every_BHS = view.of_heads(visibility.visible_BHS.to(received_BHS).expand(every_head))
        told_BHS = (masked_BHS >= self.least) | (every_BHS == 0)
        mean_BHS = received_BHS / masked_BHS.clamp_min(1)
        return (mean_BHS * every_BHS).masked_fill(~told_BHS, torch.nan)


WINDOW = 8
"""Queries of a window of "received_by_window"."""


@statistics.register("received_by_window")
class ReceivedByWindow(Statistic):
    """The column sums of successive windows of `WINDOW` queries of a forward.

    The windows are disjoint parts of an autoregressive text.

    Padding does not count: the first window begins with the first real query.
    """

    axes = ("batch", "window", "layer", "head", "key")
    reads = ("received",)

    def measure(self, view: CallView) -> Tensor:
        queries = view.call.query_BHQD.shape[2]
        real_BQ = view.call.visibility.counted_BQ
        if queries <= WINDOW:
            return view.shared["received"].unsqueeze(1)
        number_BQ = torch.div(real_BQ.long().cumsum(1) - 1, WINDOW, rounding_mode="floor")
        windows = range(-(-queries // WINDOW))
        groups_BGQ = torch.stack([(number_BQ == number) & real_BQ for number in windows], 1)
        return view.call.measured(("received",), view.heads, groups_BGQ=groups_BGQ)["received"]
