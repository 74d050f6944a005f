"""The memory of an edit of keys: what one forward chose and took, for those behind it."""

# B batch, H query heads, S keys, M keys taken away
from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from sinklab.core.probing.interventions.selectors import KeyView


@dataclass(frozen=True)
class Selection:
    """Keys to take away in one layer, and the numbers for the log."""

    gone_BHS: Tensor
    """Flags for all heads."""
    columns_BHM: Tensor
    """The same keys in the heads that are edited, −1 where a head has fewer than M: the newly
    chosen ones by falling score, then the others.
    """
    numbers: dict[str, Tensor] = field(default_factory=dict)
    """Numbers (B, H) for the log: "held", "chosen", "sinks", "matched"."""
    random_BHS: Tensor | None = None
    """Numbers for a removal that draws."""

    @property
    def shape(self) -> torch.Size:
        """(B, H, S): rows, heads and keys that it was made for."""
        return self.gone_BHS.shape


class Memory:
    """Keys that an edit chose and took, by slot and layer. A slot is the place of a forward within
    its step: guidance runs two, each with its own past.

    A forward is opened, fills `chosen` and `taken`, and is closed. Its choice then waits for the
    next forward of the slot (`waiting`).
    """

    def __init__(self) -> None:
        self.waiting: dict[int, dict[str, Selection | KeyView]] = {}
        """Selection for the next forward of a slot, or the view it is still to be made from."""
        self.texts: dict[int, Tensor | None] = {}
        """Ids (B, S) of the forward that chose it; None if they are not known."""
        self.before: dict[int, dict[str, Selection | None]] = {}
        """Keys that the last forward of a slot took."""
        self.open(0)

    def open(self, slot: int) -> None:
        """A forward begins."""
        self.slot = slot
        self.chosen: dict[str, Selection | KeyView] = {}
        """Keys that it chooses for the next forward."""
        self.taken: dict[str, Selection | None] = {}
        """Keys that it loses; None for a layer that loses none."""

    def close(self, ids_BS: Tensor | None, *, is_edited: bool) -> None:
        """The forward came to its end.

        Args:
            ids_BS: its token ids, if they are known.
            is_edited: whether the edit took part, and not only looked on.
        """
        if self.chosen:
            self.waiting[self.slot] = self.chosen
            if ids_BS is not None:
                # a copy, as a decoding loop may change its ids in place
                ids_BS = ids_BS.clone()
            self.texts[self.slot] = ids_BS
        if is_edited:
            self.before[self.slot] = self.taken

    def waiting_for(self, layer: str) -> Selection | KeyView | None:
        """Choice that waits for this forward in this layer; None for none."""
        return self.waiting.get(self.slot, {}).get(layer)

    def taken_before(self, layer: str) -> Selection | None:
        """Keys that the last forward of the slot took in this layer; None for none."""
        return self.before.get(self.slot, {}).get(layer)


def is_other_text(before_BS: Tensor, now_BS: Tensor, mask_id: int | None) -> Tensor:
    """Whether ids are another text's and not those of the same one, a step later: a flag on their
    device.

    A step writes masked positions, or masks written ones: with a known mask token, each place that
    changed has it before or after. Without one, all of them had one id before, or have one after.
    """
    changed_BS = before_BS != now_BS
    if mask_id is not None:
        return (changed_BS & (before_BS != mask_id) & (now_BS != mask_id)).any()
    limits = torch.iinfo(now_BS.dtype)
    differ = [
        ids_BS.masked_fill(~changed_BS, limits.max).amin()
        != ids_BS.masked_fill(~changed_BS, limits.min).amax()
        for ids_BS in (before_BS, now_BS)
    ]
    return changed_BS.any() & differ[0] & differ[1]
