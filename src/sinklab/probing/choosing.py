"""Which keys `MaskSinks` takes: the ones that received most, or as many others as a control."""

# B batch, H query heads (1 where they share a choice), S keys, M keys chosen
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sinklab.probing.call import AttentionCall
from sinklab.probing.log import InterventionLog
from sinklab.probing.removing import real_queries_B1
from sinklab.sinks.rules import Excess, find_sinks


@dataclass(frozen=True)
class KeyScores:
    """How the keys of one call stand with the heads of an edit: all that a choice needs."""

    received_BHS: Tensor
    """Attention received, from all queries or from the last one."""
    queries_B1: Tensor | int
    """Number of queries it was received from."""
    visible_BHS: Tensor
    """Number of queries that may see the key."""
    prefix: int

    @classmethod
    def of(cls, call: AttentionCall, selector: str, heads: list[int], prefix: int) -> KeyScores:
        """`selector`: "received" or "last_row"."""
        with torch.no_grad():
            is_last = selector == "last_row"
            received_BHS = call.last_row_BHS if is_last else call.received_BHS
            visible_BHS = call.visibility.visible_BHS.to(received_BHS.device)
            if len(heads) < received_BHS.shape[1]:
                received_BHS = received_BHS[:, heads]
                visible_BHS = visible_BHS[:, heads] if visible_BHS.shape[1] > 1 else visible_BHS
            visible_BHS = (visible_BHS > 0).long() if is_last else visible_BHS
        return cls(received_BHS, 1 if is_last else real_queries_B1(call), visible_BHS, prefix)


