"""Interventions on hidden states: the output of a decoder layer, or a tensor within it, is changed
before it is read; and the log of a block as tables.
"""

# B batch, L layers, H query heads, M keys removed, Q positions that run, D width of hidden states,
# C channels
from __future__ import annotations

from dataclasses import MISSING, dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sinklab.core.errors import limited, whole_numbers
from sinklab.core.instrument import Call, InterventionLog, Listener, RemovalRecord
from sinklab.core.instrument.edits.dose import MEASURED
from sinklab.core.instrument.edits.edit import Edit, Editor
from sinklab.core.instrument.scope import chosen
from sinklab.core.registry import interventions


class StateRecord(NamedTuple):
    """Effect of one edit of hidden states after one layer, on one batch row in one forward."""

    edit: str
    """Registered name; "clip_channel#2" for the second of its name in the block."""
    forward: int
    """Index of the forward since its run began, as in `RemovalRecord`."""
    layer: int
    """Number in the order of execution."""
    row: int
    before: float
    """The greatest magnitude among the numbers that are edited, as the layer gave them."""
    after: float
    """The greatest magnitude among them as they are read."""
    changed: float
    """Share of them that are others now, 0 to 1."""


def state_records(log: InterventionLog) -> list[StateRecord]:
    """Effects of the edits of hidden states in an `intervene(…) as log` block: of one edit after
    the other, by forward.

    As a table: ``pandas.DataFrame(state_records(log))``.
    """
    return [
        record for one in log.handlers if isinstance(one, StateHandler) for record in one.records
    ]


KINDS = dict.fromkeys(("forward", "layer", "head", "row"), "int32") | dict.fromkeys(
    MEASURED, "float32"
)
"""Types of the columns of `removal_table`."""


def removal_table(log: InterventionLog) -> dict[str, Any]:
    """Everything that was removed as columns of a table: a row per forward, edit, row of the batch,
    layer and head, with the measures of `MEASURED` and the keys as a list ("key_list").
    """
    parts = [columns_of(record) for record in log.removals]
    table: dict[str, Any] = dict.fromkeys(("forward", "edit", "layer", "head", "row"))
    for name, kind in KINDS.items():
        numbers = [np.empty(0, kind), *(part[name] for part in parts)]
        table[name] = np.concatenate(numbers, dtype=kind, casting="unsafe")
    table["edit"] = [one.label for one in log.removals for _ in range(one["keys"].numel())]
    # fixed positions share one tensor from step to step: its lists are made once
    columns = {id(one.columns_BLHM): one.columns_BLHM for one in log.removals}
    rows = {
        which: [[key for key in row if key >= 0] for row in columns_BLHM.flatten(0, 2).tolist()]
        for which, columns_BLHM in columns.items()
    }
    table["key_list"] = [keys for one in log.removals for keys in rows[id(one.columns_BLHM)]]
    return table


def columns_of(record: RemovalRecord) -> dict[str, np.ndarray]:
    """Columns of the table of one forward of one edit, without the keys' list."""
    row, layer, head = np.indices(record["keys"].shape).reshape(3, -1)
    places = {
        "forward": np.full(len(row), record.forward),
        "layer": np.asarray(record.layer_numbers)[layer],
        "head": np.asarray(record.heads)[head],
        "row": row,
    }
    return places | {name: part.flatten().numpy() for name, part in record.numbers.items()}


