"""`WindowAttention`: every query sees its neighbours on both sides, and nothing else."""

# B batch, H query heads, Q queries, S keys; a position is a canvas column, sink columns not counted
from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sinklab.attention.context import running_canvas
from sinklab.probing.call import AttentionCall
from sinklab.probing.editing import Effect, InterventionHandler, head_numbers, layer_names, whole_numbers
from sinklab.probing.log import InterventionLog
from sinklab.probing.removing import keys_seen, lost_share, restricted
from sinklab.probing.tap import Listener
from sinklab.registry import interventions


@interventions.register("window_attention")
@dataclass(frozen=True)
class WindowAttention:
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
    layers: tuple[int | str, ...] | None = None
    """Layers to edit: numbers in the order of execution (-1 is the last), module paths or patterns; None for all."""
    heads: tuple[int, ...] | None = None
    """Query heads to edit; None for all."""

    def __post_init__(self) -> None:
        whole_numbers("radius", (self.radius,))
        object.__setattr__(self, "keep", whole_numbers("keep", self.keep))
        object.__setattr__(self, "layers", layer_names(self.layers))
        object.__setattr__(self, "heads", head_numbers(self.heads))

    def handler(self, log: InterventionLog, forwards_per_step: int) -> Listener:
        """The listener that carries this edit out and writes into the log."""
        return _WindowHandler(self, log, forwards_per_step)


class _WindowHandler(InterventionHandler):
    options: WindowAttention

    def discard(self) -> None:
        # Layers of one forward share one mask; those replayed by a backward pass find it here too.
        self.masks: dict[tuple[int, int], Tensor] = {}
        super().discard()

    def apply(self, call: AttentionCall) -> tuple[AttentionCall, Effect | None]:
        shape = (call.query_BHQD.shape[2], call.key_BKSD.shape[2])
        if shape not in self.masks:
            self.masks[shape] = self._window(call)
        near_11QS, every = self.masks[shape], call.query_BHQD.shape[1]
        heads = self.heads_of(call)
        if len(heads) < every:
            free_H = torch.ones(every, dtype=torch.bool, device=near_11QS.device)
            free_H[heads] = False
            near_11QS = near_11QS | free_H[:, None, None]
        edited, _ = restricted(call, near_11QS)
        if not self.is_open:
            return edited, None
        batch, device = call.query_BHQD.shape[0], near_11QS.device
        unknown_BH = torch.full((batch, len(heads)), math.nan, device=device)
        realised_BH = left_BH = removed_BH = unknown_BH
        if self.log.measure:
            with torch.no_grad():
                realised_BH = lost_share(call, edited)[:, heads]
                left_BH = keys_seen(edited)[:, heads]
                removed_BH = keys_seen(call)[:, heads] - left_BH
        nothing_BHM = torch.empty(batch, len(heads), 0, dtype=torch.long, device=device)
        gone_BHS = torch.zeros(batch, len(heads), 0, dtype=torch.bool, device=device)
        return edited, Effect(heads, nothing_BHM, gone_BHS, unknown_BH, realised_BH, left_BH, removed_BH)

    def _window(self, call: AttentionCall) -> Tensor:
        prefix, device = self.log.note_prefix(call), call.query_BHQD.device
        position_S = torch.arange(call.key_BKSD.shape[2], device=device) - prefix
        query_Q = query_positions(call, prefix)
        near_QS = (query_Q[:, None] - position_S).abs() <= self.options.radius
        kept_S = torch.isin(position_S, torch.tensor(self.options.keep, dtype=torch.long, device=device))
        near_QS |= kept_S
        near_QS[:, :prefix] = self.options.keep_prefix
        return near_QS[None, None]


def query_positions(call: AttentionCall, prefix: int) -> Tensor:
    """The canvas position of every query of the call, int64 (Q,). Raises ValueError where nobody can tell."""
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
