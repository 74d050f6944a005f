"""Recorded statistics of each step: received attention, norms, and row statistics by state of the
query.
"""

# T recorded steps, L layers, H heads, K keys, S positions, Q queries, G states of queries
from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import torch

from sinklab.core.instrument import Recording, trace
from sinklab.core.instrument.recording import padded_stack
from sinklab.core.registry import statistics
from sinklab.core.sinks import DEFAULT, STATES, find_sinks
from sinklab.lab.analysis.facts import AXES, FACTS, FACTS_TABLE, WIDE, facts, means
from sinklab.lab.analysis.tokens import ADDED, MASK, token_ages
from sinklab.lab.checkpoints import token_text
from sinklab.lab.measures.statistics import WINDOW
from sinklab.lab.records import STUDY_DIMS, Arrays, Contents, of_twin
from sinklab.lab.scoring import Moment, Task
from sinklab.lab.studies import Row
from sinklab.lab.studies.trace.study import StudySettings

WHOLE = ("visible", "positions")
"""Counts, which are kept as they are."""
_TEXT = ("key", "position")


@dataclass(frozen=True)
class Selection:
    """Layers and heads of a model that are recorded, as numbers from 0 in rising order."""

    layers: tuple[int, ...]
    heads: tuple[int, ...]
    of_layers: int
    of_heads: int

    @classmethod
    def of(cls, config: Any, settings: StudySettings) -> Selection:
        """The selection of the settings. Raises ValueError for a layer or head that the model does
        not have.
        """
        backbone = getattr(config, "backbone", config)
        layers = backbone.num_hidden_layers
        heads = backbone.num_attention_heads
        _numbers("the layer of maps", tuple(layer for _, layer, _ in settings.map_keys), layers)
        _numbers("the head of maps", tuple(head for _, _, head in settings.map_keys), heads)
        # if some layers see a window alone, record those that see everything
        wanted = settings.layers or getattr(config, "global_layers", None) or ()
        return cls(
            _numbers("layers", wanted, layers),
            _numbers("heads", settings.heads, heads),
            layers,
            heads,
        )


def _numbers(what: str, given: tuple[int, ...], count: int) -> tuple[int, ...]:
    wrong = [number for number in given if not -count <= number < count]
    if wrong:
        raise ValueError(
            f"{what} must be numbers from 0 to {count - 1}, -1 for the last, but {wrong[0]} is not"
        )
    return tuple(sorted({number % count for number in given or range(count)}))


