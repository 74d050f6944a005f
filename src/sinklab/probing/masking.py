"""`MaskSinks`: take away the keys that received most attention, one step later (arXiv 2510.15731, section 4.3)."""

# B batch, H query heads, K key/value heads, Q queries, S keys, D head dim, M columns taken away
from __future__ import annotations

import dataclasses
import difflib
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sinklab.probing.call import AttentionCall
from sinklab.probing.log import InterventionLog, Removal
from sinklab.probing.tap import Listener

_CHOICES = {
    "source": ("closed_loop", "clean_pass"),
    "control": ("sinks", "random", "recent"),
    "removal": ("mask", "zero_value"),
    "selector": ("received", "last_row"),
}


@dataclass(frozen=True)
class MaskSinks:
    """Remove k keys per (batch row, layer, query head), chosen from the forward before."""

    k: int
    """Number of keys to remove; fewer than there are keys that are not padding."""
    source: str = "closed_loop"
    """"closed_loop": forward t loses what received most at forward t-1 of the same edited run, the first is unedited.
    "clean_pass": chosen in forwards run unedited under `log.probing()`."""
    control: str = "sinks"
    """"sinks": the top k. "random", "recent": as many keys that are not among the top k, drawn or the last ones."""
    seed: int = 0
    """Seed of the random control."""
    removal: str = "mask"
    """"mask": before the softmax, the mass goes to other keys. "zero_value": the mass stays, the value adds nothing.
    A query that would lose every key it may see (the first rows of a causal map) keeps its own."""
    selector: str = "received"
    """"received": column sums over all queries. "last_row": the last query's row (the autoregressive reading)."""
    spare_prefix: bool = False
    """Never choose the model's own sink columns, which stand in front of the keys."""

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError(f"k counts the keys to remove, at least 1, got {self.k}: for none, leave out the edit")
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                near = difflib.get_close_matches(str(value), allowed, n=1)
                hint = f"did you mean {near[0]!r}?" if near else "choose one of them"
                raise ValueError(f"{name} is one of {allowed}, got {value!r}: {hint}")

    def editor(self, log: InterventionLog, forwards_per_step: int) -> Listener:
        """The listener that carries this edit out and writes into the log."""
        return _SinkMasker(self, log, forwards_per_step)


@dataclass(frozen=True)
class _Selection:
    """Columns chosen in one layer: indices (B, H, M), the share of attention they held (B, H), the key count then."""

    columns_BHM: Tensor
    mass_BH: Tensor
    keys: int


class _SinkMasker(Listener):
    def __init__(self, edit: MaskSinks, log: InterventionLog, forwards_per_step: int) -> None:
        self.options, self.log, self.period = edit, log, forwards_per_step
        self.generator = torch.Generator().manual_seed(edit.seed)
        log.on_reset.append(self.reset)
        self.reset()

    def reset(self) -> None:
        # Slots keep the forwards of one step apart (guidance runs two), each with its own previous selection.
        self.slots: dict[int, dict[str, _Selection]] = {}
        self.previous: dict[int, dict[str, _Selection]] = {}
        self.count = 0
        self.discard()

    def begin(self) -> None:
        self.chosen: dict[str, _Selection] = {}
        self.applied: dict[str, _Selection] = {}
        self.slot = 0 if self.options.source == "clean_pass" else self.count % self.period
        self.active = self.slots.get(self.slot, {})

    def edit(self, call: AttentionCall) -> AttentionCall:
        if self.log.is_probing:
            return call
        selection = self.active.get(call.layer)
        if selection is None:
            if self.options.source == "clean_pass":
                raise ValueError(
                    'source="clean_pass" chooses in an unedited forward, but none was run: '
                    "with log.probing(): model(…) before the edited forward"
                )
            return call
        self._check_shape(selection, call)
        self.applied[call.layer] = selection
        columns = selection.columns_BHM
        gone_BHS = torch.zeros(*columns.shape[:2], call.key_BKSD.shape[2], dtype=torch.bool, device=columns.device)
        gone_BHS.scatter_(2, columns, True)
        return mask_columns(call, gone_BHS) if self.options.removal == "mask" else zero_values(call, gone_BHS)

    def observe(self, call: AttentionCall) -> None:
        if self.log.is_probing == (self.options.source == "clean_pass"):
            self.chosen[call.layer] = self._select(call)

    def finish(self) -> None:
        if not self.log.is_probing:
            self.log.add(self._removal())
            self.previous[self.slot] = self.applied
            self.count += 1
        if self.chosen:
            self.slots[self.slot] = self.chosen

    def discard(self) -> None:
        self.chosen, self.applied, self.active, self.slot = {}, {}, {}, 0

    def _select(self, call: AttentionCall) -> _Selection:
        options, k = self.options, self.options.k
        with torch.no_grad():
            score_BHS = call.received_BHS if options.selector == "received" else call.last_row_BHS
            barred_BS = ~self._free(call).to(score_BHS.device)
            columns_BHM = score_BHS.masked_fill(barred_BS[:, None], -1.0).topk(k, dim=-1).indices
            if options.control != "sinks":
                other_BHS = self._control_order(score_BHS).masked_fill(barred_BS[:, None], -1.0)
                columns_BHM = other_BHS.scatter(2, columns_BHM, -1.0).topk(k, dim=-1).indices
            queries_B1: Tensor | float = 1.0
            if options.selector == "received":
                real_BQ = call.sight.real_BQ
                queries_B1 = call.query_BHQD.shape[2] if real_BQ is None else real_BQ.sum(-1, keepdim=True)
            mass_BH = score_BHS.gather(2, columns_BHM).sum(-1) / queries_B1
        return _Selection(columns_BHM, mass_BH, score_BHS.shape[-1])

    def _free(self, call: AttentionCall) -> Tensor:
        """Keys that may be chosen, bool (B, S): no padding, no spared prefix. Raises ValueError when too few."""
        visible_BS = call.sight.visible_BS > 0
        free_BS = visible_BS.clone()
        if self.options.spare_prefix:
            free_BS[:, : self.log.note_prefix(call)] = False
        k, visible, free = self.options.k, int(visible_BS.sum(-1).min()), int(free_BS.sum(-1).min())
        needed = k if self.options.control == "sinks" else 2 * k
        if k >= visible or needed > free:
            raise ValueError(
                f"MaskSinks(k={k}, control={self.options.control!r}) needs more than {k} keys that are not padding, "
                f"and {needed} to choose from, but a row of this batch has {visible} and {free}: lower k"
            )
        return free_BS

    def _control_order(self, score_BHS: Tensor) -> Tensor:
        if self.options.control == "random":
            # Drawn on the CPU, so that a seed means the same columns on every device.
            return torch.rand(score_BHS.shape, generator=self.generator).to(score_BHS.device)
        return torch.arange(score_BHS.shape[-1], device=score_BHS.device, dtype=torch.float64).expand(score_BHS.shape)

    def _check_shape(self, selection: _Selection, call: AttentionCall) -> None:
        batch, heads = selection.columns_BHM.shape[:2]
        now = (call.query_BHQD.shape[0], call.query_BHQD.shape[1], call.key_BKSD.shape[2])
        if (batch, heads) != now[:2] or now[2] < selection.keys:
            raise ValueError(
                f"the selection was made for {batch} rows, {heads} heads and {selection.keys} keys, but this forward "
                f"has {now[0]}, {now[1]} and {now[2]}: call log.reset() where a new sequence or batch begins"
            )

    def _removal(self) -> Removal | None:
        if not self.applied:
            return None
        before = self.previous.get(self.slot, {})
        layers = tuple(self.applied)
        overlaps = [
            _jaccard(self.applied[layer].columns_BHM, before[layer].columns_BHM)
            if layer in before
            else torch.full_like(self.applied[layer].mass_BH, math.nan)
            for layer in layers
        ]
        return Removal(
            forward=self.count,
            edit=self.options,
            layers=layers,
            columns_BLHM=torch.stack([self.applied[layer].columns_BHM for layer in layers], 1).cpu(),
            mass_BLH=torch.stack([self.applied[layer].mass_BH for layer in layers], 1).float().cpu(),
            overlap_BLH=torch.stack(overlaps, 1).float().cpu(),
        )


