"""What all edits share: where they apply, which forward it is, and what they write into the log."""

# B batch, L layers, H query heads, S keys, M keys taken away
from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from sinklab.probing.call import AttentionCall
from sinklab.probing.choosing import as_columns, widened
from sinklab.probing.log import InterventionLog, RemovalRecord
from sinklab.probing.removing import held_share, keys_seen, restricted, zero_values
from sinklab.probing.scope import RecordingScope, several, whole, whole_numbers
from sinklab.probing.tap import Listener
from sinklab.registry import interventions


def layer_names(given: Any) -> tuple[int | str, ...] | None:
    """`layers` of an edit as a tuple; None means all. Raises ValueError for what is neither number nor path."""
    if given is None:
        return None
    found = [one if isinstance(one, str) else whole(one) for one in several(given)]
    layers = tuple(one for one in found if one is not None)
    if not layers or len(layers) < len(found):
        raise ValueError(
            f"layers are numbers in the order of execution (-1 is the last) or module paths, got {given!r}: write a "
            'tuple such as (0, -1) or ("layers.3",); None means all'
        )
    return layers


def head_numbers(given: Any) -> tuple[int, ...] | None:
    """`heads` of an edit as a tuple; None means all. Raises ValueError for what is no number, and for no head."""
    if given is None:
        return None
    heads = whole_numbers("heads", given, least=None)
    if not heads:
        raise ValueError("heads names at least one query head, got none: None means all")
    return tuple(dict.fromkeys(heads))


class Scope:
    """The layers and heads of one edit, held to the model as it runs."""

    def __init__(self, label: str, layers: tuple[int | str, ...] | None, heads: tuple[int, ...] | None) -> None:
        self.label = label
        self.asked = RecordingScope.of(layers, heads, None, ())
        self.choice = self.asked

    def covers(self, layer: str, log: InterventionLog) -> bool:
        """Whether the edit applies to this layer. Raises ValueError for a negative number while nobody can count."""
        if self.choice is self.asked and any(isinstance(one, int) and one < 0 for one in self.asked.layers or ()):
            self.choice = replace(self.asked, layers=tuple(self._counted(one, log) for one in self.asked.layers or ()))
        return self.choice.has_layer(log.layers[layer], layer)

    def _counted(self, layer: int | str, log: InterventionLog) -> int | str:
        if isinstance(layer, str) or layer >= 0:
            return layer
        if log.layer_count is None:
            raise ValueError(
                f"{self.label}: layer {layer} counts from the last, but how many there are is known only after a "
                "forward (the model has no config.num_hidden_layers): count from the first, or give module paths"
            )
        # One that lies before the first stays negative, for `check` to refuse.
        return layer + log.layer_count

    def check(self, log: InterventionLog) -> None:
        """After a whole forward. Raises ValueError for layers that are not there."""
        self.asked.settle(list(log.layers))

    def of_heads(self, layer: str, heads: int) -> list[int]:
        """The query heads to edit in a layer that has so many, rising. Raises ValueError for one that is not there."""
        chosen = self.choice.heads_of(layer, heads)
        return list(range(heads)) if chosen is None else sorted(set(chosen))


def count_layers(model: nn.Module) -> int | None:
    """The number of layers the model's config names; None where it names none."""
    for module in model.modules():
        number = getattr(getattr(module, "config", None), "num_hidden_layers", None)
        if isinstance(number, int):
            return number
    return None


@dataclass(frozen=True)
class Effect:
    """What was taken away in one layer, over the heads that the edit names; NaN where it was not measured."""

    heads: list[int]
    columns_BHM: Tensor
    gone_BHS: Tensor
    mass_BH: Tensor
    realised_BH: Tensor
    left_BH: Tensor
    removed_BH: Tensor


@dataclass(frozen=True)
class Selection:
    """Keys to take away in one layer: flags for all heads, and what is logged of the heads that the edit names."""

    gone_BHS: Tensor
    columns_BHM: Tensor
    """By falling score, -1 where a head loses fewer than M."""
    mass_BH: Tensor
    """The share they held where they were chosen."""


