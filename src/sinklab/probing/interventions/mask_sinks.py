"""`MaskSinks`: take away the keys that received most attention, one step later (arXiv 2510.15731, section 4.3)."""

# B batch, H query heads, S keys, M keys taken away
from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from sinklab.probing.call import AttentionCall
from sinklab.probing.choosing import Chooser, KeyScores, as_columns, flags, widened
from sinklab.probing.editing import KeyHandler, Selection, head_numbers, is_full, layer_names, whole_numbers
from sinklab.probing.log import InterventionLog
from sinklab.probing.removing import REMOVALS
from sinklab.probing.scope import whole
from sinklab.probing.tap import Listener
from sinklab.registry import interventions
from sinklab.sinks.rules import Excess

_CHOICES = {
    "source": ("closed_loop", "clean_pass", "carried"),
    "control": ("sinks", "random", "recent", "lowest"),
    "removal": REMOVALS,
    "selector": ("received", "last_row"),
    "shared": ("head", "layer"),
}


@interventions.register("mask_sinks")
@dataclass(frozen=True)
class MaskSinks:
    """Remove sinks per (batch row, layer, query head), chosen from the forward before: the top k, or all above epsilon.

    Raises ValueError unless exactly one of k and epsilon is given, and for values outside those listed.
    """

    k: int | None = None
    """Number of keys to remove; fewer than there are keys that are not padding."""
    epsilon: float | None = None
    """Remove every key with a_j > 1 + epsilon (S-1)/S (Eq. 3 in sums). Where a cache lets only some queries run, a_j is
    scaled by positions / queries that ran, so that an even share is 1 in every forward."""
    source: str = "closed_loop"
    """"closed_loop": forward t loses what received most at forward t-1 of the same edited run, the first is unedited.
    "clean_pass": chosen in forwards run unedited under `log.probing()`. "carried": as closed_loop, and what was taken
    once stays away; every forward adds its own until `limit` keys are gone."""
    control: str = "sinks"
    """"sinks": the top k. "random", "recent", "lowest": as many keys that are not among them, drawn, the last ones, or
    those that received least (a masked key receives nothing: in a closed loop these stay the same from then on)."""
    seed: int = 0
    """Seed of the random control."""
    removal: str = "mask"
    """"mask": before the softmax, the mass goes to other keys. "zero_value": the mass stays, the value adds nothing.
    "evict": keys and values leave the memory. In one forward that is a mask; under a cache the keys stay gone, those of
    recomputed columns too, until everything is computed anew (under an autoregressive cache: to the end).
    A query that would lose every key it may see (the first rows of a causal map) keeps its own."""
    selector: str = "received"
    """"received": column sums over all queries. "last_row": the last query's row (the autoregressive reading)."""
    spare_prefix: bool = False
    """Never choose the model's own sink columns, which stand in front of the keys."""
    spare: tuple[int, ...] = ()
    """Canvas positions that are never chosen."""
    layers: tuple[int | str, ...] | None = None
    """Layers to edit: numbers in the order of execution (-1 is the last), module paths or patterns; None for all."""
    heads: tuple[int, ...] | None = None
    """Query heads to edit; None for all."""
    shared: str = "head"
    """"head": every head loses its own keys. "layer": all (named) heads lose those that receive most on their mean."""
    limit: int | None = None
    """The most keys a head may have lost at a time; needed by "carried", where sets grow, and open to "evict"."""

    def __post_init__(self) -> None:
        if (self.k is None) == (self.epsilon is None):
            raise ValueError(
                f"MaskSinks takes k, how many keys, or epsilon, how far above an even share; got k={self.k} and "
                f"epsilon={self.epsilon}: give one of them"
            )
        for what, given in (("k", self.k), ("limit", self.limit)):
            number = whole(given)
            if given is not None and (number is None or number < 1):
                raise ValueError(
                    f"{what} counts the keys to remove, at least 1, got {given!r}: for none, leave out the edit"
                )
            object.__setattr__(self, what, number)
        if self.epsilon is not None:
            Excess(self.epsilon)
        for name, allowed in _CHOICES.items():
            _one_of(name, getattr(self, name), allowed)
        grows = self.source == "carried" or self.removal == "evict"
        if (self.source == "carried" and self.limit is None) or (self.limit is not None and not grows):
            raise ValueError(
                'limit says how many keys may be gone at a time where gone keys stay gone: source="carried" needs it, '
                f'removal="evict" takes it, the others do not; got source={self.source!r}, removal={self.removal!r}, '
                f"limit={self.limit}"
            )
        object.__setattr__(self, "spare", whole_numbers("spare", self.spare))
        object.__setattr__(self, "layers", layer_names(self.layers))
        object.__setattr__(self, "heads", head_numbers(self.heads))

    def handler(self, log: InterventionLog, forwards_per_step: int) -> Listener:
        """The listener that carries this edit out and writes into the log."""
        return _SinkHandler(self, log, forwards_per_step)


