"""Patching: keys, values and hidden states of one run in another."""

# B batch (1: alike in all rows), H query heads, K key/value heads, Q queries, S keys, D head dim
# (width of hidden states)
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from sinklab.core.errors import limited, whole_numbers
from sinklab.core.instrument import (
    Call,
    Edit,
    InterventionLog,
    Listener,
)
from sinklab.core.instrument.routes import tapped
from sinklab.core.registry import interventions
from sinklab.lab.measures.values import reference_values
from sinklab.lab.scoring.hidden_states import Part, StateHandler


class Keeper(Listener):
    """Keeps keys, values and hidden states of every layer of the last forward."""

    def __init__(self) -> None:
        self.kept: dict[str, Tensor] = {}

    def observe(self, call: Call, out: Tensor) -> None:
        self._keep(call.layer, key=call.k_BKSD, value=call.v_BKSD)

    def observe_states(self, calls: list[str], states_BQD: Tensor) -> None:
        self._keep(calls[0], state=states_BQD)

    def _keep(self, layer: str, **vectors: Tensor) -> None:
        for name, own in vectors.items():
            kept = own.detach().cpu().clone(memory_format=torch.contiguous_format)
            self.kept[f"{layer}.{name}"] = kept


def save_run(model: Any, file: str | Path, *args: Any, states: bool = True, **kwargs: Any) -> None:
    """Run ``model(*args, **kwargs)`` once, and write for `Patch` keys and values of every layer
    and the hidden states behind it. A model without a list of decoder layers takes
    ``states=False``.
    """
    keeper = Keeper()
    if states:
        keeper.of_states = "save_run"
    with torch.no_grad(), tapped(model, keeper):
        model(*args, **kwargs)
    save_file(keeper.kept, str(file))


@interventions.register("patch")
@dataclass(frozen=True, kw_only=True)
class Patch(Edit):
    """Keys, values or hidden states of chosen positions become those of another run, of this model
    or of one of the same architecture (activation patching): does a sink follow its key or its
    value?

    A hidden state is patched behind each of `layers`, where its position runs.

    Raises ValueError for no position and for heads of hidden states, and in a call for a file,
    layer or position that is not there, or of another shape.
    """

    file: str
    """A file of `save_run`, of one row or as many as the call has."""
    positions: tuple[int, ...] = limited(MISSING, read=whole_numbers)
    """Canvas positions that are overwritten."""
    source: tuple[int, ...] = limited((), read=whole_numbers)
    """Positions in the other run, one for each; none for the same ones."""
    what: str = limited("both", one_of=("key", "value", "both", "state"))
    """Vectors that are overwritten; both: key and value."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.positions or len(self.source) not in (0, len(self.positions)):
            raise ValueError(
                "positions name what is overwritten, and source as many positions or none, got "
                f"{len(self.positions)} and {len(self.source)}: name one for each"
            )
        if self.what == "state" and self.heads is not None:
            raise ValueError(
                f"hidden states belong to no head, got heads={self.heads}: leave out heads"
            )

    def handler(self, log: InterventionLog, forwards_per_step: int) -> Listener:
        """The listener that carries this intervention out and writes into the log."""
        if self.what == "state":
            return StateHandler(self, log, forwards_per_step)
        return super().handler(log, forwards_per_step)

    def before(self, call: Call) -> Call:
        """The call with these keys or values overwritten in the edited heads."""
        own = {"key": call.k_BKSD, "value": call.v_BKSD}
        heads = torch.tensor(call.heads)[:, None]
        for name in own:
            own[name] = call.expand_kv(own[name]).clone()
            if self.what in (name, "both"):
                other_BKSD, to, source = self._taken(name, call, own[name].shape, call.prefix)
                other_BHSD = call.expand_kv(other_BKSD)
                own[name][:, heads, to] = other_BHSD[:, heads, source].to(own[name])
        return replace(call, k_BKSD=own["key"], v_BKSD=own["value"])

    def change(self, states_BQD: Tensor, call: Call) -> Part:
        """Hidden states of these positions, of those that run."""
        batch, _, width = states_BQD.shape
        own = batch, call.k_BKSD.shape[2] - call.prefix, width
        other_BSD, *places = self._taken("state", call, own)
        place = call.positions_Q.tolist()
        run = {place.index(to): source for to, source in zip(*places, strict=True) if to in place}
        if not run:
            return None
        return (slice(None), [*run]), other_BSD[:, [*run.values()]].to(states_BQD)

    def _taken(
        self, name: str, call: Call, own: Sequence[int], prefix: int = 0
    ) -> tuple[Tensor, list[int], list[int]]:
        """Vectors of the other run, and the places here and there behind so many columns."""
        found = reference_values(self.file).get(f"{call.layer}.{name}", torch.empty(0, 1, 0))
        to = [prefix + position for position in self.positions]
        source = [prefix + position for position in self.source or self.positions]
        other = found.shape
        fits = other[0] in (1, own[0]) and other[-1] == own[-1] and own[-3] % other[-3] == 0
        if not (fits and max(to) < own[-2] and max(source) < other[-2]):
            raise ValueError(
                f"{self.file} has {name}s {tuple(other)} of {call.layer}, which has {tuple(own)}: "
                f"positions {self.source or self.positions} cannot be taken to {self.positions}; "
                "save a run of the same architecture, with one row or as many, and name positions "
                "of both"
            )
        return found, to, source
