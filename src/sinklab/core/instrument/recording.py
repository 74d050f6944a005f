"""`Recording`: what `trace` has recorded, read by statistic and step.

It holds one `ForwardRecord` a step, whose tensors are copied to the host when the forward ends.
Nothing waits for the copy until the next forward has ended or somebody reads: a GPU need not wait.
"""

# B batch, L layers, H query heads, Q queries, S keys, P canvas positions
from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from sinklab.core import registry
from sinklab.core.instrument.scope import MapKey

if TYPE_CHECKING:
    import numpy


def to_host(tensor: Tensor) -> Tensor:
    """The tensor on the CPU; a copy from CUDA may still be under way."""
    return tensor.to("cpu", non_blocking=tensor.is_cuda)


def padded_stack(tensors: list[Tensor], dim: int) -> Tensor:
    """Stack tensors along a new axis, the shorter ones padded with NaN."""
    shapes = {tuple(tensor.shape) for tensor in tensors}
    if len(shapes) == 1:
        # autocast on a processor stacks no float16
        with torch.autocast(tensors[0].device.type, enabled=False):
            return torch.stack(tensors, dim)
    widest = [max(sizes) for sizes in zip(*shapes, strict=True)]
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
    padded = torch.full((len(tensors), *widest), torch.nan, device=tensors[0].device, dtype=dtype)
    for row, tensor in zip(padded, tensors, strict=True):
        row[tuple(slice(0, size) for size in tensor.shape)] = tensor
    return padded.movedim(0, dim)


@dataclass
class ForwardRecord:
    """One forward pass: its layers while it runs, then one tensor per statistic."""

    number: int
    """Number of its step."""
    is_first: bool
    """Whether it is the first forward of the step."""
    is_recorded: bool
    step: object
    """Argument of `mark`; the number without marks."""
    forwards: int = 1
    """Number of forwards of the step."""
    layers: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """Measured layers by path, in their order; while it runs, their statistics and "visible"
    (B, S).
    """
    places: dict[str, Tensor] = field(default_factory=dict)
    """"columns" (Q,): canvas positions of the queries; with a canvas "query_state" (B, Q) and
    "state" (B, P), of all its positions.
    """
    memory: dict[str, Any] = field(default_factory=dict)
    """Kept from layer to layer by statistics of hidden states."""
    maps: dict[tuple[MapKey, str], Tensor] = field(default_factory=dict)
    """By key as it was given, and path of the layer."""
    values: dict[str, Tensor] = field(default_factory=dict)
    """Filled at the end: the statistics, "visible" (B, L, S), and the places."""
    prefix: int = 0
    copied: torch.cuda.Event | None = None
    """Behind the copies to the host; None once they are there."""

    def __getstate__(self) -> dict[str, Any]:
        self.settle()
        return vars(self)

    def close(self, axes: dict[str, int], chosen: Container[str]) -> None:
        """Stack the chosen layers along the axis of each statistic, on the host."""
        self.layers = {layer: parts for layer, parts in self.layers.items() if layer in chosen}
        measured = [*self.layers.values()]
        if measured:
            device = measured[0]["visible"].device
            for name in measured[0]:
                there = [parts[name].to(device, torch.float32) for parts in measured]
                self.values[name] = to_host(padded_stack(there, axes.get(name, 1)))
            for name, place in self.places.items():
                self.values[name] = to_host(place.to(device, copy=True))
            if device.type == "cuda":
                self.copied = torch.cuda.current_stream(device).record_event()
        for done in (*measured, self.places, self.memory):
            done.clear()

    def settle(self) -> None:
        """Wait for the copies, and leave the pinned memory to the next forward."""
        if self.copied is not None:
            self.copied.synchronize()
            self.copied = None
            self.values = {name: value.clone() for name, value in self.values.items()}


_EXTRA_AXES = {
    "visible": ("batch", "key"),
    "positions": ("batch",),
    "query_state": ("batch", "position"),
    "key_state": ("batch", "key"),
}


