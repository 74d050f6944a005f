"""`trace`: what happened in every attention layer, forward by forward, at O(S) memory."""

# B batch, H query heads, Q queries, S keys
from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sinklab.attention import noop_bound, row_entropy, value_norms
from sinklab.probing.call import AttentionCall
from sinklab.probing.tap import Listener, Tap, no_call_message, tapped

if TYPE_CHECKING:
    import numpy


def _on_rows(function: Callable[..., Tensor], call: AttentionCall, *values: Tensor) -> Tensor:
    options: dict[str, Any] = {"mask": call.mask, "is_causal": call.is_causal, "scale": call.scale}
    return function(call.query_BHQD, call.key_BKSD, *values, **options)


_STATISTICS: dict[str, tuple[Callable[[AttentionCall], Tensor], tuple[str, ...]]] = {
    "received": (lambda call: call.received_BHS, ("batch", "layer", "head", "key")),
    "value_norm": (lambda call: value_norms(call.value_BKSD), ("batch", "layer", "key")),
    "row_entropy": (lambda call: _on_rows(row_entropy, call), ("batch", "layer", "head", "query")),
    "noop_bound": (lambda call: _on_rows(noop_bound, call, call.value_BKSD), ("batch", "layer", "head", "query")),
}


@dataclass
class _Frame:
    """One forward: per statistic one tensor a layer, stacked and moved to the CPU when the forward ends."""

    layers: list[str] = field(default_factory=list)
    parts: dict[str, list[Tensor]] = field(default_factory=dict)
    values: dict[str, Tensor] = field(default_factory=dict)
    visible: list[Tensor] = field(default_factory=list)
    prefix: int = 0


class Recording(Listener):
    """What `trace` saw. Everything is indexed by step first; a step is a forward, or what `mark` says it is.

    Tensors are float32 on the CPU. A key axis starts with the model's sink columns (`prefix` of them), then the text.
    """

    def __init__(self, model: nn.Module, statistics: Sequence[str]) -> None:
        self.statistics = tuple(statistics)
        self.layers: list[str] = []
        """Module paths of the attention layers in the order they ran; a module that ran again is `path#2`."""
        self.forwards_per_step: list[int] = []
        """How many forwards each marked step took; the first of them is the one recorded."""
        self._model = model
        self._tap: Tap | None = None
        self._marked: list[object] = []
        self._frames: list[_Frame] = []
        self._pending: list[_Frame | None] = []
        self._open: _Frame | None = None

    def mark(self, step: object = None) -> None:
        """End a step: the forwards since the last mark belong to it, and the first of them is its recording.

        Raises ValueError when there was none.
        """
        if self._tap is not None:
            self._tap.flush()
        if not self._pending:
            forwards = self._tap.forwards if self._tap is not None else 0
            if not self._frames:
                raise ValueError(no_call_message(self._model, forwards))
            raise ValueError("mark() ends a step, but no forward came since the last mark: mark once a step")
        first = self._pending[0]
        if first is None:
            raise ValueError("the first forward since the last mark was measured in no layer: mark after each step")
        self._frames.append(first)
        self._marked.append(step)
        self.forwards_per_step.append(len(self._pending))
        self._pending.clear()

    @property
    def steps(self) -> list[object]:
        """The objects given to `mark`, or 0, 1, 2, … without marks."""
        return list(self._marked) if self._marked else list(range(len(self._pending)))

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
        return [_stack([part.float() for part in frame.visible], 1) for frame in self._kept()]

    @property
    def prefix(self) -> int:
        """Sink columns in front: keys minus queries of the first recorded forward, which should be a full one."""
        frames = self._kept()
        return frames[0].prefix if frames else 0

    def values(self, name: str) -> list[Tensor]:
        """A statistic, one tensor a step. Raises ValueError for one that was not asked for."""
        if name not in self.statistics:
            raise ValueError(f'{name!r} was not recorded, only {self.statistics}: trace(model, ("{name}", …))')
        return [frame.values[name] for frame in self._kept()]

    def dims(self, name: str) -> tuple[str, ...]:
        """Names of the axes of `array(name)`."""
        return ("step", "batch", "key") if name == "visible" else ("step", *_STATISTICS[_checked(name)][1])

    def array(self, name: str) -> numpy.ndarray:
        """A statistic or "visible" of all steps in one array (axes: `dims`), NaN where a step has no such key."""
        tensors = [value.float() for value in self.visible] if name == "visible" else self.values(name)
        if not tensors:
            raise ValueError("nothing was recorded yet: run the model inside the block")
        return _stack(tensors, 0).numpy()

    def _kept(self) -> list[_Frame]:
        return self._frames if self._marked else [frame for frame in self._pending if frame is not None]

    def begin(self) -> None:
        self._open = _Frame(parts={name: [] for name in self.statistics})

    def observe(self, call: AttentionCall) -> None:
        frame = self._open
        if frame is None or self._skips():
            return
        frame.layers.append(call.layer)
        for name in self.statistics:
            frame.parts[name].append(_STATISTICS[name][0](call))
        if not frame.visible:
            frame.prefix = call.key_BKSD.shape[2] - call.query_BHQD.shape[2]
        frame.visible.append(call.sight.visible_BS)

    def _skips(self) -> bool:
        suspended = self._tap is not None and self._tap.suspended > 0
        # Once steps are marked, only the first forward of each is kept: the others need not be measured.
        return suspended or bool(self._marked and self._pending)

    def finish(self) -> None:
        frame, self._open = self._open, None
        if frame is None or (self._tap is not None and self._tap.suspended > 0):
            return
        if not frame.layers:
            self._pending.append(None)
            return
        frame.values = {name: _stack([part.float() for part in parts], 1).cpu() for name, parts in frame.parts.items()}
        frame.parts.clear()
        # layers under one mask share one tensor, which is moved once
        moved = {id(part): part.cpu() for part in frame.visible}
        frame.visible = [moved[id(part)] for part in frame.visible]
        self.layers = self.layers or frame.layers
        self._pending.append(frame)

    def discard(self) -> None:
        self._open = None


