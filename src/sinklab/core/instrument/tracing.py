"""`trace`: watch every attention layer of a model for the length of a block."""

# B batch, L layers, H query heads, Q queries, S keys
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sinklab.core.attention.context import module_of
from sinklab.core.attention.received import attention_map
from sinklab.core.compat import config_value
from sinklab.core.errors import check_tensor
from sinklab.core.instrument.backends import no_call_message
from sinklab.core.instrument.call import Call
from sinklab.core.instrument.recording import ForwardRecord, Recording
from sinklab.core.instrument.routes import tapped
from sinklab.core.instrument.scope import MapKey, RecordingScope
from sinklab.core.instrument.states import (
    DecodedCanvas,
    position_states_of,
    query_states,
)
from sinklab.core.instrument.statistics import (
    StatesView,
    Statistic,
    chosen_statistics,
)
from sinklab.core.instrument.tap import Listener


@dataclass(eq=False)
class Recorder(Listener):
    """Measures the chosen statistics of every forward and keeps them for a `Recording`."""

    statistics: dict[str, Statistic]
    scope: RecordingScope
    canvas: DecodedCanvas | None
    is_shifted: bool
    """Whether a query predicts the next position, whose state is its own."""
    exact: bool
    memory: dict[tuple[str, str], dict[Any, Any]] = field(default_factory=dict)
    """Kept by statistics, by label and layer, of forwards that ended."""
    probing: int = 0
    """Number of `InterventionLog.probing` blocks around the trace."""
    marked: list[ForwardRecord] = field(default_factory=list)
    """The first forward of each marked step."""
    pending: list[ForwardRecord] = field(default_factory=list)
    """Forwards since the last mark."""
    _open: ForwardRecord | None = None

    def __post_init__(self) -> None:
        self.reads = {name for one in self.statistics.values() for name in one.reads}
        of_states = [label for label, one in self.statistics.items() if one.of_states]
        self.of_states = next(iter(of_states), "")
        self.memory_of_first = {**self.memory}
        """The same after the first of all forwards."""

    @property
    def steps(self) -> list[ForwardRecord]:
        """The first forward of each step, on the CPU."""
        frames = self.marked or self.pending
        for frame in frames:
            frame.settle()
        return frames

    def mark(self, step: object) -> None:
        """End a step. Raises ValueError when no forward came."""
        if self.tap is None:
            raise ValueError("mark() is for the recording of a trace, and this is a copy of one")
        self.tap.flush()
        if not self.pending:
            if not self.marked:
                raise ValueError(no_call_message(self.tap, self.tap.forwards))
            raise ValueError(
                "mark() ends a step, but no forward came since the last mark: mark once a step"
            )
        first = self.pending[0]
        if not self.marked:
            # until then each forward was taken for a step
            self.memory.clear()
            self.memory |= self.memory_of_first
        first.step = step
        first.forwards = len(self.pending)
        self.marked.append(first)
        self.pending.clear()

    def begin(self) -> None:
        self._open = None
        self._kept: dict[tuple[str, str], dict[Any, Any]] = {}
        if self.tap.suspended > self.probing:
            return
        number = len(self.marked or self.pending)
        # once steps are marked, only the first forward of each is kept
        is_first = not (self.marked and self.pending)
        steps = self.scope.steps
        is_recorded = is_first and (steps is None or number in steps)
        self._open = ForwardRecord(number, is_first, is_recorded, number)

    def observe(self, call: Call, out: Tensor) -> None:
        frame = self._open
        if frame is None:
            return
        layer = call.layer
        index = self.tap.layers[layer]
        if not frame.places:
            self._locate(frame, call)
        total = call.q_BHQD.shape[1]
        if frame.is_first:
            maps = self.scope.maps_of(frame.number, index, layer, total)
            for key, head in maps.items():
                map_BHQS = attention_map(call.q_BHQD, call.k_BKSD, **call.masking, heads=(head,))
                with torch.inference_mode(False):
                    frame.maps[(key, layer)] = map_BHQS[:, 0].float().cpu().clone()
        if not (frame.is_recorded and self.scope.has_layer(index, layer)):
            return
        if self.canvas is not None and not frame.layers:
            state_BS = position_states_of(call, "a trace with canvas=", self.canvas)
            columns_Q = frame.places["columns"]
            frame.places["state"] = state_BS
            frame.places["query_state"] = query_states(state_BS, columns_Q, self.is_shifted)
        here = call.within(
            heads=self.scope.heads_of(layer, total),
            step=frame.number,
            query_state_BQ=frame.places.get("query_state"),
            made_BHQD=call.by_head(out),
        )
        if "state" in frame.places:
            call.known["state_BS"] = frame.places["state"]
        frame.layers[layer] = {"visible": call.visibility.visible_BS}
        self._real_BQ = call.visibility.real_BQ
        with torch.no_grad():
            here.fill(self.reads)
            self._measure(frame, layer, here)

    def observe_states(self, calls: list[str], states_BQD: Tensor) -> None:
        frame = self._open
        if frame is None:
            return
        with torch.no_grad():
            for layer in frame.layers.keys() & calls:
                columns_Q = frame.places["columns"]
                view = StatesView(states_BQD, self._real_BQ, columns_Q, frame.memory)
                self._measure(frame, layer, view)

    def _measure(self, frame: ForwardRecord, layer: str, view: Call | StatesView) -> None:
        """Measure the statistics that read such a view of a layer."""
        for label, one in self.statistics.items():
            if one.of_states != isinstance(view, StatesView):
                continue
            if isinstance(view, Call):
                key = label, layer
                kept = self._kept.setdefault(key, {**self.memory.get(key, {})})
                view = view.within(memory=kept)
            value = one.measure(view)
            axes = [axis for axis in one.axes if axis != "layer"]
            remedy = f"correct its `axes`, {axes} for each layer, or its `measure`"
            check_tensor(f"what {label} measures", value, [None] * len(axes), remedy=remedy)
            frame.layers[layer][label] = value

    def _locate(self, frame: ForwardRecord, call: Call) -> None:
        """Locate the queries on the canvas: as announced, else the last ones so far."""
        queries = call.q_BHQD.shape[2]
        keys = call.k_BKSD.shape[2]
        running = call.visibility.running
        frame.prefix = call.prefix
        by_query = [label for label, one in self.statistics.items() if "position" in one.axes]
        if self.canvas is not None:
            by_query.append("the state of queries")
        if by_query and running is None and queries > keys:
            raise ValueError(
                f"{by_query[0]} is told by canvas position, but {call.layer} has {queries} queries "
                f"over {keys} keys, as cross attention has: they stand at none of them; leave it "
                "out"
            )
        if running is not None:
            frame.places["columns"] = running.columns_Q
        else:
            first = call.visibility.first_own - frame.prefix
            every_Q = torch.arange(queries, device=call.q_BHQD.device)
            frame.places["columns"] = every_Q + first

    def finish(self) -> None:
        frame = self._open
        self._open = None
        if frame is None or not frame.places:
            return
        layers = self.tap.layers
        # before the first forward has ended, a layer counted from the end may be any
        self.scope.check_layers(list(layers))
        frame.maps = {
            (key, layer): map_BQS
            for (key, layer), map_BQS in frame.maps.items()
            if self.scope.is_layer(layers[layer], layer, key[1])
        }
        axes = {label: one.axes.index("layer") for label, one in self.statistics.items()}
        with torch.inference_mode(False), torch.no_grad():
            frame.close(axes, self.scope.chosen_layers())
        # while the device is still at this forward, the last one's numbers are there
        for last in (self.pending or self.marked)[-1:]:
            last.settle()
        self.memory |= self._kept
        if not (self.pending or self.marked):
            self.memory_of_first = {**self.memory}
        self.pending.append(frame)

    def discard(self) -> None:
        self._open = None