class Recording:
    """The statistics that `trace` recorded, by step: a forward, or the forwards up to a `mark`.

    Tensors are float32 on the CPU. A key axis starts with the `prefix` sink columns.
    """

    def __init__(self, recorder: Any) -> None:
        self._recorder = recorder
        """The `Recorder` of the trace."""
        self.statistics = tuple(recorder.statistics)
        """Names of the recorded statistics, with options that differ from their defaults."""

    @property
    def layers(self) -> list[str]:
        """Module paths of the recorded layers as they ran; `path#2` ran again."""
        return list(self._recorder.scope.chosen_layers())

    def mark(self, step: object = None) -> None:
        """End a step, of which the first forward is kept. Raises ValueError without a forward."""
        self._recorder.mark(step)

    @property
    def steps(self) -> list[object]:
        """Per recorded step the argument of `mark`, or its number without marks."""
        return [frame.step for frame in self._kept()]

    @property
    def forwards_per_step(self) -> list[int]:
        """Number of forwards of each recorded step, by marks."""
        if not self._recorder.marked:
            return []
        return [frame.forwards for frame in self._kept()]

    def __getattr__(self, name: str) -> list[Tensor]:
        """`recording.received` is `recording.values("received")`."""
        if name.startswith("_") or name not in registry.statistics:
            raise AttributeError(
                f"a recording has no {name!r}; statistics are {', '.join(registry.statistics)}"
            )
        return self.values(name)

    @property
    def visible(self) -> list[Tensor]:
        """Per step (B, key), int64: the number of queries that may see the key, before any edit.
        Raises ValueError if layers differ, as with sliding windows.
        """
        found = []
        for frame in self._kept():
            count_BLS = frame.values["visible"].nan_to_num(-1).long()
            differs_L = (count_BLS != count_BLS[:, :1]).any(-1).any(0)
            if differs_L.any():
                layers = [*frame.layers]
                raise ValueError(
                    f"the layers do not see alike: {layers[int(differs_L.int().argmax())]} has "
                    f"other visible queries than {layers[0]}; read recording.visible_by_layer"
                )
            found.append(count_BLS[:, 0])
        return found

    @property
    def visible_by_layer(self) -> list[Tensor]:
        """Per step (B, layer, key): `visible` in each layer; NaN if there is no key."""
        return self._stored("visible")

    @property
    def positions(self) -> list[Tensor]:
        """Per step (B,), int64: canvas positions that some query sees, without padding and sinks.

        With a cache, `received` times positions / queries is as if all queries ran.
        """
        found = []
        for frame in self._kept():
            count_BLS = frame.values["visible"][..., frame.prefix :]
            # an encoder may have fewer positions than its decoder
            widest_L = count_BLS.isfinite().all(-1).all(0)
            found.append((count_BLS[:, widest_L] > 0).any(1).sum(-1))
        return found

    @property
    def columns(self) -> list[Tensor]:
        """Per step (Q,), int64: canvas positions of the queries that ran."""
        return self._stored("columns")

    @property
    def query_state(self) -> list[Tensor]:
        """Per step (B, Q), int8: number of each query's state in `STATES`, −1 for padding."""
        self._check_states()
        return self._stored("query_state")

    @property
    def key_state(self) -> list[Tensor]:
        """Per step (B, key), int8: state of each key's position; −1 for sink columns too."""
        self._check_states()
        return [pad(frame.values["state"], (frame.prefix, 0), value=-1) for frame in self._kept()]

    def _check_states(self) -> None:
        if self._recorder.canvas is None:
            raise ValueError(
                "states of queries need the canvas, and so do those of keys: trace(model, …, "
                "canvas=canvas)"
            )

    @property
    def prefix(self) -> int:
        """Sink columns in front of the keys of the first forward."""
        return next((frame.prefix for frame in self._recorder.steps), 0)

    @property
    def maps(self) -> dict[MapKey, Tensor]:
        """The requested attention maps, (B, Q, key), by (step, layer, head) as given."""
        frames = self._recorder.steps
        return {key: map_BQS for frame in frames for (key, _), map_BQS in frame.maps.items()}

    def map(self, step: int, layer: int, head: int) -> Tensor:
        """One of `maps`. Raises ValueError for one that is not there."""
        maps = self.maps
        if (step, layer, head) not in maps:
            raise ValueError(
                f"the map of step {step}, layer {layer}, head {head} was not asked for, or its "
                f"step never ran; there are {list(maps)}: trace(model, maps=[({step}, {layer}, "
                f"{head})])"
            )
        return maps[(step, layer, head)]

    def values(self, name: str) -> list[Tensor]:
        """A statistic, one tensor a step. Raises ValueError for one that was not recorded."""
        if name not in self.statistics:
            raise ValueError(
                f'{name!r} was not recorded, only {self.statistics}: trace(model, ("{name}", …))'
            )
        return self._stored(name)

    def dims(self, name: str) -> tuple[str, ...]:
        """Names of the axes of `array(name)`. Raises ValueError for an unknown name."""
        axes = _EXTRA_AXES.get(name) or registry.statistics.parse(name).axes
        return ("step", *axes)

    def array(self, name: str) -> numpy.ndarray:
        """A statistic, or "visible", "positions", "query_state" or "key_state", of all recorded
        steps, with the axes `dims`; NaN for absent keys, and where no query ran.

        Raises ValueError if it was not recorded.
        """
        if name in _EXTRA_AXES:
            tensors = [value.float() for value in getattr(self, name)]
        else:
            tensors = self.values(name)
        if not tensors:
            raise ValueError(
                f"nothing was recorded: {len(self._recorder.steps)} steps ran, and steps= chooses "
                "none of them; run the model inside the block"
            )
        if self.dims(name)[-1] == "position":
            tensors = [
                _spread(value, frame) for value, frame in zip(tensors, self._kept(), strict=True)
            ]
        return padded_stack(tensors, 0).numpy()

    def _kept(self) -> list[ForwardRecord]:
        return [frame for frame in self._recorder.steps if frame.values]

    def _stored(self, name: str) -> list[Tensor]:
        return [frame.values[name] for frame in self._kept()]


def _spread(value: Tensor, frame: ForwardRecord) -> Tensor:
    """Put (…, Q) in the order of canvas positions, (…, P); NaN if no query ran."""
    positions = frame.values["visible"].shape[-1] - frame.prefix
    return torch.full((*value.shape[:-1], positions), torch.nan).index_copy_(
        -1, frame.values["columns"], value
    )
