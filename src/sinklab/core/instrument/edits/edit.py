"""`Edit`, a change of attention calls; and `Editor`, which carries one out.

An edit says what becomes of one call (`before`) and may look at the call as it was made (`after`).
What lies between forwards is its editor's: the layers and heads that it concerns, the number of the
step, its memory of each layer, and the dose, for which the call is compared before and after.
"""

# B batch, L layers, H query heads (those edited), Q queries, S keys, M keys removed
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from sinklab.core.attention.received import of_heads
from sinklab.core.compat import graph_node
from sinklab.core.errors import Checked, check_tensor, limited
from sinklab.core.instrument.call import Call, Choice, real_queries_B1
from sinklab.core.instrument.edits.dose import MEASURED
from sinklab.core.instrument.edits.effect import ChosenKeys, Effect, jaccard, with_dose
from sinklab.core.instrument.edits.intervention import InterventionLog, RemovalRecord
from sinklab.core.instrument.scope import RecordingScope, chosen
from sinklab.core.instrument.tap import Listener
from sinklab.core.registry import interventions


@dataclass(frozen=True, kw_only=True)
class Edit(Checked):
    """Base of edits of attention calls. A function of the call is registered under a name, or a
    subclass with `before`::

        @interventions.register("temper")
        def temper(call, temperature=2.0):
            q_BHQD = call.q_BHQD.clone()
            q_BHQD[:, call.heads] /= temperature
            return replace(call, q_BHQD=q_BHQD)

    Raises ValueError for layers and heads that are no numbers or names.
    """

    layers: tuple[int | str, ...] | None = limited(None, read=chosen)
    """Layers to edit: numbers in the order of execution (-1 is the last), module paths or parts
    of them; None for all.
    """
    heads: tuple[int, ...] | None = limited(None, read=chosen)
    """Query heads to edit; None for all."""

    @property
    def extent(self) -> tuple[int, int]:
        """The first step in which it acts, and the last canvas position that it names (−1 for
        none).
        """
        return 0, -1

    def begin(self) -> None:
        """A forward begins. Raises ValueError if it cannot be edited."""

    def before(self, call: Call) -> Call:
        """The call to make in its place (`Call.block`, `dataclasses.replace`): the same one if
        nothing is to change. Changes are to be restricted to `call.heads`.
        """
        raise NotImplementedError(f"{self} has no method before of its own; write it")

    def after(self, call: Call) -> None:
        """The call as it was made, after all edits, or without any (`Call.is_clean`): to choose for
        the next step, into `Call.memory`.
        """

    def handler(self, log: InterventionLog, forwards_per_step: int) -> Listener:
        """The listener that carries this edit out and writes into the log."""
        return Editor(self, log, forwards_per_step)


