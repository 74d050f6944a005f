"""The listener behind `trace`: it measures what was chosen of every forward and keeps it, frame by frame."""

# B batch, L layers, H query heads, Q queries, S keys
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from sinklab.attention.received import attention_map
from sinklab.probing.call import AttentionCall
from sinklab.probing.choice import Choice, Place
from sinklab.probing.statistics import STATISTICS, QueryStates, measured, output_norm
from sinklab.probing.tap import Listener, Tap, no_call_message


class LayerStack:
    """Tensors of one layer after another, in one float32 buffer made when the first comes.

    Small results that stay alive between a model's large temporaries would keep the system from using their room
    again: a forward would need several times their size.
    """

    def __init__(self, expected: int) -> None:
        self._expected = max(expected, 1)
        self._store: Tensor | None = None
        # What has no place in the buffer (layers of another shape, or on another device) turns all into a list.
        self._parts: list[Tensor] = []

    def add(self, value: Tensor) -> None:
        """The next layer's."""
        count = len(self._parts)
        if self._store is None and not count:
            self._store = torch.empty((self._expected, *value.shape), dtype=torch.float32, device=value.device)
        store = self._store
        if store is not None:
            if count < self._expected and value.shape == store.shape[1:] and value.device == store.device:
                value = store[count].copy_(value)
            else:
                self._store = None
        self._parts.append(value)

    def stacked(self, places: list[int], axis: int) -> Tensor:
        """These layers along an axis: an ordinary tensor on the CPU, also where the model runs in inference mode."""
        with torch.inference_mode(False), torch.no_grad():
            if self._store is not None:
                return self._store[places].cpu().movedim(0, axis).contiguous()
            return stacked([self._parts[place].cpu().float() for place in places], axis)


def ordinary(tensor: Tensor) -> Tensor:
    """A tensor of its own on the CPU, which may be changed outside inference mode."""
    with torch.inference_mode(False), torch.no_grad():
        return tensor.cpu().clone()


def stacked(tensors: list[Tensor], dim: int) -> Tensor:
    """Tensors along a new axis, NaN where one of them is shorter than the longest."""
    shapes = {tuple(tensor.shape) for tensor in tensors}
    if len(shapes) == 1:
        return torch.stack(tensors, dim)
    widest = [max(sizes) for sizes in zip(*shapes, strict=True)]
    padded = torch.full((len(tensors), *widest), torch.nan, device=tensors[0].device)
    for row, tensor in zip(padded, tensors, strict=True):
        row[tuple(slice(0, size) for size in tensor.shape)] = tensor
    return padded.movedim(0, dim)


@dataclass
class Frame:
    """One forward: per statistic one tensor a layer, stacked and moved to the CPU when the forward ends."""

    number: int
    """Of the step it begins: counted by marks, or by forwards where nothing was marked yet."""
    is_recorded: bool
    is_read: bool
    """Whether anything of this forward is wanted; False: its calls are counted and no more."""
    paths: list[str] = field(default_factory=list)
    """Of all attention layers that ran, in their order."""
    indices: list[int] = field(default_factory=list)
    """Which of them were measured."""
    parts: dict[str, LayerStack] = field(default_factory=dict)
    values: dict[str, Tensor] = field(default_factory=dict)
    visible: list[Tensor] = field(default_factory=list)
    maps: dict[tuple[Place, int], Tensor] = field(default_factory=dict)
    columns_Q: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    state_BQ: Tensor | None = None
    prefix: int = 0
    length: int = 0
    """Canvas positions, padding included."""

    @property
    def layers(self) -> list[str]:
        """Paths of the measured layers."""
        return [self.paths[index] for index in self.indices]

    def close(self, measured: list[int]) -> None:
        """Keep these layers, of what was measured on suspicion as well; stack them and leave the device."""
        places = [place for place, index in enumerate(self.indices) if index in measured]
        self.indices = [self.indices[place] for place in places]
        if places:
            for name, parts in self.parts.items():
                self.values[name] = parts.stacked(places, STATISTICS[name].index("layer"))
        self.parts.clear()
        self.columns_Q = ordinary(self.columns_Q)
        # layers under one mask share one tensor, which is moved once
        moved = {id(part): ordinary(part) for part in self.visible}
        self.visible = [moved[id(self.visible[place])] for place in places]
        self.state_BQ = None if self.state_BQ is None else ordinary(self.state_BQ)