class Recorder:
    """Collects the recorded steps of one text. Numbers are narrowed at once: memory holds them as
    they will be stored.

    Received attention of an autoregressive model is that of all queries so far, so that its other
    steps are watched as well. Statistics by query, and by the state of queries, are those
    of the query that runs.
    """

    def __init__(self, task: Task, selection: Selection, *, pad: int = 0) -> None:
        """
        Args:
            task: the text.
            selection: of layers and heads.
            pad: padding columns in front of the text, if it is written beside longer ones.
        """
        self._pad = pad
        self._task = task
        self._selection = selection
        self._by_rows = not task.is_diffusion and not task.settings.full_forward
        """a step has one new query"""
        self._so_far = None if task.is_diffusion else SoFar()
        self._added = task.loaded.added_sinks
        names = [*task.settings.statistics]
        if self._so_far is not None:
            names.append("received_by_window")
        self._kinds = {name: statistics.parse(name) for name in names}
        if self._by_rows:
            self._kinds = {
                name: kind for name, kind in self._kinds.items() if not kind.needs_canvas
            }
        kinds = self._kinds.items()
        self._axes = {
            name: tuple(axis for axis in kind.axes if axis != "batch") for name, kind in kinds
        }
        by_state = any(kind.needs_canvas or "position" in kind.axes for _, kind in kinds)
        # the last row of a text that grows is one query of known state
        self._needs_states = by_state and not self._by_rows
        self._after_L = pd.Index(selection.layers).get_indexer(np.array(selection.layers) + 1)
        """place of the layer behind each one, -1 if it is not recorded"""
        self._memory: dict[Any, Any] = {}
        self._steps: list[dict[str, np.ndarray]] = []
        self._tables = defaultdict[str, list[Row]](list)
        self.moments: list[Moment] = []
        """Recorded steps."""
        self.maps: dict[str, np.ndarray] = {}
        self.queries: dict[int, int] = {}
        """Step -> queries that ran."""

    @contextmanager
    def watching(self, step: int, canvas: Any = None) -> Iterator[Any]:
        """The trace under which the model runs at this step, on this canvas unless it is
        autoregressive; None if it does not need one.
        """
        settings = self._task.settings
        # a recorded step adds up those before it
        if not settings.records(step) and not self._by_rows:
            yield None
            return
        # the trace lasts one step, its number 0; a second forward (guidance) is not measured
        chosen: dict[str, Any] = {"steps": (0,), "memory": self._memory}
        kept = self._selection
        if len(kept.layers) < kept.of_layers:
            chosen["layers"] = kept.layers
        if len(kept.heads) < kept.of_heads:
            chosen["heads"] = kept.heads
        maps = self._maps(step)
        if maps:
            chosen["maps"] = [(0, layer, head) for layer, head in maps]
        if self._needs_states:
            chosen["canvas"] = canvas or self._continued(step)
        names = tuple(self._kinds)
        if self._so_far is not None and not settings.records(step):
            # what later steps add up
            names = ("received", "received_by_window")
        chosen["exact"] = settings.exact
        with trace(self._task.loaded.model, names, **chosen) as recording:
            yield recording

    def _maps(self, step: int) -> list[tuple[int, int]]:
        """(layer, head) of the maps that are kept of this step."""
        keys = self._task.settings.map_keys
        layers = self._selection.of_layers
        return [(layer % layers, head) for number, layer, head in keys if number == step]

    def _continued(self, step: int) -> Any:
        """An autoregressive model has no mask: the open positions are those that it wrote."""
        start = len(self._task.started())
        open_1S = torch.arange(start + step)[None] >= start
        return SimpleNamespace(open_BS=open_1S, attention_BS=torch.ones_like(open_1S), mask_id=-1)

    def add(self, recording: Recording, moment: Moment, row: int = 0) -> None:
        """Keep the statistics of one step, for this row; from a step that is not recorded, only the
        sums that later ones need.
        """
        length = len(moment.ids_S)
        step: Row = {
            "positions": np.float32(length),
            "step_number": np.int32(moment.index),
        }

        def first(name: str) -> np.ndarray:
            # one forward; under guidance the first of two, which saw the real prompt
            value = self._unpadded(name, recording.values(name)[0][row].float().numpy())
            if self._by_rows and self._axes[name][-1] in _TEXT:
                # behind a text that was run beside longer ones stands padding
                return value[..., : self._added + length]
            return value

        received_LHK = first("received")
        visible_K = self._unpadded("received", recording.visible[0][row].float().numpy())
        visible_K = visible_K[: received_LHK.shape[-1]]
        ran = int(visible_K.max())
        if self._so_far is not None:
            self._so_far.add(received_LHK, visible_K, first("received_by_window"), self._added)
            if not self._task.settings.records(moment.index):
                return
            received_LHK = self._so_far.received
            visible_K = self._so_far.visible
        step["visible"] = visible_K
        step["received"] = received_LHK
        state_Q = moment.state_S[-1:]
        if self._needs_states:
            state_Q = recording.query_state[0][row].numpy()[self._pad :]
        for name in self._task.settings.statistics:
            if name != "received" and name in self._axes:
                self._of_one(name, first(name), step, moment.state_S, state_Q)
        self.queries[moment.index] = ran
        if self._by_rows:
            # each step of an autoregressive text has one new query, however many ran
            self.queries[moment.index] = 1
        self.moments.append(moment)
        self._steps.append(
            {name: _narrowed(name, np.asarray(value)) for name, value in step.items()}
        )
        for layer, head in self._maps(moment.index):
            self.maps[f"step{moment.index}-layer{layer}-head{head}"] = _narrowed(
                "map", recording.map(0, layer, head)[0].float().numpy()
            )

    def _unpadded(self, name: str, value: np.ndarray) -> np.ndarray:
        """The values of a statistic without the padding in front of the text."""
        if not self._pad:
            return value
        if self._axes[name][-1] == "key":
            return np.delete(value, slice(self._added, self._added + self._pad), -1)
        if self._axes[name][-1] == "position":
            return value[..., self._pad :]
        # a column that is a position counts from the first token of the text
        return value - np.float32(self._pad) * (np.array(self._kinds[name].columns) == "position")

    def _of_one(
        self, name: str, values: np.ndarray, step: Row, state_S: np.ndarray, state_Q: np.ndarray
    ) -> None:
        """A statistic beside the main one; of those by query means over the queries of each
        state.
        """
        axes = self._axes[name]
        if self._kinds[name].columns:
            self._of_table(name, values, step, state_S)
        elif "position" in axes:
            # after a first forward over the whole prompt, a last row is the last query
            rows_Q = np.moveaxis(values, axes.index("position"), -1)[..., -len(state_Q) :]
            step[name] = _means(rows_Q, state_Q)
        else:
            step[name] = values

    def _of_table(self, name: str, values: np.ndarray, step: Row, state_S: np.ndarray) -> None:
        """A row per layer and index on the axes between; for positions, also their state and
        whether they are sinks.
        """
        columns = self._kinds[name].columns
        places = np.indices(values.shape[:-1]).reshape(values.ndim - 1, -1)
        rows = {"step": step["step_number"], **dict(zip(self._axes[name], places, strict=False))}
        rows |= dict(zip(columns, values.reshape(-1, len(columns)).T, strict=True))
        if "position" in columns:
            sinks_LHK = find_sinks(step["received"], DEFAULT, step["visible"], step["positions"])
            sinks_LS = sinks_LHK.mean(1)[:, -len(state_S) :]
            place = rows["position"].astype(int)
            after = self._after_L[rows["layer"]]
            rows |= {
                "state": np.array(STATES, object)[state_S[place]],
                "sink_heads": sinks_LS.mean(0)[place],
                "sink_heads_any": sinks_LS.mean(),
                "sink_heads_next": np.where(after < 0, np.nan, sinks_LS[after, place]),
            }
        rows["layer"] = np.array(self._selection.layers)[rows["layer"]]
        self._tables[statistics.name_of(self._kinds[name])].append(rows)

    def tables(self, sample: int) -> dict[str, pd.DataFrame]:
        """One of each statistic that has `columns`, by name ("massive_activations").

        sink_heads is the share of all recorded heads in which the position is a sink (the default
        rule), sink_heads_any its mean over all positions, sink_heads_next the same in the layer
        that reads the hidden state.
        """
        tables = {}
        for name, parts in self._tables.items():
            # some columns hold one number for all rows of a step
            wide = [np.broadcast_arrays(np.array(sample), *rows.values()) for rows in parts]
            columns = map(np.concatenate, zip(*wide, strict=True))
            tables[name] = pd.DataFrame(dict(zip(("sample", *parts[0]), columns, strict=True)))
        return tables

    def contents(self, sample: int, kind: str = "") -> Contents:
        """Tables and arrays of the sample, with its facts; `kind`: those of a control."""
        tables: dict[str, Any] = self.tables(sample)
        arrays = {}
        kept = self.arrays()
        if kept:
            dims = {name: self.dims(name) for name in kept}
            if self._task.settings.keep_arrays:
                arrays["attention"] = Arrays(kept, dims)
            ids_TS = _grid([moment.ids_S for moment in self.moments], 0)
            different, number = np.unique(ids_TS, return_inverse=True)
            texts = [token_text(self._task.loaded.tokenizer, one) for one in different.tolist()]
            found = facts_of(
                Arrays(kept, dims),
                _grid([moment.state_S for moment in self.moments], -1).astype(np.int8),
                np.array(texts, object)[number].reshape(ids_TS.shape),
                sample=sample,
                layers=self._selection.layers,
                heads=self._selection.heads,
                added=self._added,
                so_far=self._so_far is not None,
            )
            tables |= found.tables
            arrays |= found.arrays
        return Contents(
            {of_twin(name, kind): table for name, table in tables.items()},
            {of_twin(name, kind): given for name, given in arrays.items()},
        )

    def dims(self, name: str) -> tuple[str, ...]:
        """Names of the axes of an array."""
        if name in STUDY_DIMS:
            return STUDY_DIMS[name]
        axes = self._axes[name]
        by_state = ("state",) if "position" in axes else ()
        return ("step", *by_state, *(axis for axis in axes if axis != "position"))

    def arrays(self) -> dict[str, np.ndarray]:
        """Everything kept, steps first; NaN if a step has no such key. Empty when no step was
        recorded.

        For an autoregressive model "window_received" too, windows first: see `SoFar.windows`.
        """
        if not self._steps:
            return {}
        found = {
            name: padded_stack([torch.from_numpy(step[name]) for step in self._steps], 0).numpy()
            for name in self._steps[0]
        }
        if self._so_far is not None:
            windows_WLHK = self._so_far.windows(found["received"].shape[-1], self._added)
            if len(windows_WLHK):
                found["window_received"] = _narrowed("window_received", windows_WLHK)
        return found


