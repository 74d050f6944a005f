"""Common parts of every intervention: the place it applies, the number of the forward, and the
entries of the log.
"""

# B batch, L layers, H query heads (those edited), S keys, M keys removed
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from sinklab.core.attention.context import reads_wait
from sinklab.core.attention.received import of_heads
from sinklab.core.errors import Checked, check_tensor, limited
from sinklab.core.probing.call import Call, Listener, real_queries_B1
from sinklab.core.probing.dose import MEASURED
from sinklab.core.probing.intervention import InterventionLog, RemovalRecord
from sinklab.core.probing.interventions.removals import keys_seen, lost_share
from sinklab.core.probing.keys import at_once
from sinklab.core.probing.scope import RecordingScope, chosen
from sinklab.core.registry import interventions


@dataclass(frozen=True, kw_only=True)
class LayerIntervention(Checked):
    """Base of interventions on some layers and heads. A function is registered under a name, or a
    subclass with `edit`::

        @interventions.register("temper")
        def temper(call, temperature=2.0):
            q_BHQD = call.q_BHQD.clone()
            q_BHQD[:, call.heads] /= temperature
            return replace(call, q_BHQD=q_BHQD)

    Edits that take keys away are `BlockKeys`, which logs them.

    Raises ValueError for layers and heads that are no numbers or names.
    """

    layers: tuple[int | str, ...] | None = limited(None, read=chosen)
    """Layers to edit: numbers in the order of execution (-1 is the last), module paths or patterns;
    None for all.
    """
    heads: tuple[int, ...] | None = limited(None, read=chosen)
    """Query heads to edit; None for all."""

    def edit(self, call: Call) -> Call:
        """The call to make in its place (`dataclasses.replace`): the same one if nothing is to
        change.

        The subclass has to restrict its changes to `call.heads` itself.
        """
        raise NotImplementedError(f"{self} has no method edit of its own; write it")

    def handler(self, log: InterventionLog, forwards_per_step: int) -> Listener:
        """The listener that carries this intervention out and writes into the log."""
        return InterventionHandler(self, log, forwards_per_step)


@dataclass(frozen=True)
class Effect:
    """Keys removed in one layer, over the heads that are edited; NaN if it was not measured."""

    heads: list[int]
    columns_BHM: Tensor
    numbers: dict[str, Tensor]
    """Measures by name, as in `RemovalRecord` ("held" for `held_BLH`), each (B, H); those absent
    are not known.
    """