class Watcher(Listener):
    """Collects frames: `marked` once steps are marked, `pending` since the last mark."""

    def __init__(
        self, model: nn.Module, statistics: Sequence[str], choice: Choice, states: QueryStates | None = None
    ) -> None:
        self.model, self.statistics, self.choice, self.states = model, tuple(statistics), choice, states
        self.tap: Tap | None = None
        self.marked: list[tuple[object, Frame, int]] = []
        """(what `mark` was given, the first forward of the step, how many there were)"""
        self.pending: list[Frame] = []
        self.heads: list[int] = []
        self.prefix: int | None = None
        self._open: Frame | None = None
        self._heads_of_call: list[int] | None = None
        self._awaits_output = False

    @property
    def frames(self) -> list[Frame]:
        """One a step."""
        return [frame for _, frame, _ in self.marked] if self.marked else self.pending

    def mark(self, step: object) -> None:
        """End a step. Raises ValueError when no forward came, or none of its calls was seen."""
        if self.tap is not None:
            self.tap.flush()
        if not self.pending:
            forwards = self.tap.forwards if self.tap is not None else 0
            if not self.marked:
                raise ValueError(no_call_message(self.model, forwards))
            raise ValueError("mark() ends a step, but no forward came since the last mark: mark once a step")
        first = self.pending[0]
        if not first.paths:
            raise ValueError("the first forward since the last mark was measured in no layer: mark after each step")
        self.marked.append((step, first, len(self.pending)))
        self.pending.clear()

    def begin(self) -> None:
        number = len(self.marked) if self.marked else len(self.pending)
        # Once steps are marked, only the first forward of each is kept: the others need not be measured.
        is_new = not (self.marked and self.pending)
        is_recorded = is_new and self.choice.has_step(number)
        self._open = Frame(number, is_recorded, is_recorded or (is_new and self.choice.has_maps(number)))

    @property
    def _is_suspended(self) -> bool:
        return self.tap is not None and self.tap.suspended > 0

    def observe(self, call: AttentionCall) -> None:
        frame, self._awaits_output = self._open, False
        if frame is None or self._is_suspended:
            return
        index = len(frame.paths)
        frame.paths.append(call.layer)
        if index == 0:
            self._locate(frame, call)
        if not frame.is_read:
            return
        total = call.query_BHQD.shape[1]
        for place, head in self.choice.maps_of(frame.number, index, call.layer, total).items():
            map_BHQS = attention_map(
                call.query_BHQD,
                call.key_BKSD,
                mask=call.mask,
                is_causal=call.is_causal,
                scale=call.scale,
                heads=(head,),
            )
            frame.maps[(place, index)] = ordinary(map_BHQS[:, 0].float())
        if frame.is_recorded and self.choice.has_layer(index, call.layer):
            self._measure(frame, index, call, self.choice.heads_of(call.layer, total))

    def _measure(self, frame: Frame, index: int, call: AttentionCall, heads: list[int] | None) -> None:
        if self.states is not None and frame.state_BQ is None:
            frame.state_BQ = self.states.of(self._ids(call), frame.columns_Q)
        frame.indices.append(index)
        with torch.no_grad():
            for name, value in measured(call, self.statistics, heads, frame.state_BQ).items():
                self._keep(frame, name, value)
        frame.visible.append(call.sight.visible_BS)
        every = list(range(call.query_BHQD.shape[1]))
        self.heads = heads if heads is not None else max(self.heads, every, key=len)
        self._heads_of_call, self._awaits_output = heads, "output_norm" in self.statistics

    def observe_output(self, call: AttentionCall, out: Tensor) -> None:
        if self._awaits_output and self._open is not None:
            self._keep(self._open, "output_norm", output_norm(call, out, self._heads_of_call))
        self._awaits_output = False

    def _keep(self, frame: Frame, name: str, value: Tensor) -> None:
        if name not in frame.parts:
            # Before the first forward has shown all layers, those of a kind with this one are expected.
            known = [index for index, path in enumerate(self.choice.known) if self.choice.has_layer(index, path)]
            expected = len(known) or (1 if self.tap is None else self.tap.alike(frame.paths[-1]))
            frame.parts[name] = LayerStack(expected)
        frame.parts[name].add(value)

    def _locate(self, frame: Frame, call: AttentionCall) -> None:
        """Where on the canvas the queries stand: as announced, else the last ones so far."""
        queries, keys = call.query_BHQD.shape[2], call.key_BKSD.shape[2]
        announced = call.sight.prefix
        if announced is not None:
            self.prefix = announced
        elif self.prefix is None:
            self.prefix = max(keys - queries, 0)
        frame.prefix, frame.length = self.prefix, keys - self.prefix
        columns_Q = call.sight.columns_Q
        frame.columns_Q = torch.arange(queries) + frame.length - queries if columns_Q is None else columns_Q

    def _ids(self, call: AttentionCall) -> Tensor:
        """Token ids of the canvas. Raises ValueError when nothing tells them."""
        if call.sight.running is not None:
            return call.sight.running.ids_BS
        given = None if self.tap is None else self.tap.ids_BS
        if given is None:
            raise ValueError(
                "states of queries are told by token ids, but the model was given none (no integer tensor among its "
                "arguments, and no denoiser announced its canvas): decode with model.denoiser(), or pass input_ids"
            )
        return given

    def finish(self) -> None:
        frame, self._open = self._open, None
        if frame is None or self._is_suspended:
            return
        if frame.paths:
            self.choice.settle(frame.paths)
            total = len(frame.paths)
            frame.maps = {
                (place, index): map_BQS
                for (place, index), map_BQS in frame.maps.items()
                if index == place[1] or index == place[1] + total
            }
            frame.close([index for index in frame.indices if self.choice.has_layer(index, frame.paths[index])])
        self.pending.append(frame)

    def discard(self) -> None:
        self._open = None
