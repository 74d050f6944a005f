"""`Recording`: the statistics of a trace in every attention layer, step by step; and the frames
that hold them.
"""

# B batch, L layers, H query heads, Q queries, S keys, P canvas positions
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from sinklab.core import registry
from sinklab.core.probing.scope import MapKey
from sinklab.core.sinks import STATES

if TYPE_CHECKING:
    import numpy


@dataclass(eq=False)
class LayerStack:
    """Tensors of one layer after another, in one float32 buffer made when the first comes.

    Small results that stay alive between a model's large temporaries would keep the system from
    using their room again: a forward would need several times their size. CUDA keeps small ones
    apart: there they stay where they are.
    """

    expected: int
    """Number of layers, at least 1."""
    axis: int
    _store: Tensor | None = None
    _parts: list[Tensor] = field(default_factory=list)
    """Parts of the buffer; one that does not fit it (layers of another shape, or on another device)
    turns all into a list.
    """

    def add(self, value: Tensor) -> None:
        """Add the value of the next layer."""
        count = len(self._parts)
        if self._store is None and not (count or value.is_cuda):
            # some may come inside inference mode, and others behind its end
            with torch.inference_mode(False):
                self._store = torch.empty(
                    (self.expected, *value.shape), dtype=torch.float32, device=value.device
                )
        store = self._store
        if store is not None:
            if (
                count < self.expected
                and value.shape == store.shape[1:]
                and value.device == store.device
            ):
                value = store[count].copy_(value)
            else:
                self._store = None
        self._parts.append(value)

    def stacked(self, rows: list[int]) -> Tensor:
        """These layers along their axis, in memory of their own; on the CPU if they lie on several
        devices.
        """
        parts = [self._parts[row] for row in rows]
        if len({part.device for part in parts}) > 1:
            parts = [part.cpu() for part in parts]
        return padded_stack([part.float() for part in parts], self.axis)


def leaving(tensor: Tensor) -> Tensor:
    """The tensor on the CPU; one from CUDA is there only once its stream is waited for, in pinned
    memory.
    """
    if tensor.device.type != "cuda":
        return tensor.cpu()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(
        tensor, non_blocking=True
    )


def padded_stack(tensors: list[Tensor], dim: int) -> Tensor:
    """Tensors along a new axis, NaN beyond the end of those shorter than the longest."""
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
class Frame:
    """One forward: per statistic one tensor a layer, stacked and moved to the CPU when the forward
    ends.
    """

    number: int
    """Number of the step it begins: counted by marks, or by forwards if nothing was marked yet."""
    is_recorded: bool
    is_read: bool
    """Whether anything of this forward is wanted; False: its calls are counted and no more."""
    paths: list[str] = field(default_factory=list)
    """Paths of all attention layers that ran, in their order."""
    indices: list[int] = field(default_factory=list)
    """Indices of the measured ones."""
    parts: dict[str, LayerStack] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    """What statistics of hidden states keep from layer to layer, until the forward ends."""
    values: dict[str, Tensor] = field(default_factory=dict)
    visible: list[Tensor] = field(default_factory=list)
    maps: dict[tuple[MapKey, int], Tensor] = field(default_factory=dict)
    columns_Q: Tensor = field(default_factory=partial(torch.empty, 0, dtype=torch.int64))
    state_BQ: Tensor | None = None
    state_BS: Tensor | None = None
    """States of all canvas positions; None without a canvas."""
    prefix: int = 0
    length: int = 0
    """Canvas positions, padding included."""
    _events: list[torch.cuda.Event] = field(default_factory=list)
    """One a device, behind the copies of this forward."""

    def __getstate__(self) -> dict[str, Any]:
        self.settle()
        return vars(self)

    def close(self, measured: list[int]) -> None:
        """Keep these of the measured layers, some of which were measured on suspicion; stack them
        and leave the device.

        Called outside inference mode, it leaves ordinary tensors, even if the model ran in one.
        Nothing waits for CUDA before `settle`.
        """
        rows = [row for row, index in enumerate(self.indices) if index in measured]
        self.indices = [self.indices[row] for row in rows]
        if rows:
            self.values = {name: parts.stacked(rows) for name, parts in self.parts.items()}
        self.parts.clear()
        self.memory.clear()
        self.visible = [self.visible[row] for row in rows]
        tensors = (*self.values.values(), *self.visible, self.columns_Q, self.state_BS)
        devices = {tensor.device for tensor in tensors if tensor is not None and tensor.is_cuda}
        self.values = {name: leaving(value) for name, value in self.values.items()}
        self._others(lambda tensor: leaving(tensor.clone()))
        for device in devices:
            self._events.append(torch.cuda.Event())
            self._events[-1].record(torch.cuda.current_stream(device))

    def settle(self) -> None:
        """Wait for tensors on their way to the host, and give the pinned memory, which is dear, to
        later frames.
        """
        if not self._events:
            return
        for event in self._events:
            event.synchronize()
        self._events.clear()
        self.values = {name: value.clone() for name, value in self.values.items()}
        self._others(torch.clone)

    def _others(self, change: Callable[[Tensor], Tensor]) -> None:
        """Change all but the values; layers under one mask share one tensor, which is changed
        once.
        """
        changed = {
            key: change(part) for key, part in {id(part): part for part in self.visible}.items()
        }
        self.visible = [changed[id(part)] for part in self.visible]
        self.columns_Q = change(self.columns_Q)
        if self.state_BQ is not None and self.state_BS is not None:
            self.state_BQ = change(self.state_BQ)
            self.state_BS = change(self.state_BS)


