"""`Recording`: what a trace saw in every attention layer, step by step."""

# B batch, L layers, H query heads, Q queries, S keys, P canvas positions
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sinklab.probing.choice import Place
from sinklab.probing.frames import Frame, Watcher, stacked
from sinklab.probing.statistics import STATISTICS, checked_statistic

if TYPE_CHECKING:
    import numpy


_BESIDE = {"visible": ("batch", "key"), "positions": ("batch",), "query_state": ("batch", "position")}


class Recording:
    """What `trace` saw. Everything is indexed by recorded step first; a step is a forward, or what `mark` says it is.

    Tensors are float32 on the CPU. A key axis starts with the model's sink columns (`prefix` of them), then the text.
    """

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self.statistics = watcher.statistics

    @property
    def layers(self) -> list[str]:
        """Module paths of the recorded layers in the order they ran; a module that ran again is `path#2`."""
        choice = self._watcher.choice
        return [path for index, path in enumerate(choice.known) if choice.has_layer(index, path)]

    @property
    def layer_indices(self) -> list[int]:
        """Numbers of the recorded layers among all attention layers, in the order these run."""
        choice = self._watcher.choice
        return [index for index, path in enumerate(choice.known) if choice.has_layer(index, path)]

    @property
    def head_indices(self) -> list[int]:
        """Numbers of the query heads on the head axes."""
        return list(self._watcher.heads)

    def mark(self, step: object = None) -> None:
        """End a step: the forwards since the last mark belong to it, and the first of them is its recording.

        Raises ValueError when there was none.
        """
        self._watcher.mark(step)

    @property
    def steps(self) -> list[object]:
        """Per recorded step the object given to `mark`, or its number without marks."""
        if not self._watcher.marked:
            return list(self.step_numbers)
        return [step for step, frame, _ in self._watcher.marked if frame.is_recorded]

    @property
    def step_numbers(self) -> list[int]:
        """Numbers of the recorded steps, counted from 0 by marks, or by forwards where nothing was marked."""
        return [frame.number for frame in self._kept()]

    @property
    def forwards_per_step(self) -> list[int]:
        """How many forwards each recorded step took, by marks; the first of them is the one recorded."""
        return [forwards for _, frame, forwards in self._watcher.marked if frame.is_recorded]

    @property
    def received(self) -> list[Tensor]:
        """Per step (B, layer, H, key): the column sums a_j over the queries that are not padding."""
        return self.values("received")

    @property
    def value_norm(self) -> list[Tensor]:
        """Per step (B, layer, key): the norm of the value vectors, averaged over heads."""
        return self.values("value_norm")

    @property
    def row_entropy(self) -> list[Tensor]:
        """Per step (B, layer, H, query): entropy of the attention rows in nats."""
        return self.values("row_entropy")

    @property
    def visible(self) -> list[Tensor]:
        """Per step (B, key): the number of queries that may see the key; interventions do not count.

        Raises ValueError when the layers differ (sliding windows in some): read `visible_by_layer` there.
        """
        frames = self._kept()
        for frame in frames:
            first = frame.visible[0]
            for layer, other in zip(frame.layers, frame.visible, strict=True):
                if other is not first and (other.shape != first.shape or not torch.equal(other, first)):
                    raise ValueError(
                        f"the layers do not see alike: {layer} has other visible queries than {frame.layers[0]}; read "
                        "recording.visible_by_layer"
                    )
        return [frame.visible[0] for frame in frames]

    @property
    def visible_by_layer(self) -> list[Tensor]:
        """Per step (B, layer, key): `visible` for models whose layers see different keys; NaN where there is no key."""
        return [stacked([part.float() for part in frame.visible], 1) for frame in self._kept()]

    @property
    def positions(self) -> list[Tensor]:
        """Per step (B,), int64: canvas positions that some query sees, padding and sink columns not counted.

        Under a cache only some queries run: `received` and `visible` times positions / queries is as if all did.
        """
        kept = self._kept()
        seen = [[part[:, frame.prefix :] > 0 for part in frame.visible] for frame in kept]
        widest = [max(parts, key=lambda part_BS: part_BS.shape[1]) for parts in seen]
        alike = [[part for part in parts if part.shape == wide.shape] for parts, wide in zip(seen, widest, strict=True)]
        return [torch.stack(parts).any(0).sum(-1) for parts in alike]

    @property
    def columns(self) -> list[Tensor]:
        """Per step (Q,), int64: canvas positions of the queries that ran, in their order."""
        return [frame.columns_Q for frame in self._kept()]

    @property
    def query_state(self) -> list[Tensor]:
        """Per step (B, Q), int8: state of every query (its number in `STATES`, −1 for padding); needs a canvas."""
        if self._watcher.states is None:
            raise ValueError("states of queries need the canvas: trace(model, …, canvas=canvas)")
        return [frame.state_BQ for frame in self._kept() if frame.state_BQ is not None]

    @property
    def prefix(self) -> int:
        """Sink columns in front: what the denoiser announced, else keys minus queries of the first forward."""
        return self._watcher.prefix or 0

    @property
    def maps(self) -> dict[Place, Tensor]:
        """The whole attention maps that were asked for and came by, (B, Q, key), by (step, layer, head) as given."""
        return {place: map_BQS for frame in self._watcher.frames for (place, _), map_BQS in frame.maps.items()}

    def map(self, step: int, layer: int, head: int) -> Tensor:
        """One of `maps`. Raises ValueError for one that was not asked for or never came, with those there are."""
        maps = self.maps
        if (step, layer, head) not in maps:
            asked = (step, layer, head) in self._watcher.choice.maps
            fact = "was asked for, but its step never ran" if asked else "was not asked for"
            raise ValueError(
                f"the map of step {step}, layer {layer}, head {head} {fact}; there are {list(maps)}: "
                f"trace(model, maps=[({step}, {layer}, {head})])"
            )
        return maps[(step, layer, head)]

    def values(self, name: str) -> list[Tensor]:
        """A statistic, one tensor a step. Raises ValueError for one that was not asked for."""
        if name not in self.statistics:
            raise ValueError(f'{name!r} was not recorded, only {self.statistics}: trace(model, ("{name}", …))')
        return [frame.values[name] for frame in self._kept()]

    def dims(self, name: str) -> tuple[str, ...]:
        """Names of the axes of `array(name)`. Raises ValueError for an unknown name."""
        return ("step", *(_BESIDE[name] if name in _BESIDE else STATISTICS[checked_statistic(name)]))

    def array(self, name: str) -> numpy.ndarray:
        """A statistic, "visible", "positions" or "query_state" of all recorded steps in one array (axes: `dims`).

        NaN where a step has no such key. What is counted by query stands at the query's canvas position, NaN where no
        query ran. Raises ValueError when nothing was recorded, or the statistic was not.
        """
        tensors = [value.float() for value in getattr(self, name)] if name in _BESIDE else self.values(name)
        if not tensors:
            ran = len(self._watcher.frames)
            raise ValueError(
                f"nothing was recorded: {ran} steps ran, and steps= chooses none of them"
                if ran
                else "nothing was recorded yet: run the model inside the block"
            )
        if self.dims(name)[-1] == "position":
            tensors = [_spread(value, frame) for value, frame in zip(tensors, self._kept(), strict=True)]
        return stacked(tensors, 0).numpy()

    def _kept(self) -> list[Frame]:
        return [frame for frame in self._watcher.frames if frame.is_recorded and frame.indices]


def _spread(value: Tensor, frame: Frame) -> Tensor:
    """(…, Q) in the order of the queries as (…, P) by canvas position, NaN where no query ran."""
    full = torch.full((*value.shape[:-1], frame.length), torch.nan)
    return full.index_copy_(-1, frame.columns_Q, value)