def _jaccard(a_BHM: Tensor, b_BHM: Tensor) -> Tensor:
    common_BH = (a_BHM.unsqueeze(-1) == b_BHM.unsqueeze(-2)).any(-1).sum(-1)
    return common_BH / (a_BHM.shape[-1] + b_BHM.shape[-1] - common_BH)


def mask_columns(call: AttentionCall, gone_BHS: Tensor) -> AttentionCall:
    """The call with these keys hidden from every query. A query that would lose all keys keeps what it had.

    The mask stays (B, H, 1, S) unless the call's own differs by query.
    """
    keep_BH1S = ~gone_BHS.unsqueeze(2)
    mask = call.mask
    if mask is not None and not call.is_causal and _same_for_all_queries(mask):
        mask = mask[:, :, :1]
    if call.is_causal:
        queries, keys = call.query_BHQD.shape[2], call.key_BKSD.shape[2]
        square_11QS = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=gone_BHS.device).tril()
        if mask is None:
            mask = square_11QS
        else:
            mask = mask & square_11QS if mask.dtype == torch.bool else mask.masked_fill(~square_11QS, -math.inf)
    if mask is None:
        return replace(call, mask=keep_BH1S)
    if mask.dtype == torch.bool:
        edited = mask & keep_BH1S
        lost = ~edited.any(-1, keepdim=True)
        return replace(call, mask=torch.where(lost, mask, edited), is_causal=False)
    edited = mask.masked_fill(~keep_BH1S, -math.inf)
    lost = edited.amax(-1, keepdim=True) <= torch.finfo(mask.dtype).min / 2
    return replace(call, mask=torch.where(lost, mask, edited), is_causal=False)


def _same_for_all_queries(mask: Tensor) -> bool:
    return mask.shape[2] == 1 or mask.stride(2) == 0 or bool((mask == mask[:, :, :1]).all())


def zero_values(call: AttentionCall, gone_BHS: Tensor) -> AttentionCall:
    """The call with the values of these keys set to zero: attention stays as it is, and they add nothing."""
    value, key = call.value_BKSD, call.key_BKSD
    groups = call.query_BHQD.shape[1] // key.shape[1]
    if groups > 1:
        # Query heads of one value head lose different keys: each needs its own values from here on.
        value, key = value.repeat_interleave(groups, 1), key.repeat_interleave(groups, 1)
    return dataclasses.replace(call, key_BKSD=key, value_BKSD=value.masked_fill(gone_BHS.unsqueeze(-1), 0.0))