def facts_of(
    given: Arrays,
    states_TS: np.ndarray,
    texts_TS: np.ndarray,
    *,
    sample: int,
    layers: Sequence[int],
    heads: Sequence[int],
    added: int,
    so_far: bool,
) -> Contents:
    """The facts of a sample: small arrays, and a table by step, layer and head of narrow numbers
    with the token and state of the strongest key.

    Args:
        given: arrays as they are stored.
        states_TS: state of each position at each recorded step, -1 if it is not there.
        texts_TS: text of the token there.
        sample: its number.
        layers: recorded layers.
        heads: recorded heads.
        added: added sink columns in front of the keys.
        so_far: a step has the queries of all steps before it too.
    """
    found = facts(given.values, states_TS, added=added, so_far=so_far)
    found |= means(given.values, given.dims)
    small = {name: one for name, one in found.items() if AXES.get(name) != AXES["main"]}
    axes = {name: AXES.get(name, ("step", "layer")) for name in small}
    main_TLH = found["main"]
    places = np.meshgrid(found["step_number"], layers, heads, indexing="ij")
    position_TLH = main_TLH - added
    at = np.arange(len(main_TLH))[:, None, None], np.maximum(position_TLH, 0)
    columns: dict[str, Any] = {"sample": np.full(main_TLH.shape, sample)}
    columns |= dict(zip(("step", "layer", "head"), places, strict=True))
    columns |= {"key": main_TLH, "position": position_TLH}
    texts_TS = np.where(states_TS == STATES.index("masked"), MASK, texts_TS)
    for name, labels_TS in (("token", texts_TS), ("state", token_ages(states_TS))):
        columns[name] = np.where(position_TLH < 0, ADDED, labels_TS[at])
        columns[name][main_TLH < 0] = None
    columns |= {name: found[name].astype(np.float16) for name in WIDE}
    table = pd.DataFrame({name: values.ravel() for name, values in columns.items()})
    return Contents({FACTS_TABLE: table}, {FACTS: Arrays(small, axes)})


