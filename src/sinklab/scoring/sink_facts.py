"""What sinks did in the very runs that were scored: a few numbers per request and layer, added up step by step."""

# B rows, L layers, H heads, K keys (sink columns first), S positions
from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from sinklab.probing.intervention import InterventionLog
from sinklab.probing.recording import Recording
from sinklab.sinks.rules import DEFAULT, Rule, find_sinks
from sinklab.sinks.states import STATES

PLACES = (*STATES, "sink")
"""Where a main sink stands: on a position in one of the states, or on a column that was added to the model."""


class SinkFacts:
    """Adds up recorded steps of one batch; `rows` gives the means of each row.

    Only steps in which a row was still being written count for it: what others of the batch do does not.
    """

    def __init__(self, pad_B: Tensor, prefix: int, rule: Rule = DEFAULT) -> None:
        """`pad_B`: padding columns to the left of each row. `prefix`: sink columns that the model has in front."""
        self._rule = rule
        # a trace of a later step alone takes remembered keys for sink columns: so the number is given, not inferred
        self._pad_B, self._prefix = pad_B.cpu(), prefix
        self._sums: dict[str, Tensor] = {}
        self._steps_B = torch.zeros(len(pad_B), dtype=torch.int64)
        self._places_BLK = torch.zeros(len(pad_B), 0, 0, dtype=torch.int64)
        self._states_BLG = torch.zeros(0)

    def add(
        self, recording: Recording, statistic: str, state_BS: Tensor, active_B: Tensor, log: InterventionLog | None
    ) -> None:
        """One step.

        Args:
            recording: of this step alone, its first forward.
            statistic: "received" or "last_row".
            state_BS: state of each canvas position, number in `STATES`; padding is never read.
            active_B: rows that this step was for.
            log: of the interventions in force; what it holds is read and dropped.
        """
        received_BLHK = recording.values(statistic)[0]
        self.count(received_BLHK, recording.visible[0], state_BS, active_B)
        if log is not None:
            rows, layers = received_BLHK.shape[:2]
            self._removed(log, rows, layers, active_B.cpu())

    def count(self, received_BLHK: Tensor, visible_BK: Tensor, state_BS: Tensor, active_B: Tensor) -> None:
        """One step, from what was received at it and how many queries see each key."""
        positions_B = (visible_BK[:, self._prefix :] > 0).sum(-1).float()
        rows, layers, heads, keys = received_BLHK.shape
        share_BLHK = received_BLHK / received_BLHK.sum(-1, keepdim=True).clamp(min=1e-12)
        best_BLH, main_BLH = share_BLHK.max(-1)
        # shares as sums over as many queries as there are positions, each of which sees the keys that any query sees
        queries_BK = positions_B[:, None] * (visible_BK > 0)
        mass_BLHK = share_BLHK * positions_B[:, None, None, None]
        sinks_BLH = find_sinks(mass_BLHK, self._rule, queries_BK[:, None, None]).sum(-1)
        active_B = active_B.cpu()
        weight_B1 = active_B[:, None].float()
        self._steps_B += active_B
        self._sum("share", best_BLH.mean(-1) * weight_B1)
        self._sum("sinks", sinks_BLH.float().mean(-1) * weight_B1)
        self._sum("any_sink", (sinks_BLH > 0).float().mean(-1) * weight_B1)
        places_BLK = torch.zeros(rows, layers, keys, dtype=torch.int64)
        ones_BLH = active_B[:, None, None].long().expand(rows, layers, heads)
        places_BLK.scatter_add_(2, main_BLH, ones_BLH)
        self._places_BLK = _added(self._places_BLK, places_BLK)
        prefix_BK = torch.full((rows, self._prefix), PLACES.index("sink"), dtype=torch.int64)
        state_BK = torch.cat([prefix_BK, state_BS.cpu().long()], 1)
        state_BLH = state_BK[:, None, :].expand(rows, layers, keys).gather(2, main_BLH)
        states_BLG = torch.zeros(rows, layers, len(PLACES), dtype=torch.int64)
        states_BLG.scatter_add_(2, state_BLH.clamp(min=0), ones_BLH)
        self._states_BLG = states_BLG if not len(self._states_BLG) else self._states_BLG + states_BLG

    def _removed(self, log: InterventionLog, rows: int, layers: int, active_B: Tensor) -> None:
        taken_BL, seen_BL = torch.zeros(rows, layers), torch.zeros(rows, layers)
        # guidance runs two forwards a step, and each is logged
        forwards = Counter(removal.label for removal in log.removals)
        for removal in log.removals:
            share_BL = removal.realised_BLH.nanmean(-1) / forwards[removal.label]
            for place, layer in enumerate(removal.layer_numbers):
                known_B = active_B & ~share_BL[:, place].isnan()
                taken_BL[known_B, layer] += share_BL[known_B, place]
                seen_BL[known_B, layer] = 1
        log.removals.clear()
        self._sum("removed", taken_BL)
        self._sum("removed_steps", seen_BL)

    def _sum(self, name: str, value_BL: Tensor) -> None:
        self._sums[name] = self._sums[name] + value_BL if name in self._sums else value_BL

    def row(self, row: int) -> list[dict[str, Any]]:
        """The facts of one row, one entry a layer; empty where no step was recorded.

        steps: how many; share: of all attention, what the main sink (the key that receives most) of a head receives,
        mean over steps and heads; sinks: number of keys that the rule calls sinks, per head and step; with_sink: share
        of heads and steps that have one; main_position: where the main sink stood most often, counted from the row's
        first token, -1 for an added sink column; main_constancy: the share of heads and steps in which it stood there;
        positions: how many different places it had; in_masked, in_committed, in_prompt, in_sink: where it stood;
        removed: share of attention that the interventions took away, None where nothing was, or where likelihoods were
        scored, which does not measure it.
        """
        steps = int(self._steps_B[row])
        if not steps:
            return []
        facts = []
        for layer in range(self._places_BLK.shape[1]):
            places_K, states_G = self._places_BLK[row, layer], self._states_BLG[row, layer]
            total, column = int(places_K.sum()), int(places_K.argmax())
            position = -1 if column < self._prefix else column - self._prefix - int(self._pad_B[row])
            removed = None
            if "removed" in self._sums and (seen := float(self._sums["removed_steps"][row, layer])):
                removed = float(self._sums["removed"][row, layer]) / seen
            facts.append(
                {
                    "layer": layer,
                    "steps": steps,
                    "share": float(self._sums["share"][row, layer]) / steps,
                    "sinks": float(self._sums["sinks"][row, layer]) / steps,
                    "with_sink": float(self._sums["any_sink"][row, layer]) / steps,
                    "main_position": position,
                    "main_constancy": int(places_K.max()) / total,
                    "positions": int((places_K > 0).sum()),
                    **{f"in_{name}": int(states_G[place]) / total for place, name in enumerate(PLACES)},
                    "removed": removed,
                }
            )
        return facts


def _added(one_BLK: Tensor, other_BLK: Tensor) -> Tensor:
    """The sum of two counts; a text that grows has more keys each time."""
    if not one_BLK.numel():
        return other_BLK
    width = max(one_BLK.shape[-1], other_BLK.shape[-1])
    wide = [torch.nn.functional.pad(part, (0, width - part.shape[-1])) for part in (one_BLK, other_BLK)]
    return wide[0] + wide[1]