class InterventionHandler(Listener):
    """Carries one edit out. A subclass says what becomes of a call, in `apply`."""

    def __init__(self, options: Any, log: InterventionLog, forwards_per_step: int) -> None:
        self.options, self.log, self.period = options, log, forwards_per_step
        self.label = log.named(interventions.name_of(options))
        self.scope = Scope(self.label, getattr(options, "layers", None), getattr(options, "heads", None))
        log.on_first.append(lambda: self.scope.check(log))
        log.on_reset.append(self.reset)
        log.on_start.append(self.start)
        log.on_end.append(self._note_idle)
        self.acted = False
        self.reset()

    def reset(self) -> None:
        # Slots keep the forwards of one step apart (guidance runs two), each with its own past.
        self.previous: dict[int, dict[str, Effect]] = {}
        self.logged: dict[tuple[int, tuple[int, ...]], Tensor] = {}
        self.count = 0
        self.discard()

    def start(self) -> None:
        self.reset()

    def discard(self) -> None:
        self.applied: dict[str, Effect] = {}
        self.slot = self.step = 0
        self.is_open = False

    def begin(self) -> None:
        self.discard()
        self.slot, self.step = self.count % self.period, self.count // self.period
        self.is_open = True

    def edit(self, call: AttentionCall) -> AttentionCall:
        if self.log.is_probing or not self.scope.covers(call.layer, self.log):
            return call
        edited, applied = self.apply(call)
        # Layers replayed by a backward pass come after the end of their forward, and are in the log already.
        if applied is not None and self.is_open:
            self.applied[call.layer] = applied
        return edited

    def heads_of(self, call: AttentionCall) -> list[int]:
        """The query heads to edit."""
        return self.scope.of_heads(call.layer, call.query_BHQD.shape[1])

    def apply(self, call: AttentionCall) -> tuple[AttentionCall, Effect | None]:
        """The edited call and what it lost; None where nothing was to be done."""
        raise NotImplementedError

    def finish(self) -> None:
        self.is_open = False
        if self.log.is_probing:
            return
        self.acted |= bool(self.applied)
        for heads in dict.fromkeys(tuple(part.heads) for part in self.applied.values()):
            self.log.add(self._removal(heads))
        self.previous[self.slot] = self.applied
        self.count += 1

    def why_idle(self) -> tuple[str, str]:
        """Why no forward was one to act in, and what to do about it."""
        return "its layers made no attention call outside log.probing()", "run the model there as well"

    def _note_idle(self) -> None:
        log = self.log
        if self.acted or not log.forwards + log.probed:
            return
        ran = f"forwards: {log.forwards}" + (f", under log.probing(): {log.probed}" if log.probed else "")
        why, remedy = self.why_idle()
        log.idle[self.label] = (
            f"{self.label} had no opportunity to act in this block ({ran}): {why}; {remedy}, or accept that with "
            "intervene(…, allow_idle=True)"
        )

    def _removal(self, heads: tuple[int, ...]) -> RemovalRecord:
        """The entry of the layers that lost keys in these heads (layers may have different numbers of heads)."""
        before = self.previous.get(self.slot, {})
        parts = {layer: part for layer, part in self.applied.items() if tuple(part.heads) == heads}
        overlaps = [
            _jaccard(part.gone_BHS, before[layer].gone_BHS)
            if layer in before
            else torch.full_like(part.mass_BH, math.nan)
            for layer, part in parts.items()
        ]
        widest = max(part.columns_BHM.shape[-1] for part in parts.values())
        columns = [pad(part.columns_BHM, (0, widest - part.columns_BHM.shape[-1]), value=-1) for part in parts.values()]
        shares = {name: [getattr(part, f"{name}_BH") for part in parts.values()] for name in _SHARES}
        return RemovalRecord(
            forward=self.count,
            edit=self.options,
            label=self.label,
            layers=tuple(parts),
            layer_numbers=tuple(self.log.layers[layer] for layer in parts),
            heads=heads,
            columns_BLHM=self._shared(torch.stack(columns, 1).cpu(), heads),
            overlap_BLH=_stacked(overlaps),
            **{f"{name}_BLH": _stacked(of_layers) for name, of_layers in shares.items()},
        )

    def _shared(self, columns_BLHM: Tensor, heads: tuple[int, ...]) -> Tensor:
        """The columns, in the memory of the last entry where nothing has changed: fixed positions cost nothing more."""
        last_BLHM = self.logged.get((self.slot, heads))
        if last_BLHM is None or not torch.equal(last_BLHM, columns_BLHM):
            last_BLHM = self.logged[self.slot, heads] = columns_BLHM
        return last_BLHM