def _one_of(name: str, value: object, allowed: Collection[str]) -> None:
    if value not in allowed:
        near = difflib.get_close_matches(str(value), allowed, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "choose one of them"
        raise ValueError(f"{name} is one of {tuple(allowed)}, got {value!r}: {hint}")


class _SinkHandler(KeyHandler):
    options: MaskSinks

    def __init__(self, options: MaskSinks, log: InterventionLog, forwards_per_step: int) -> None:
        self.chooser = Chooser(options, log)
        # Whether a key may be chosen again after it was evicted is known in the next forward: the choice waits for it.
        self.waits = options.removal == "evict" and options.source == "closed_loop"
        super().__init__(options, log, forwards_per_step)

    def reset(self) -> None:
        # By slot and layer: what the next forward loses, or what it is to be chosen from.
        self.slots: dict[int, dict[str, Selection | KeyScores]] = {}
        super().reset()

    def start(self) -> None:
        slots = self.slots
        super().start()
        if self.options.source == "clean_pass":
            self.slots = slots

    def discard(self) -> None:
        self.chosen: dict[str, Selection | KeyScores] = {}
        super().discard()

    def begin(self) -> None:
        super().begin()
        if self.options.source == "clean_pass":
            self.slot = 0

    def taken(self, call: AttentionCall) -> Selection | None:
        found = self.slots.get(self.slot, {}).get(call.layer)
        if found is None:
            if self.options.source == "clean_pass":
                raise ValueError(
                    'source="clean_pass" chooses in an unedited forward, but none was run: '
                    "with log.probing(): model(…) before the edited forward"
                )
            return None
        self._check_shape(found, call)
        if isinstance(found, KeyScores):
            evicted_BHS = None if is_full(call, self.log) else self.evicted.get(self.slot, {}).get(call.layer)
            found = self._choice(call, found, evicted_BHS)
        return dataclasses.replace(found, gone_BHS=widened(found.gone_BHS, call.key_BKSD.shape[2]))

    def observe(self, call: AttentionCall) -> None:
        chooses = self.log.is_probing == (self.options.source == "clean_pass")
        if not (chooses and self.scope.covers(call.layer, self.log)):
            return
        standing = self.chooser.standing(call, self.heads_of(call))
        now = self.now.get(call.layer) if self.options.source == "carried" else None
        if self.waits:
            self.chosen[call.layer] = standing
        else:
            self.chosen[call.layer] = self._choice(call, standing, None if now is None else now.gone_BHS)

    def finish(self) -> None:
        super().finish()
        if self.chosen:
            self.slots[self.slot] = self.chosen

    def why_idle(self) -> tuple[str, str]:
        if self.options.source == "clean_pass":
            return super().why_idle()
        source = f"source={self.options.source!r}" + (f", forwards_per_step={self.period}" if self.period > 1 else "")
        return (
            f"{source} removes what the step before chose, and no sequence had a second step",
            'run more than one denoising step, or choose within the step with source="clean_pass"',
        )

    def _choice(self, call: AttentionCall, standing: KeyScores, held_BHS: Tensor | None) -> Selection:
        heads, every, keys = self.heads_of(call), call.query_BHQD.shape[1], standing.received_BHS.shape[-1]
        held_BHS = None if held_BHS is None else held_BHS[:, heads]
        columns_BHM, mass_BH = self.chooser.choose(standing, held_BHS)
        if held_BHS is not None and self.options.source == "carried":
            columns_BHM = torch.cat([columns_BHM, as_columns(held_BHS)], -1)
        gone_BHS = flags(columns_BHM, keys)
        if len(heads) < every:
            some_BHS, gone_BHS = gone_BHS, gone_BHS.new_zeros(len(gone_BHS), every, keys)
            gone_BHS[:, heads] = some_BHS
        return Selection(gone_BHS, columns_BHM, mass_BH)

    def _check_shape(self, found: Selection | KeyScores, call: AttentionCall) -> None:
        now = (*call.query_BHQD.shape[:2], call.key_BKSD.shape[2])
        batch, heads, keys = (found.received_BHS if isinstance(found, KeyScores) else found.gone_BHS).shape
        heads = now[1] if isinstance(found, KeyScores) else heads
        if (batch, heads) != now[:2] or now[2] < keys:
            raise ValueError(
                f"the selection was made for {batch} rows, {heads} heads and {keys} keys, but this forward "
                f"has {now[0]}, {now[1]} and {now[2]}: call log.reset() where a new sequence or batch begins"
            )