_EXTRA_AXES = {
    "visible": ("batch", "key"),
    "positions": ("batch",),
    "query_state": ("batch", "position"),
    "key_state": ("batch", "key"),
}


class Recording:
    """The statistics that `trace` recorded. Everything is indexed by recorded step first; a step is
    a forward, or the forwards up to a `mark`.

    Tensors are float32 on the CPU. A key axis starts with the model's sink columns (`prefix` of
    them), then the text.
    """

    def __init__(self, recorder: Any) -> None:
        self._recorder = recorder
        """The `FrameRecorder` that keeps the frames."""
        self.statistics = tuple(recorder.statistics)
        """Names of the recorded statistics, with the options that differ from their defaults."""

    @property
    def layers(self) -> list[str]:
        """Module paths of the recorded layers in the order they ran; a module that ran again is
        `path#2`.
        """
        return [self._recorder.scope.known[index] for index in self.layer_indices]

    @property
    def cross_attention(self) -> list[str]:
        """Module paths of attention to another sequence, which traces and edits leave alone: no
        layer of it is recorded.
        """
        return list(self._recorder.left_alone)

    @property
    def layer_indices(self) -> list[int]:
        """Numbers of the recorded layers among all attention layers, in the order these run."""
        return self._recorder.scope.chosen_layers()

    @property
    def head_indices(self) -> list[int]:
        """Numbers of the query heads on the head axes."""
        return list(self._recorder.heads)

    def mark(self, step: object = None) -> None:
        """End a step: the forwards since the last mark belong to it, and the first of them is its
        recording.

        Raises ValueError when there was none.
        """
        self._recorder.mark(step)

    @property
    def steps(self) -> list[object]:
        """Per recorded step the object given to `mark`, or its number without marks."""
        if not self._recorder.marked:
            return list(self.step_numbers)
        return [step for step, frame, _ in self._recorder.marked if frame.is_recorded]

    @property
    def step_numbers(self) -> list[int]:
        """Numbers of the recorded steps, counted from 0 by marks, or by forwards if nothing was
        marked.
        """
        return [frame.number for frame in self._kept()]

    @property
    def forwards_per_step(self) -> list[int]:
        """Number of forwards of each recorded step, by marks; the first of them is the one
        recorded.
        """
        return [forwards for _, frame, forwards in self._recorder.marked if frame.is_recorded]

    def __getattr__(self, name: str) -> list[Tensor]:
        """A recorded statistic by its name: `recording.received` is
        `recording.values("received")`.
        """
        if name.startswith("_") or name not in registry.statistics:
            raise AttributeError(
                f"a recording has no {name!r}; statistics are {', '.join(registry.statistics)}"
            )
        return self.values(name)

    @property
    def visible(self) -> list[Tensor]:
        """Per step (B, key): the number of queries that may see the key; interventions do not
        count.

        Raises ValueError when the layers differ (sliding windows in some): read `visible_by_layer`
        there.
        """
        frames = self._kept()
        for frame in frames:
            first = frame.visible[0]
            for index, other in zip(frame.indices, frame.visible, strict=True):
                if other is not first and (
                    other.shape != first.shape or not torch.equal(other, first)
                ):
                    raise ValueError(
                        f"the layers do not see alike: {frame.paths[index]} has other visible "
                        "queries than "
                        f"{frame.paths[frame.indices[0]]}; read recording.visible_by_layer"
                    )
        return [frame.visible[0] for frame in frames]

    @property
    def visible_by_layer(self) -> list[Tensor]:
        """Per step (B, layer, key): `visible` for models whose layers see different keys; NaN if
        there is no key.
        """
        return [padded_stack([part.float() for part in frame.visible], 1) for frame in self._kept()]

    @property
    def positions(self) -> list[Tensor]:
        """Per step (B,), int64: canvas positions that some query sees, padding and sink columns not
        counted.

        Under a cache only some queries run: `received` and `visible` times positions / queries is
        as if all did.
        """

        def count(frame: Frame) -> Tensor:
            widest = max(part.shape[1] for part in frame.visible)
            seen = [
                part[:, frame.prefix :] > 0 for part in frame.visible if part.shape[1] == widest
            ]
            return torch.stack(seen).any(0).sum(-1)

        return [count(frame) for frame in self._kept()]

    @property
    def columns(self) -> list[Tensor]:
        """Per step (Q,), int64: canvas positions of the queries that ran, in their order."""
        return [frame.columns_Q for frame in self._kept()]

    @property
    def query_state(self) -> list[Tensor]:
        """Per step (B, Q), int8: state of every query (its number in `STATES`, −1 for padding);
        needs a canvas.
        """
        self._check_states()
        return [frame.state_BQ for frame in self._kept() if frame.state_BQ is not None]

    @property
    def key_state(self) -> list[Tensor]:
        """Per step (B, key), int8: state of the position that holds the key (its number in
        `STATES`, −1 for padding and for the model's sink columns), whether or not its query ran;
        needs a canvas.
        """
        self._check_states()
        return [
            pad(frame.state_BS, (frame.prefix, 0), value=-1)
            for frame in self._kept()
            if frame.state_BS is not None
        ]

    def by_state(self, name: str) -> numpy.ndarray:
        """A statistic of keys, mean over the keys at masked, committed and prompt positions apart:
        its axes with "state" behind "batch" and without "key"; NaN for a state without a position.

        The attention that masks receive, and the norms of their values, are no measure of the text
        beside them: pooled, they give the mean of a mixture. Raises ValueError without a canvas,
        and for a statistic that has no axis "key".
        """
        if self.dims(name)[-1] != "key":
            raise ValueError(
                f"{name} is not counted by key (its axes are {self.dims(name)}): read "
                f"array({name!r})"
            )
        steps = []
        for value, state_BK in zip(self.values(name), self.key_state, strict=True):
            here_SBK = torch.stack([state_BK == state for state in range(len(STATES))])
            here = here_SBK.view(*here_SBK.shape[:2], *(1 for _ in value.shape[1:-1]), -1)
            steps.append(value.where(here, torch.nan).nanmean(-1).transpose(0, 1))
        return padded_stack(steps, 0).numpy()

    def _check_states(self) -> None:
        if self._recorder.canvas is None:
            raise ValueError(
                "states of queries need the canvas, and so do those of keys: trace(model, …, "
                "canvas=canvas)"
            )

    @property
    def prefix(self) -> int:
        """Sink columns in front: the number the denoiser announced, else keys minus queries of the
        first forward.
        """
        return self._recorder.prefix or 0

    @property
    def maps(self) -> dict[MapKey, Tensor]:
        """The whole attention maps that were requested and came by, (B, Q, key), by (step, layer,
        head) as given.
        """
        frames = self._recorder.steps
        return {key: map_BQS for frame in frames for (key, _), map_BQS in frame.maps.items()}

    def map(self, step: int, layer: int, head: int) -> Tensor:
        """One of `maps`. Raises ValueError for one that was not requested or never came, naming
        those there are.
        """
        maps = self.maps
        if (step, layer, head) not in maps:
            fact = "was not asked for"
            if (step, layer, head) in self._recorder.scope.maps:
                fact = "was asked for, but its step never ran"
            raise ValueError(
                f"the map of step {step}, layer {layer}, head {head} {fact}; there are "
                f"{list(maps)}: trace(model, maps=[({step}, {layer}, {head})])"
            )
        return maps[(step, layer, head)]

    def values(self, name: str) -> list[Tensor]:
        """A statistic, one tensor a step. Raises ValueError for one that was not recorded."""
        if name not in self.statistics:
            raise ValueError(
                f'{name!r} was not recorded, only {self.statistics}: trace(model, ("{name}", …))'
            )
        return [frame.values[name] for frame in self._kept()]

    def dims(self, name: str) -> tuple[str, ...]:
        """Names of the axes of `array(name)`. Raises ValueError for an unknown name."""
        axes = _EXTRA_AXES.get(name) or registry.statistics.parse(name).axes
        return ("step", *axes)

    def array(self, name: str) -> numpy.ndarray:
        """A statistic, or "visible", "positions", "query_state" or "key_state", of all recorded
        steps in one array.

        Its axes are `dims`. NaN if a step has no such key. Values by query stand at the query's
        canvas position, NaN if no query ran. Raises ValueError when nothing was recorded, or the
        statistic was not.
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

    def _kept(self) -> list[Frame]:
        return [frame for frame in self._recorder.steps if frame.is_recorded and frame.indices]


def _spread(value: Tensor, frame: Frame) -> Tensor:
    """(…, Q) in the order of the queries as (…, P) by canvas position, NaN if no query ran."""
    return torch.full((*value.shape[:-1], frame.length), torch.nan).index_copy_(
        -1, frame.columns_Q, value
    )
