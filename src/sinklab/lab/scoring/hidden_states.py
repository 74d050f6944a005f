"""Interventions on hidden states: the output of a decoder layer is changed before the next one
reads it.
"""

# B batch, Q positions that run, D width of hidden states, C channels
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from sinklab.core.errors import Checked, limited
from sinklab.core.probing.call import AttentionCall
from sinklab.core.probing.intervention import InterventionLog
from sinklab.core.probing.interventions.base import CallSite, Effect, InterventionHandler
from sinklab.core.probing.listener import Listener
from sinklab.core.probing.scope import chosen, whole_numbers
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
    """The greatest magnitude in the channels as the layer gave them."""
    after: float
    """The greatest magnitude in the channels as the next layer reads them."""
    changed: float
    """Share of the numbers in these channels that are others now, 0 to 1."""


def state_records(log: InterventionLog) -> list[StateRecord]:
    """Effects of the edits of hidden states in an `intervene(…) as log` block: of one edit after
    the other, by forward.

    As a table: ``pandas.DataFrame(state_records(log))``.
    """
    return [
        record for one in log.handlers if isinstance(one, StateHandler) for record in one.records
    ]


@interventions.register("clip_channel")
@dataclass(frozen=True, kw_only=True)
class ClipChannel(Checked):
    """Clip channels of the hidden states that leave a layer, or level them.

    This is the causal test of massive activations.

    Sun et al. (arXiv 2402.17762, Sec. 3.3) set massive activations to their mean, which changes
    little, and to zero, which breaks a model; arXiv 2603.05498 asks which of them make sinks.
    `trace(model, ("massive_activations",))` says which channels these are. Positions that run are
    edited; the model's own sink columns are not. With layers replayed by gradient checkpointing it
    takes transformers 5.23: with older ones PyTorch refuses the replay.

    Raises ValueError for no channel, a negative limit, and in the run for a channel that the hidden
    states do not have.
    """

    channels: tuple[int, ...]
    """Channels of the hidden states, from 0."""
    limit: float | None = limited(None, at_least=0)
    """The greatest magnitude that stays, 0 for none; None: every position gets the channel's mean
    over the positions of its row."""
    layers: tuple[int | str, ...] | None = None
    """Layers after which to edit: numbers in the order of execution (-1 is the last), module paths
    or patterns; None for all."""
    heads: ClassVar[None] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(
            self, "channels", tuple(sorted(set(whole_numbers("channels", self.channels))))
        )
        object.__setattr__(self, "layers", chosen("layers", self.layers))
        if not self.channels:
            raise ValueError("channels name what to clip, got none: leave out the edit")

    def edited(self, states_BQC: Tensor, weight_BQ1: Tensor) -> Tensor:
        """New values of the channels; the weight is 0 for padding, else 1."""
        if self.limit is not None:
            return states_BQC.clamp(-self.limit, self.limit)
        mean_B1C = (states_BQC * weight_BQ1).sum(1, keepdim=True) / weight_BQ1.sum(
            1, keepdim=True
        ).clamp_min(1)
        return mean_B1C.expand_as(states_BQC)

    def handler(self, log: InterventionLog, forwards_per_step: int) -> Listener:
        """The listener that carries this intervention out and writes into the log."""
        return StateHandler(self, log, forwards_per_step)


class StateHandler(InterventionHandler):
    """Edits the output of decoder layers that contain an attention call to edit, and records the
    effect.
    """

    options: ClipChannel

    def __init__(self, options: ClipChannel, log: InterventionLog, forwards_per_step: int) -> None:
        self.records: list[StateRecord] = []
        super().__init__(options, log, forwards_per_step)
        self.of_states = self.label

    def discard(self) -> None:
        super().discard()
        self.real_BQ: dict[str, Tensor | None] = {}
        """Entries by attention call of the layers that run now."""
        self.done: dict[int, tuple[Tensor, ...]] = {}
        """Layer number -> effect in this forward."""

    def apply(self, call: AttentionCall, site: CallSite) -> tuple[AttentionCall, Effect | None]:
        self.real_BQ[call.layer] = call.visibility.real_BQ
        return call, None

    def edit_states(self, calls: list[str], states_BQD: Tensor) -> Tensor:
        named = [layer for layer in calls if layer in self.real_BQ]
        if not named:
            return states_BQD
        channels, width = list(self.options.channels), states_BQD.shape[2]
        if channels[-1] >= width:
            raise ValueError(
                f"{self.label}: hidden states have channels 0 to {width - 1}, got {channels[-1]}: "
                "name one of those"
            )
        old_BQC = states_BQD[..., channels]
        real_BQ, *_ = [self.real_BQ.pop(layer) for layer in named]
        weight_BQ1 = torch.ones_like(old_BQC[..., :1])
        if real_BQ is not None:
            weight_BQ1 = real_BQ.to(old_BQC)[..., None]
        new_BQC = self.options.edited(old_BQC, weight_BQ1)
        edited_BQD = states_BQD.clone()
        edited_BQD[..., channels] = new_BQC
        # Layers replayed by a backward pass come after the end of their forward, and are recorded
        # already.
        if self.is_open:
            self.acted = True
            before_BQC, after_BQC = (
                old_BQC.detach().float() * weight_BQ1,
                new_BQC.detach().float() * weight_BQ1,
            )
            changed_B = (before_BQC != after_BQC).sum((1, 2)) / (
                weight_BQ1.sum((1, 2)) * len(channels)
            )
            greatest = (part_BQC.abs().amax((1, 2)) for part_BQC in (before_BQC, after_BQC))
            self.done[self.log.layers[named[0]]] = (*greatest, changed_B)
        return edited_BQD

    def finish(self) -> None:
        for layer, parts in self.done.items():
            rows = enumerate(torch.stack(parts, 1).tolist())
            self.records += [
                StateRecord(self.label, self.count, layer, row, *numbers) for row, numbers in rows
            ]
        self.done = {}
        super().finish()