_SHARES = ("mass", "realised", "left", "removed")


def _stacked(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts, 1).float().cpu()


def _jaccard(a_BHS: Tensor, b_BHS: Tensor) -> Tensor:
    """Of the keys that were gone in either step, the share gone in both; NaN where none was."""
    b_BHS = widened(b_BHS, a_BHS.shape[-1])
    a_BHS = widened(a_BHS, b_BHS.shape[-1])
    return (a_BHS & b_BHS).sum(-1) / (a_BHS | b_BHS).sum(-1)


class KeyHandler(InterventionHandler):
    """Takes the same keys from all queries of a head. A subclass says which, in `taken`."""

    def reset(self) -> None:
        # What is evicted stays gone, by slot and layer, until keys and values are computed anew.
        self.evicted: dict[int, dict[str, Tensor]] = {}
        super().reset()

    def discard(self) -> None:
        self.now: dict[str, Selection | None] = {}
        super().discard()

    def taken(self, call: AttentionCall) -> Selection | None:
        """What to take away in this layer and forward; None for nothing."""
        raise NotImplementedError

    def apply(self, call: AttentionCall) -> tuple[AttentionCall, Effect | None]:
        if self.is_open:
            taken = self.taken(call)
            self.now[call.layer] = self._with_evicted(taken, call) if self.options.removal == "evict" else taken
        taken = self.now.get(call.layer)
        if taken is None:
            return call, None
        edited, spared_BH = call, torch.zeros((), device=call.query_BHQD.device)
        if taken.columns_BHM.shape[-1]:
            if self.options.removal == "zero_value":
                edited = zero_values(call, taken.gone_BHS)
            else:
                # Flags expanded over heads stay one row of them: so does the mask.
                gone_BHS = taken.gone_BHS[:, :1] if taken.gone_BHS.stride(1) == 0 else taken.gone_BHS
                edited, spared_BH = restricted(call, ~gone_BHS.unsqueeze(2))
        return edited, self._applied(taken, call, edited, spared_BH) if self.is_open else None

    def finish(self) -> None:
        if not self.log.is_probing:
            self.evicted[self.slot] = {layer: taken.gone_BHS for layer, taken in self.now.items() if taken is not None}
        super().finish()

    def _with_evicted(self, taken: Selection | None, call: AttentionCall) -> Selection | None:
        known_BHS = self.evicted.get(self.slot, {}).get(call.layer)
        if known_BHS is None or is_full(call, self.log):
            return taken
        heads = self.heads_of(call)
        known_BHS = widened(known_BHS, call.key_BKSD.shape[2])
        if taken is None:
            known_BHM = as_columns(known_BHS[:, heads])
            return Selection(known_BHS, known_BHM, torch.full(known_BHM.shape[:2], math.nan, device=known_BHM.device))
        older_BHS = (known_BHS & ~taken.gone_BHS)[:, heads]
        columns_BHM = torch.cat([taken.columns_BHM, as_columns(older_BHS)], -1)
        return dataclasses.replace(taken, gone_BHS=known_BHS | taken.gone_BHS, columns_BHM=columns_BHM)

    def _applied(self, taken: Selection, call: AttentionCall, edited: AttentionCall, spared_BH: Tensor) -> Effect:
        heads = self.heads_of(call)
        gone_BHS = taken.gone_BHS[:, heads]
        realised_BH = left_BH = torch.full_like(taken.mass_BH, math.nan)
        if self.log.measure:
            with torch.no_grad():
                zeroed = self.options.removal == "zero_value"
                realised_BH = held_share(call, taken.gone_BHS, spared_BH)[:, heads]
                left_BH = (keys_seen(call, taken.gone_BHS) if zeroed else keys_seen(edited))[:, heads]
        return Effect(heads, taken.columns_BHM, gone_BHS, taken.mass_BH, realised_BH, left_BH, gone_BHS.sum(-1))


def is_full(call: AttentionCall, log: InterventionLog) -> bool:
    """Whether keys and values of the whole canvas are computed anew in this forward."""
    if call.visibility.running is not None:
        return call.visibility.running.columns is None
    return call.query_BHQD.shape[2] == call.key_BKSD.shape[2] - log.note_prefix(call)