def _stack(tensors: list[Tensor], dim: int) -> Tensor:
    shapes = {tuple(tensor.shape) for tensor in tensors}
    if len(shapes) == 1:
        return torch.stack(tensors, dim)
    widest = [max(sizes) for sizes in zip(*shapes, strict=True)]
    padded = torch.full((len(tensors), *widest), torch.nan, device=tensors[0].device)
    for row, tensor in zip(padded, tensors, strict=True):
        row[tuple(slice(0, size) for size in tensor.shape)] = tensor
    return padded.movedim(0, dim)


def _checked(name: str) -> str:
    if name not in _STATISTICS:
        near = difflib.get_close_matches(name, _STATISTICS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "choose among them"
        raise ValueError(f"statistics are {tuple(_STATISTICS)}, got {name!r}: {hint}")
    return name


@contextmanager
def trace(model: nn.Module, statistics: Sequence[str] = ("received", "value_norm")) -> Iterator[Recording]:
    """Record attention statistics of every forward inside the block, on any module that attends through SDPA.

        with trace(model) as recording:
            for step in denoise(model.denoiser(), canvas):
                recording.mark(step)
        recording.array("received")     # (step, batch, layer, head, key)

    The model keeps its own kernel: outputs are bit-identical, and the statistics are computed beside it. Statistics:
    "received" (column sums), "value_norm", "row_entropy", "noop_bound". Traces nest, also with `intervene` on the same
    module, in either order: a trace sees the edited calls. Calls inside `sinklab.attention.unobserved()` are not seen.

    Raises ValueError for an unknown statistic or a compiled model, and at the end of the block if no call was seen.
    """
    if isinstance(statistics, str) or not statistics:
        raise ValueError(f"statistics is a tuple of names in {tuple(_STATISTICS)}, got {statistics!r}: write (name,)")
    recording = Recording(model, [_checked(name) for name in statistics])
    with tapped(model, recording) as tap:
        recording._tap = tap
        seen_before = tap.forwards
        yield recording
    if not recording.layers:
        raise ValueError(no_call_message(model, tap.forwards - seen_before))