@contextmanager
def trace(
    model: Any,
    statistics: Sequence[str | Statistic] = ("received", "value_norm"),
    *,
    canvas: Any = None,
    allow_empty: bool = False,
    exact: bool = True,
    layers: Iterable[int | str] | int | str | None = None,
    heads: Iterable[int] | int | None = None,
    steps: Container[int] | None = None,
    maps: Iterable[MapKey] = (),
    memory: dict[Any, Any] | None = None,
) -> Iterator[Recording]:
    """Record attention statistics of every forward inside the block.

        with trace(model) as recording:
            for step in denoise(model.denoiser(), canvas):
                recording.mark(step)
        recording.array("received")     # (step, batch, layer, head, key)

    Outputs are bit-identical: the model keeps its own kernel. Traces nest, also with `intervene` in
    either order, and see edited calls. Calls inside `sinklab.core.attention.unobserved()` are not
    seen, and attention to another sequence is refused. The thread that opens the block runs the
    model.

    Args:
        statistics: names in `sinklab.core.registry.statistics`, with options as "name:field=value",
            or values.
        canvas: the canvas that is decoded (`sinklab.core.subject.Canvas`): it tells the states of
            queries and keys, with the ids that the denoiser announces
            (`sinklab.core.attention.running`) or the model's `input_ids`. A query is in the state
            of the position it predicts (the next one if `model.config.logit_shift` is set).
        allow_empty: the model need not run inside the block.
        exact: False lets a denoiser keep its fast decoder: numbers are equal within rounding, and
            the model may be under no edit.
        layers: numbers in the order they run (from 0; negative from the end), or module paths or
            whole parts of them ("layers.3"). The others cost nothing.
        heads: numbers of the query heads.
        steps: a container of step numbers, counted from 0 by marks, or else by forwards.
        maps: (step, layer, head) triples whose map is kept (`recording.map`), whatever else is
            chosen.
        memory: a dict that traces of one run share, empty at first, so that a statistic such as
            drift compares a step with the one of the trace before.

    Raises ValueError for anything that does not exist or cannot be seen: a statistic, layer or
    head, states without a canvas, a compiled model; for another thread's model; at the end for no
    call.
    """
    model = module_of(model)
    chosen = chosen_statistics(statistics)
    for label, one in chosen.items():
        if one.needs_canvas and canvas is None:
            raise ValueError(
                f"{label} needs states of queries: no canvas was given: trace(model, …, "
                "canvas=canvas)"
            )
    if not isinstance(canvas, DecodedCanvas | None):
        raise ValueError(
            f"canvas must have open_BS, mask_id and attention_BS, which {type(canvas).__name__} "
            "lacks: pass the sampling.Canvas that is decoded"
        )
    is_shifted = bool(config_value(model, "logit_shift"))
    scope = RecordingScope(layers, heads, steps, maps)
    recorder = Recorder(chosen, scope, canvas, is_shifted, exact, {} if memory is None else memory)
    with tapped(model, recorder) as tap:
        recorder.probing = tap.suspended
        seen_before = tap.forwards
        yield Recording(recorder)
    forwards = tap.forwards - seen_before
    if not recorder.scope.known and (forwards or not allow_empty):
        raise ValueError(no_call_message(tap, forwards))