@interventions.register("clip_channel")
@dataclass(frozen=True, kw_only=True)
class ClipChannel(Edit):
    """Clip channels of the hidden states that leave a layer: the causal test of massive
    activations.

    Sun et al. (arXiv 2402.17762, Sec. 3.3) set massive activations to zero, which breaks a model;
    arXiv 2603.05498 asks which of them make sinks.
    `trace(model, ("massive_activations",))` says which channels these are. Positions that run are
    edited; the model's own sink columns are not. With layers replayed by gradient checkpointing it
    takes transformers 5.23: with older ones PyTorch refuses the replay.

    Raises ValueError for no channel, a negative limit, and in the run for a channel that the hidden
    states do not have.
    """

    channels: tuple[int, ...]
    """Channels of the hidden states, from 0."""
    limit: float = limited(MISSING, at_least=0)
    """The greatest magnitude that stays, 0 for none."""
    layers: tuple[int | str, ...] | None = limited(None, read=chosen)
    """Layers after which to edit: numbers in the order of execution (-1 is the last), module paths
    or parts of them; None for all."""
    heads: ClassVar[None] = None  # type: ignore[misc]

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(
            self, "channels", tuple(sorted(set(whole_numbers("channels", self.channels))))
        )
        if not self.channels:
            raise ValueError("channels name what to clip, got none: leave out the edit")

    def change(self, states_BQD: Tensor, call: Call) -> Part:
        """New values of the channels."""
        width = states_BQD.shape[2]
        if self.channels[-1] >= width:
            raise ValueError(
                f"hidden states have channels 0 to {width - 1}, got {self.channels[-1]}: name one "
                "of those"
            )
        part = (..., list(self.channels))
        return part, states_BQD[part].clamp(-self.limit, self.limit)

    def handler(self, log: InterventionLog, forwards_per_step: int) -> Listener:
        """The listener that carries this intervention out and writes into the log."""
        return StateHandler(self, log, forwards_per_step)


Part = tuple[Any, Tensor] | None
"""Index of the part of the hidden states that an edit changes, and its new numbers; None where it
changes nothing."""


def real_weight(real_BQ: Tensor | None, states_BQD: Tensor) -> Tensor:
    """1 for positions that are real, 0 for padding, (B, Q, 1)."""
    if real_BQ is None:
        return torch.ones_like(states_BQD[..., :1])
    return real_BQ.to(states_BQD)[..., None]


class StateHandler(Editor):
    """Edits the output of decoder layers that contain an attention call to edit, and records the
    effect. The edit has a method `change(states_BQD, call)` that gives a `Part`.
    """

    def __init__(self, intervention: Any, log: InterventionLog, forwards_per_step: int) -> None:
        self.records: list[StateRecord] = []
        super().__init__(intervention, log, forwards_per_step)
        self.of_states = self.label

    def discard(self) -> None:
        super().discard()
        self.running: dict[str, Call] = {}
        """Attention calls of the layers that run now."""
        self.done: dict[int, tuple[Tensor, ...]] = {}
        """Layer number -> effect in this forward."""

    def edit(self, call: Call) -> Call:
        here = None
        if not self.log.is_probing:
            here = self.here(call)
        if here is not None:
            self.prepare(here)
        return call

    def observe(self, call: Call, out: Tensor) -> None:
        """Attention is not changed."""

    def prepare(self, call: Call) -> None:
        """The layer of this call is to be edited."""
        self.running[call.layer] = call

    def edit_states(self, calls: list[str], states_BQD: Tensor) -> Tensor:
        named = [(layer, self.running.pop(layer)) for layer in calls if layer in self.running]
        if not named:
            return states_BQD
        return self.changed(states_BQD, *named[0])

    def changed(self, old_BQD: Tensor, layer: str, call: Call) -> Tensor:
        """Numbers of this layer with the part changed that the edit names."""
        found = self.intervention.change(old_BQD, call)
        if found is None:
            return old_BQD
        part, new = found
        edited_BQD = old_BQD.clone()
        edited_BQD[part] = new
        # Layers replayed by a backward pass come after the end of their forward, and are recorded
        # already.
        if not call.is_replay:
            self.acted = True
            real = real_weight(call.visibility.real_BQ, old_BQD).expand_as(old_BQD)[part]
            before, after = (
                (one[part].detach().float() * real).flatten(1) for one in (old_BQD, edited_BQD)
            )
            changed_B = (before != after).sum(1) / real.flatten(1).sum(1)
            greatest = (one.abs().amax(1) for one in (before, after))
            self.done[self.tap.layers[layer]] = (*greatest, changed_B)
        return edited_BQD

    def finish(self) -> None:
        for layer, parts in self.done.items():
            rows = enumerate(torch.stack(parts, 1).tolist())
            self.records += [
                StateRecord(self.label, self.count, layer, row, *numbers) for row, numbers in rows
            ]
        self.done = {}
        super().finish()
