"""Choice of keys: `Chooser` asks the selector of an edit, and counts for the log what it chose."""

# B batch, H query heads (those edited; all in `gone`), S keys, M keys taken away
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from sinklab.core.attention.scores import of_heads
from sinklab.core.probing.interventions.memory import Selection
from sinklab.core.probing.interventions.removals import Doubt, as_columns
from sinklab.core.probing.interventions.selectors import KeyView
from sinklab.core.registry import selectors
from sinklab.core.sinks.rules import DEFAULT


@dataclass
class Chooser:
    """Makes the selection of an edit from the view of a call.

    Raises ValueError in `choose` where a head would keep no key.
    """

    edit: Any
    """The `BlockKeys`."""
    label: str
    """Name of the edit in errors."""
    doubt: Doubt
    generator: torch.Generator = field(init=False)
    """Drawn from on the CPU, so that a seed means the same keys on every device."""

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.edit.seed)

    def draw(self, shape: Sequence[int]) -> Tensor:
        """Numbers of a shape, uniform in [0, 1), on the CPU."""
        return torch.rand(tuple(shape), generator=self.generator)

    def choose(self, view: KeyView, before_BHS: Tensor | None, every: int) -> Selection:
        """Keys that the selector chooses in this view.

        Args:
            view: of the call.
            before_BHS: keys that are gone already, of all heads; None for none.
            every: number of query heads of the call, edited or not.
        """
        edit = self.edit
        selector = edit.keys
        heads = view.site.heads
        if before_BHS is not None:
            before_BHS = of_heads(before_BHS, heads)
            view = replace(view, gone_BHS=before_BHS)
        with torch.no_grad():
            flags_BHS = selector.select(view)
            if edit.limit is not None and selector.by_attention:
                # for selectors that do not heed it
                count_BH1 = flags_BHS.sum(-1, keepdim=True)
                flags_BHS = view.top(view.scores_BHS, count_BH1, flags_BHS, selector.most)
            flags_BHS = flags_BHS.expand(-1, len(heads), -1)
            if selector.by_attention:
                self._check_enough(view, flags_BHS)
                columns_BHM = as_columns(flags_BHS, selector.most, view.scores_BHS)
                numbers = self._numbers(view, flags_BHS)
            else:
                columns_BHM = as_columns(flags_BHS)
                numbers = {}
            if before_BHS is not None and edit.when == "kept":
                before_BHM = as_columns(before_BHS, edit.limit)
                columns_BHM = torch.cat([columns_BHM, before_BHM], -1)
                flags_BHS = flags_BHS | before_BHS
            gone_BHS = flags_BHS
            if len(heads) < every:
                gone_BHS = flags_BHS.new_zeros(len(flags_BHS), every, flags_BHS.shape[-1])
                gone_BHS[:, heads] = flags_BHS
            random_BHS = gone_BHS.new_empty(0)
            if edit.how.draws:
                random_BHS = self.draw(gone_BHS.shape).to(gone_BHS.device, non_blocking=True)
        return Selection(gone_BHS, columns_BHM, numbers, random_BHS)

    def _numbers(self, view: KeyView, flags_BHS: Tensor) -> dict[str, Tensor]:
        """Attention that the chosen keys hold, their number, and how many of them are sinks; NaN
        where keys are blocked already and none could be added.
        """
        edit = self.edit
        rule = edit.counted_by or edit.keys.sink_rule or DEFAULT
        held_BH = view.scores_BHS.masked_fill(~flags_BHS, 0.0).sum(-1)
        count_BH = flags_BHS.sum(-1)
        numbers = {
            "held": held_BH / view.queries_B1,
            "chosen": count_BH.to(held_BH),
            "sinks": (flags_BHS & view.sinks(rule)).sum(-1).to(held_BH),
        }
        if view.gone_BHS is not None:
            gone_BH = view.gone_BHS.sum(-1)
            full_BH = (gone_BH > 0) & (count_BH == 0)
            if edit.limit is not None:
                full_BH = full_BH | (gone_BH >= edit.limit)
            numbers = {
                name: number_BH.masked_fill(full_BH, math.nan)
                for name, number_BH in numbers.items()
            }
        return numbers | {name: note.expand_as(held_BH) for name, note in view.notes.items()}

    def _check_enough(self, view: KeyView, flags_BHS: Tensor) -> None:
        """Every head keeps a key; each for itself, as rows of unequal length lose unequal numbers
        of keys.
        """
        count_BH = flags_BHS.sum(-1)
        left_BH = view.seen_B1S.sum(-1).expand_as(count_BH)
        if view.gone_BHS is not None:
            # a key that a cache has dropped since its removal is no key that a query loses
            left_BH = left_BH - (view.gone_BHS & view.seen_B1S).sum(-1)
        # with `beyond` every query keeps its neighbours, and all other keys may go
        wrong_BH = (count_BH > 0) & (count_BH >= left_BH) & (self.edit.beyond is None)

        def refuse() -> None:
            row, head = wrong_BH.nonzero()[0].tolist()
            raise ValueError(
                f"{self.label} with keys={selectors.as_text(self.edit.keys)} needs more than "
                f"{int(count_BH[row, head])} keys that are not padding, but row {row} of this "
                f"batch has {int(left_BH[row, head])}: lower k, choose a stricter rule, or set a "
                "limit"
            )

        self.doubt(wrong_BH.any(), refuse)