class InterventionHandler(Listener):
    """Carries one intervention out: it counts the forwards, edits each call (`apply`), and writes
    the log.

    It calls the intervention's `edit`, unless a subclass overrides `apply`.
    """

    def __init__(self, options: Any, log: InterventionLog, forwards_per_step: int) -> None:
        self.options = options
        self.log = log
        self.period = forwards_per_step
        name = interventions.name_of(options)
        count = sum(handler.label.split("#")[0] == name for handler in log.handlers) + 1
        self.label = name
        if count > 1:
            self.label = f"{name}#{count}"
        self.scope = RecordingScope(options.layers, options.heads)
        log.handlers.append(self)
        self.acted = False
        self.is_unchanged = False
        self.reset()

    def reset(self, *, run_begins: bool = False) -> None:
        """Forget every selection and observation. `run_begins`: because a denoising run begins, not
        at the request of the user.
        """
        self.logged: dict[tuple[int, tuple[int, ...]], Tensor] = {}
        self.count = 0
        self.discard()

    def discard(self) -> None:
        self.step = 0
        self.slot = 0
        """Place within the step: guidance runs two forwards, each with its own past."""
        self.effects: dict[str, Effect] = {}
        """Effects in the forward that runs, by layer."""
        self.is_open = False
        self._doubts: list[tuple[Tensor, Callable[[], None]]] = []

    def doubt(self, wrong: Tensor, check: Callable[[], None]) -> None:
        """Have `check` raise if the flag is set: now, or with the log at the end of the forward if
        reads wait.
        """
        if self.is_open and reads_wait(wrong.device):
            self._doubts.append((wrong, check))
        else:
            at_once(wrong, check)

    def _read(self, *parts: Tensor) -> list[Tensor]:
        """Return these tensors on the CPU, float32, brought over in one piece with whatever is in
        doubt.
        """
        doubts = self._doubts
        self._doubts = []
        asked = [*parts, *(wrong for wrong, _ in doubts)]
        flat = [part.flatten().float() for part in asked]
        whole = torch.cat(flat).cpu()
        there = whole.split([len(part) for part in flat])
        # read in one piece: a question to each flag would be a wait of its own
        flags = whole[len(whole) - len(doubts) :].tolist()
        for is_wrong, (_, check) in zip(flags, doubts, strict=True):
            if is_wrong:
                check()
        return [one.view(part.shape) for one, part in zip(there, parts, strict=False)]

    def begin(self) -> None:
        self.step, self.slot = divmod(self.count, self.period)
        self.effects = {}
        self.is_open = True

    def edit(self, call: Call) -> Call:
        if self.log.is_probing:
            return call
        here = self.here(call)
        if here is None:
            return call
        edited, effect = self.apply(here)
        # Layers replayed by a backward pass come after the end of their forward, and are in the log
        # already.
        if effect is not None and self.is_open:
            self.effects[call.layer] = effect
        if edited is here:
            return call
        return edited.within(heads=None)

    def here(self, call: Call) -> Call | None:
        """The call with the heads to edit, the step and the added sinks; None if its layer is not
        edited.

        Raises ValueError for a head that is not there, and for a negative number before layers can
        be counted.
        """
        scope = self.scope
        log = self.log
        if scope.total is None:
            scope.total = log.layer_count
        behind = [one for one in scope.layers or () if isinstance(one, int) and one < 0]
        if behind and scope.total is None:
            raise ValueError(
                f"{self.label}: layer {behind[0]} counts from the last, but how many there are is "
                "known only after a forward (the model has no config.num_hidden_layers): count "
                "from the first, or give module paths"
            )
        if not scope.has_layer(log.layers[call.layer], call.layer):
            return None
        total = call.q_BHQD.shape[1]
        heads = sorted(scope.heads_of(call.layer, total) or range(total))
        return call.within(heads=heads, prefix=log.prefix or 0, step=self.step)

    def observe(self, call: Call, out: Tensor) -> None:
        """Note the strongest key of the heads that were edited, after every edit, be it one that
        has grown anew.
        """
        effect = self.effects.get(call.layer)
        if effect is None or not self.is_open or not self.log.measure or self.log.is_probing:
            return
        with torch.no_grad():
            queries_B11 = real_queries_B1(call).unsqueeze(-1)
            strongest = (of_heads(call.received_BHS, effect.heads) / queries_B11).max(-1)
        effect.numbers.update(strongest=strongest.values, strongest_at=strongest.indices)

    def apply(self, call: Call) -> tuple[Call, Effect | None]:
        """The edited call and its effect; None if nothing was to be done."""
        edited = self.checked(self.options.edit(call), call)
        self.is_unchanged |= edited is call
        if edited is call or not self.is_open:
            return edited, None
        heads = call.heads or []
        numbers: dict[str, Tensor] = {}
        if self.log.measure:
            with torch.no_grad():
                # If the scores themselves are others, no share of them was removed.
                if (
                    edited.q_BHQD is call.q_BHQD
                    and edited.k_BKSD is call.k_BKSD
                    and edited.scale is call.scale
                ):
                    numbers["removed"] = lost_share(call, edited)[:, heads]
                numbers["left"] = keys_seen(edited)[:, heads]
                numbers["keys"] = keys_seen(call)[:, heads] - numbers["left"]
        none_BHM = call.q_BHQD.new_empty((len(call.q_BHQD), len(heads), 0)).long()
        return edited, Effect(heads, none_BHM, numbers)

    def checked(self, edited: Any, call: Call) -> Call:
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

    def finish(self) -> None:
        self.is_open = False
        if self.log.is_probing:
            if self._doubts:
                self._read()
            return
        effects = self.effects
        self.acted |= bool(effects)
        for heads in dict.fromkeys(tuple(part.heads) for part in effects.values()):
            self.log.removals.append(self._record(heads))
        if self._doubts:
            # a forward that chose and took nothing
            self._read()
        self.count += 1

    def why_idle(self) -> tuple[str, str]:
        """Why no forward was one to act in, and the remedy."""
        if self.is_unchanged:
            return "it returned every call as it was", "return dataclasses.replace(call, …)"
        return (
            "its layers made no attention call outside log.probing()",
            "run the model there as well",
        )

    def end(self) -> None:
        """The block ends without an error: note an intervention that had no opportunity to act."""
        log = self.log
        if self.acted or not log.forwards + log.probed:
            return
        ran = f"forwards: {log.forwards}"
        if log.probed:
            ran += f", under log.probing(): {log.probed}"
        why, remedy = self.why_idle()
        log.idle[self.label] = (
            f"{self.label} had no opportunity to act in this block ({ran}): {why}; {remedy}, or "
            "accept that with intervene(…, allow_idle=True)"
        )

    def _record(self, heads: tuple[int, ...]) -> RemovalRecord:
        """The entry of the layers that blocked keys in these heads (layers may have different
        numbers of heads).
        """
        parts = {layer: part for layer, part in self.effects.items() if tuple(part.heads) == heads}
        some_BHM = next(iter(parts.values())).columns_BHM
        unknown_BH = torch.full(some_BHM.shape[:2], math.nan, device=some_BHM.device)
        numbers = {
            name: [part.numbers.get(name, unknown_BH) for part in parts.values()]
            for name in MEASURED
        }
        widest = max(part.columns_BHM.shape[-1] for part in parts.values())
        columns = [
            pad(part.columns_BHM, (0, widest - part.columns_BHM.shape[-1]), value=-1)
            for part in parts.values()
        ]
        stacked = [torch.stack(found, 1) for found in numbers.values()]
        # numbers of columns are exact in float32 up to 16 million
        columns_BLHM, *read = self._read(torch.stack(columns, 1), *stacked)
        columns_BLHM = columns_BLHM.long()
        is_used = (columns_BLHM >= 0).flatten(0, 2).any(0).tolist()
        columns_BLHM = columns_BLHM[
            ..., : max((number for number, used in enumerate(is_used, 1) if used), default=0)
        ]
        last_BLHM = self.logged.get((self.slot, heads))
        # In the memory of the last entry where nothing has changed: fixed positions cost nothing
        # more.
        if last_BLHM is None or not torch.equal(last_BLHM, columns_BLHM):
            last_BLHM = self.logged[self.slot, heads] = columns_BLHM
        return RemovalRecord(
            forward=self.count,
            edit=self.options,
            label=self.label,
            layers=tuple(parts),
            layer_numbers=tuple(self.log.layers[layer] for layer in parts),
            heads=heads,
            columns_BLHM=last_BLHM,
            **{f"{name}_BLH": found for name, found in zip(numbers, read, strict=True)},
        )
