"""`WindowAttention`: every query sees its neighbours on both sides, and nothing else."""

# B batch, H query heads, Q queries, S keys; a position is a canvas column, sink columns not counted
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sinklab.attention.context import running_canvas
from sinklab.probing.call import AttentionCall
from sinklab.probing.interventions.base import CallSite, LayerIntervention
from sinklab.probing.interventions.removal import restricted
from sinklab.probing.scope import whole_numbers
from sinklab.registry import interventions


@interventions.register("window_attention")
@dataclass(frozen=True)
class WindowAttention(LayerIntervention):
    """Query i sees key j only where |i - j| <= radius, counted in canvas positions.

    Under a cache the queries stand where the denoiser says they do; a model that announces nothing (transformers' own
    `generate`) runs the last of the positions that are seen. The mask it makes is (Q, S), one for all heads and layers.

    Raises ValueError for a negative radius or position, and in a forward whose queries do not fit the canvas.
    """

    radius: int
    """Positions seen on either side; 0 leaves a query its own key."""
    keep: tuple[int, ...] = ()
    """Canvas positions every query may see all the same, such as the first four (StreamingLLM, 2309.17453)."""
    keep_prefix: bool = True
    """Whether the model's own sink columns in front stay visible."""

    def __post_init__(self) -> None:
        whole_numbers("radius", (self.radius,))
        object.__setattr__(self, "keep", whole_numbers("keep", self.keep))
        super().__post_init__()

    def edit(self, call: AttentionCall, site: CallSite) -> AttentionCall:
        """The call with its mask narrowed to the window."""
        device, every = call.query_BHQD.device, call.query_BHQD.shape[1]
        position_S = torch.arange(call.key_BKSD.shape[2], device=device) - site.prefix
        near_QS = (query_positions(call, site.prefix)[:, None] - position_S).abs() <= self.radius
        near_QS |= torch.isin(position_S, torch.tensor(self.keep, dtype=torch.long, device=device))
        near_QS[:, : site.prefix] = self.keep_prefix
        near_11QS = near_QS[None, None]
        if len(site.heads) < every:
            free_H = torch.ones(every, dtype=torch.bool, device=device)
            free_H[site.heads] = False
            near_11QS = near_11QS | free_H[:, None, None]
        return restricted(call, near_11QS)[0]


def query_positions(call: AttentionCall, prefix: int) -> Tensor:
    """The canvas position of every query of the call, int64 (Q,). Raises ValueError where they are unknown."""
    queries, keys, device = call.query_BHQD.shape[2], call.key_BKSD.shape[2] - prefix, call.query_BHQD.device
    if call.visibility.columns_Q is not None:
        return call.visibility.columns_Q.to(device)
    if queries == keys:
        return torch.arange(keys, device=device)
    if running_canvas() is not None:
        raise ValueError(
            f"{call.layer} got {queries} queries and {keys} keys, which are not the columns of the canvas that the "
            "denoiser announces: announce those that become queries with sinklab.attention.running(ids, columns)"
        )
    # A model with room at the end of its memory writes where its mask ends.
    seen = int((call.visibility.visible_BS > 0).any(0).nonzero().max()) + 1 - prefix
    return torch.arange(seen - queries, seen, device=device)