class Chooser:
    """Chooses keys for one `MaskSinks`; holds the generator of its random control."""

    def __init__(self, options: Any, log: InterventionLog) -> None:
        self.options, self.log = options, log
        self.generator = torch.Generator().manual_seed(options.seed)

    def standing(self, call: AttentionCall, heads: list[int]) -> KeyScores:
        """What this edit has to know of a call."""
        return KeyScores.of(call, self.options.selector, heads, self.log.note_prefix(call))

    def choose(self, keys: KeyScores, held_BHS: Tensor | None) -> tuple[Tensor, Tensor]:
        """Columns (B, H, M) by falling score, -1 where a head has fewer, and the share (B, H) they hold in this call.

        The share is NaN where the limit left no choice.
        `held_BHS`: keys that are gone already and cannot be chosen; they count against the limit.

        Raises ValueError where too few keys would stay.
        """
        options, every_BHS = self.options, keys.received_BHS
        with torch.no_grad():
            score_BHS = every_BHS.mean(1, keepdim=True) if options.shared == "layer" else every_BHS
            free_BHS, held_BH1 = self._free(keys, held_BHS, score_BHS.shape[1])
            wanted_BHS = free_BHS
            count: int | Tensor = options.k or 0
            if options.epsilon is not None:
                wanted_BHS = free_BHS & self._excessive(keys, score_BHS)
                count = wanted_BHS.sum(-1, keepdim=True)
            if options.limit is not None:
                count = (options.limit - held_BH1).clamp(min=0, max=options.limit).clamp_max(count)
            self._refuse(count, keys, free_BHS, held_BH1)
            most = count if isinstance(count, int) else int(count.max())
            columns_BHM = _largest(score_BHS.masked_fill(~wanted_BHS, -torch.inf), count, most)
            if options.control != "sinks":
                others_BHS = free_BHS & ~flags(columns_BHM, score_BHS.shape[-1])
                columns_BHM = _largest(self._order(score_BHS).masked_fill(~others_BHS, -torch.inf), count, most)
            columns_BHM = columns_BHM.expand(*every_BHS.shape[:2], -1)
            held_BHM = every_BHS.gather(2, columns_BHM.clamp(min=0)).masked_fill(columns_BHM < 0, 0.0)
            mass_BH = held_BHM.sum(-1) / keys.queries_B1
            if options.limit is not None:
                mass_BH = mass_BH.masked_fill((held_BH1 >= options.limit)[..., 0], torch.nan)
            return columns_BHM, mass_BH

    def _free(self, keys: KeyScores, held_BHS: Tensor | None, heads: int) -> tuple[Tensor, Tensor]:
        """Keys that may be chosen, bool (B, H, S), and how many are gone already, (B, H, 1)."""
        free_BHS = (keys.visible_BHS.amax(1) > 0).unsqueeze(1).repeat(1, heads, 1)
        if self.options.spare_prefix:
            free_BHS[..., : keys.prefix] = False
        spared = [keys.prefix + position for position in self.options.spare]
        free_BHS[..., [column for column in spared if column < free_BHS.shape[-1]]] = False
        if held_BHS is None:
            return free_BHS, torch.zeros(1, 1, 1, dtype=torch.long, device=free_BHS.device)
        # A shared choice leaves the same keys gone in every head.
        held_BHS = held_BHS[:, :heads]
        return free_BHS & ~held_BHS, held_BHS.sum(-1, keepdim=True)

    def _excessive(self, keys: KeyScores, score_BHS: Tensor) -> Tensor:
        """Keys above the threshold 1 + epsilon (S-1)/S as if all queries had run, bool (B, H, S)."""
        visible_BHS = keys.visible_BHS.to(score_BHS.dtype)
        visible_BHS = visible_BHS.amax(1, keepdim=True) if score_BHS.shape[1] == 1 else visible_BHS
        # The positions of the canvas that somebody sees, over the queries that ran.
        positions_B11 = (visible_BHS[..., keys.prefix :].amax(1) > 0).sum(-1)[:, None, None]
        scale_B11 = positions_B11 / visible_BHS.amax((1, 2), keepdim=True)
        return find_sinks(score_BHS * scale_B11, Excess(self.options.epsilon), visible_BHS * scale_B11)

    def _refuse(self, count: int | Tensor, keys: KeyScores, free_BHS: Tensor, held_BH1: Tensor) -> None:
        """Every head for itself: rows of unequal length lose unequal numbers of keys."""
        options = self.options
        visible_BH1 = (keys.visible_BHS.amax(1) > 0).sum(-1)[:, None, None] - held_BH1
        free_BH1 = free_BHS.sum(-1, keepdim=True)
        count_BH1 = torch.zeros_like(free_BH1) + count
        # A control takes as many keys again beside the sinks it stands for.
        needed_BH1 = count_BH1 if options.control == "sinks" else 2 * count_BH1
        wrong_BH1 = (count_BH1 > 0) & ((count_BH1 >= visible_BH1) | (needed_BH1 > free_BH1))
        if not bool(wrong_BH1.any()):
            return
        row, head = wrong_BH1[..., 0].nonzero()[0].tolist()
        count, needed, visible, free = (
            int(numbers_BH1.expand_as(wrong_BH1)[row, head, 0])
            for numbers_BH1 in (count_BH1, needed_BH1, visible_BH1, free_BH1)
        )
        what = f"k={options.k}" if options.k else f"epsilon={options.epsilon}, {count} keys in some head"
        remedy = "lower k" if options.k else "raise epsilon"
        again = ", or set a limit (keys that are gone stay gone)" if bool((held_BH1 > 0).any()) else ""
        raise ValueError(
            f"MaskSinks({what}, control={options.control!r}) needs more than {count} keys that are not padding, "
            f"and {needed} to choose from, but row {row} of this batch has {visible} and {free}: {remedy}{again}"
        )

    def _order(self, score_BHS: Tensor) -> Tensor:
        """What a control ranks keys by, highest first."""
        if self.options.control == "random":
            # Drawn on the CPU, so that a seed means the same columns on every device.
            return torch.rand(score_BHS.shape, generator=self.generator).to(score_BHS.device)
        if self.options.control == "lowest":
            return -score_BHS
        return torch.arange(score_BHS.shape[-1], device=score_BHS.device, dtype=torch.float64).expand(score_BHS.shape)


def _largest(score_BHS: Tensor, count: int | Tensor, most: int) -> Tensor:
    columns_BHM = score_BHS.topk(most, dim=-1).indices
    if isinstance(count, int):
        return columns_BHM
    return columns_BHM.masked_fill(torch.arange(most, device=columns_BHM.device) >= count, -1)


def flags(columns_BHM: Tensor, keys: int) -> Tensor:
    """Columns (-1 for none) as flags (B, H, S)."""
    flags_BHS = torch.zeros(*columns_BHM.shape[:2], keys + 1, dtype=torch.bool, device=columns_BHM.device)
    return flags_BHS.scatter_(2, columns_BHM.masked_fill(columns_BHM < 0, keys), True)[..., :keys]


def as_columns(gone_BHS: Tensor) -> Tensor:
    """Flags as columns in rising order (B, H, M), -1 where a head has fewer than the most."""
    most, keys = int(gone_BHS.sum(-1).max()), gone_BHS.shape[-1]
    columns_BHS = torch.arange(keys, device=gone_BHS.device).expand(gone_BHS.shape).masked_fill(~gone_BHS, keys)
    columns_BHM = columns_BHS.sort(-1).values[..., :most]
    return columns_BHM.masked_fill(columns_BHM == keys, -1)


def widened(gone_BHS: Tensor, keys: int) -> Tensor:
    """Flags for so many keys: those that came since are not gone."""
    return torch.nn.functional.pad(gone_BHS, (0, max(0, keys - gone_BHS.shape[-1])))