def _grid(rows: Sequence[np.ndarray], absent: int) -> np.ndarray:
    """Arrays of different length as the rows of one."""
    width = max(map(len, rows), default=0)
    padded = [np.pad(row, (0, width - len(row)), constant_values=absent) for row in rows]
    return np.array(padded).reshape(len(rows), width)


def _means(rows_Q: np.ndarray, state_Q: np.ndarray) -> np.ndarray:
    """Means over the queries of each state, (G, …) of (…, Q); NaN for a state that has none."""
    means = np.full((len(STATES), *rows_Q.shape[:-1]), np.nan)
    for state in np.unique(state_Q):
        means[state] = rows_Q[..., state_Q == state].mean(-1)
    return means


def _narrowed(name: str, array: np.ndarray) -> np.ndarray:
    """An array as a run folder has it: floats as float16, but as float32 if a finite number would
    become infinite.
    """
    if array.dtype.kind != "f" or name in WHOLE:
        return array
    with np.errstate(over="ignore"):
        narrow = array.astype(np.float16)
    if np.any(np.isinf(narrow) & np.isfinite(array)):
        return array.astype(np.float32)
    return narrow


class SoFar:
    """Column sums of one text over all its queries so far, as a forward over the whole text would
    give them.

    Under a cache every forward has the rows of its own queries alone; added up they are the columns
    of the causal map. A forward over the whole text (the prompt, or one without a cache) begins
    anew.
    """

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self.queries = 0
        """Queries so far."""
        self.received = np.zeros((0, 0, 0), np.float32)
        """(L, H, K) column sums."""
        self.visible = np.zeros(0, np.float32)
        """(K,) queries that may see the key."""
        self._windows: list[np.ndarray] = []

    def add(
        self,
        received_LHK: np.ndarray,
        visible_K: np.ndarray,
        window_WLHK: np.ndarray,
        added: int = 0,
    ) -> None:
        """Add the column sums of one forward, and of its queries, `WINDOW` after another."""
        ran = int(visible_K.max())
        if ran == np.count_nonzero(visible_K[added:]):
            self._begin()
        begins = self.queries // WINDOW
        keys = received_LHK.shape[-1]
        self.received = _widened(self.received, received_LHK.shape) + received_LHK
        self.visible = np.pad(self.visible, (0, keys - len(self.visible))) + visible_K
        for number, sums_LHK in enumerate(window_WLHK, begins):
            if number == len(self._windows):
                self._windows.append(np.zeros((0, 0, 0), np.float32))
            self._windows[number] = _widened(self._windows[number], sums_LHK.shape) + sums_LHK
        self.queries += ran

    def windows(self, keys: int, added: int = 0) -> np.ndarray:
        """(W, L, H, keys) mean weight that the queries of each whole window give the keys that all
        of them may see.

        Window w has the queries 8w … 8w + 7 of the text; the other keys hold NaN. Of the text, the
        first ``keys`` keys, with `added` sinks in front; a window beyond them is left out.
        """
        whole = min(self.queries, keys - added) // WINDOW
        found = np.full((whole, *self.received.shape[:2], keys), np.nan, np.float32)
        for number, sums_LHK in enumerate(self._windows[:whole]):
            seen = added + number * WINDOW + 1
            found[number, ..., :seen] = sums_LHK[..., :seen] / WINDOW
        return found


def _widened(sums_LHK: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The sums with zeros for keys, heads or layers that did not exist yet."""
    return np.pad(
        sums_LHK, [(0, size - had) for size, had in zip(shape, sums_LHK.shape, strict=True)]
    )