class Editor(Listener):
    """Carries one edit out, and logs its effect."""

    def __init__(self, intervention: Any, log: InterventionLog, forwards_per_step: int) -> None:
        self.intervention = intervention
        self.log = log
        self.forwards_per_step = forwards_per_step
        name = interventions.name_of(intervention)
        count = sum(one.label.split("#")[0] == name for one in log.handlers) + 1
        self.label = name
        if count > 1:
            self.label = f"{name}#{count}"
        self.scope = RecordingScope(intervention.layers, intervention.heads)
        log.handlers.append(self)
        self.acted = False
        self.length = 0
        """Most canvas positions of a call so far."""
        self._generator: torch.Generator | None = None
        self.clean: dict[str, dict] = {}
        self.reset()

    def reset(self, *, run_begins: bool = False) -> None:
        """Another sequence begins (`InterventionLog.reset`)."""
        self.count = 0
        self.logged: dict[tuple[int, tuple[int, ...]], Tensor] = {}
        # by slot, the place of a forward in its step (guidance runs two, each with its own past),
        # and by layer: what the edit keeps, and the keys that the last forward removed
        self.kept: dict[int, dict[str, dict]] = {}
        self.removed: dict[int, dict[str, Tensor]] = {}
        if not run_begins:
            # else the clean pass may have been run ahead of the run that begins
            self.clean = {}
        self.discard()

    def discard(self) -> None:
        self.step = 0
        self.slot = 0
        self.memory: dict[str, dict] = {}
        """Memory of each layer, as of the forward that runs."""
        self.effects: dict[str, Effect] = {}
        """Effects in it, by layer."""
        self.removing: dict[str, Tensor] = {}
        # nodes of the graph before the first are of other forwards than the one remembered
        self.first_node = self.next_node = graph_node()

    def draw(self, shape: Sequence[int]) -> Tensor:
        """Numbers of a shape, uniform in [0, 1), by the seed of the edit: on the CPU, so that it
        means the same keys on every device.
        """
        if self._generator is None:
            self._generator = torch.Generator().manual_seed(self.intervention.seed)
        return torch.rand(tuple(shape), generator=self._generator)

    def begin(self) -> None:
        first = self.next_node
        self.discard()
        self.first_node = first
        self.step, self.slot = divmod(self.count, self.forwards_per_step)
        self.intervention.begin()

    def edit(self, call: Call) -> Call:
        here = None
        if not self.log.is_probing:
            here = self.here(call)
        if here is None:
            return call
        edited = self.check_call(self.intervention.before(here), here)
        if edited is here:
            return call
        # the forward that a backward pass repeats is in the log already
        if not call.is_replay:
            self._note(here, edited)
        return edited.within(heads=None, chosen=None)

    def observe(self, call: Call, out: Tensor) -> None:
        effect = self.effects.get(call.layer)
        if effect is not None and self.log.measure:
            with torch.no_grad():
                share_BHS = call.received_BHS / real_queries_B1(call).unsqueeze(-1)
                strongest = of_heads(share_BHS, effect.heads).max(-1)
            # after every edit: whether a new sink has grown
            effect.numbers.update(strongest=strongest.values, strongest_at=strongest.indices)
        here = self.here(call)
        if here is not None:
            with torch.no_grad():
                self.intervention.after(here)

    def here(self, call: Call) -> Call | None:
        """The call with the heads to edit, the step and the memory of its layer; None if the layer
        is not edited. Raises ValueError for a head that is not there, and for a negative layer
        before they can be counted, and for a replay of another forward than the last.
        """
        scope = self.scope
        log = self.log
        layer = call.layer
        if call.is_replay and (graph_node() < self.first_node or f"{layer}#2" in self.tap.layers):
            raise ValueError(
                f"{self.label}: a backward pass runs {layer or 'the model'} again (gradient "
                "checkpointing), and what was edited is remembered of the last forward of a layer "
                "alone: call backward after each forward, inside the block, or leave checkpointing "
                "out"
            )
        if scope.total is None:
            scope.total = log.layer_count
        last = [one for one in scope.layers or () if isinstance(one, int) and one < 0]
        if last and scope.total is None:
            raise ValueError(
                f"{self.label}: layer {last[0]} counts from the last, but how many there are is "
                "known only after a forward (the model has no config.num_hidden_layers): count "
                "from the first, or give module paths"
            )
        if not scope.has_layer(self.tap.layers[layer], layer):
            return None
        total = call.q_BHQD.shape[1]
        if layer not in self.memory:
            kept = {} if log.is_probing else self.kept.get(self.slot, {}).get(layer, {})
            self.memory[layer] = {**kept, **self.clean.get(layer, {})}
        if not log.is_probing:
            self.length = max(self.length, call.k_BKSD.shape[2] - call.prefix)
            if call.visibility.running is not None:
                self._check_positions()
        return call.within(
            heads=sorted(scope.heads_of(layer, total) or range(total)),
            step=self.step,
            is_clean=log.is_probing,
            memory=self.memory[layer],
            choice=Choice(draw=self.draw),
            chosen=None,
            alone_BH=None,
        )

    def check_call(self, edited: Any, call: Call) -> Call:
        """The call that an edit returned. Raises ValueError for anything else, and for queries,
        keys and values that do not belong together.
        """
        if not isinstance(edited, Call):
            raise ValueError(
                f"the edit of an intervention returns the call to make, but {self.label} returned "
                f"a {type(edited).__name__}: return dataclasses.replace(call, …), or call where "
                "nothing is to change"
            )
        keys = (len(call.q_BHQD), None, edited.k_BKSD.shape[2], None)
        check_tensor(f"the queries after {self.label}", edited.q_BHQD, call.q_BHQD.shape)
        # torch reads beyond the end of values that are fewer than the keys
        check_tensor(f"the values after {self.label}", edited.v_BKSD, keys)
        return edited

    def _note(self, before: Call, after: Call) -> None:
        """Measure the effect on a call."""
        heads = before.heads or []
        found: ChosenKeys | None = after.chosen
        numbers: dict[str, Tensor] = {}
        columns_BHM = before.q_BHQD.new_empty((len(before.q_BHQD), len(heads), 0)).long()
        if found is not None:
            columns_BHM = found.columns_BHM
            numbers |= found.numbers
            blocked_BHS = before.of_heads(found.blocked_BHS)
            numbers["keys"] = blocked_BHS.sum(-1)
            numbers["alone"] = torch.zeros_like(numbers["keys"])
            if after.alone_BH is not None:
                numbers["alone"] = before.of_heads(after.alone_BH)
            last_BHS = self.removed.get(self.slot, {}).get(before.layer)
            if last_BHS is not None:
                numbers["overlap"] = jaccard(blocked_BHS, last_BHS)
            self.removing[before.layer] = blocked_BHS
        if self.log.measure:
            with torch.no_grad():
                numbers = with_dose(before, after, numbers)
        self.effects[before.layer] = Effect(heads, columns_BHM, numbers)

    def finish(self) -> None:
        self.next_node = graph_node()
        if self.log.is_probing:
            self.clean |= self.memory
            return
        self.kept.setdefault(self.slot, {}).update(self.memory)
        self.removed[self.slot] = self.removing
        effects = self.effects
        self.acted |= bool(effects)
        for heads in dict.fromkeys(tuple(part.heads) for part in effects.values()):
            self._record(heads)
        self.count += 1

    def _record(self, heads: tuple[int, ...]) -> None:
        """Log the layers that were edited in these heads (layers may have different numbers of
        them), once their numbers are read.
        """
        parts = {layer: part for layer, part in self.effects.items() if tuple(part.heads) == heads}
        some_BHM = next(iter(parts.values())).columns_BHM
        unknown_BH = torch.full(some_BHM.shape[:2], math.nan, device=some_BHM.device)
        widest = max(part.columns_BHM.shape[-1] for part in parts.values())
        columns = [
            pad(part.columns_BHM, (0, widest - part.columns_BHM.shape[-1]), value=-1)
            for part in parts.values()
        ]
        stacked = [
            torch.stack([part.numbers.get(name, unknown_BH) for part in parts.values()], 1)
            for name in MEASURED
        ]
        # numbers of columns are exact in float32 up to 16 million
        self.tap.reads.later(
            partial(self._log, self.count, self.slot, tuple(parts), heads),
            torch.stack(columns, 1),
            *stacked,
        )

    def _log(
        self,
        forward: int,
        slot: int,
        layers: tuple[str, ...],
        heads: tuple[int, ...],
        columns_BLHM: Tensor,
        *numbers: Tensor,
    ) -> None:
        columns_BLHM = columns_BLHM.long()
        is_used = (columns_BLHM >= 0).flatten(0, 2).any(0).tolist()
        width = max((number for number, used in enumerate(is_used, 1) if used), default=0)
        columns_BLHM = columns_BLHM[..., :width]
        # In the memory of the last entry where nothing has changed: fixed positions cost nothing
        # more.
        last_BLHM = self.logged.get((slot, heads))
        if last_BLHM is None or not torch.equal(last_BLHM, columns_BLHM):
            last_BLHM = self.logged[slot, heads] = columns_BLHM
        self.log.removals.append(
            RemovalRecord(
                forward=forward,
                edit=self.intervention,
                label=self.label,
                layers=layers,
                layer_numbers=tuple(self.tap.layers[layer] for layer in layers),
                heads=heads,
                columns_BLHM=last_BLHM,
                numbers=dict(zip(MEASURED, numbers, strict=True)),
            )
        )

    def _check_positions(self) -> None:
        last = self.intervention.extent[1]
        if 0 < self.length <= last:
            raise ValueError(
                f"{self.label}: there is no position {last}, the canvas had {self.length} (sink "
                f"columns not counted): name positions from 0 to {self.length - 1}"
            )

    def end(self) -> None:
        """The block ends without an error. Raises ValueError for a position that no canvas had;
        notes an edit that had no opportunity to act.
        """
        self._check_positions()
        log = self.log
        if self.acted or not log.forwards + log.probed:
            return
        ran = f"forwards: {log.forwards}"
        if self.forwards_per_step > 1:
            ran += f", forwards_per_step={self.forwards_per_step}"
        if log.probed:
            ran += f", under log.probing(): {log.probed}"
        log.idle[self.label] = (
            f"{self.label} had no opportunity to act in this block ({ran}): it begins at step "
            f"{self.intervention.extent[0]} of a sequence, a choice of keys acts a step later "
            "(when='now' at once), and an edit that returns every call as it was never acts; run "
            "more steps outside log.probing(), or accept it with intervene(…, allow_idle=True)"
        )
