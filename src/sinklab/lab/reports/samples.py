"""One sample of a study run folder: its arrays, and its tokens on the grid of the recorded
steps.
"""

# T recorded steps, L recorded layers, H recorded heads, K keys (added sinks first, then canvas
# positions), S positions, G states of queries (masked, committed, prompt)
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import pandas as pd

from sinklab.core.registry import rules
from sinklab.core.sinks import Rule, even_share, is_judgeable
from sinklab.lab.analysis.counts import Counter, Slab, apart, one_pass, spans, widened
from sinklab.lab.analysis.movement import Motion, MotionCounter
from sinklab.lab.analysis.rules import threshold
from sinklab.lab.analysis.strongest import Strongest, chance_elsewhere, strongest
from sinklab.lab.analysis.tokens import STATES, characters, token_ages, token_classes
from sinklab.lab.records.info import SO_FAR, STUDY_DIMS, of_twin, reading_of
from sinklab.lab.records.reading import Run
from sinklab.lab.records.storage import ARRAYS
from sinklab.lab.reports.seen import Seen


def rule_name(rule: Any) -> str:
    """A rule, or that of a text: "excess (epsilon = 5, scale = sum)"; its repr if unregistered."""
    rule = rules.parse(rule, object)
    try:
        name, given = rules.name_of(rule), asdict(rule)
    except (TypeError, ValueError):
        return repr(rule)
    options = []
    for option, value in given.items():
        text = f"{value:g}" if isinstance(value, float) else value
        options.append(f"{option} = {text}")
    return f"{name} ({', '.join(options)})".removesuffix(" ()")


class NotRecorded(ValueError):
    """Raised if a result needs something that the run did not record."""


def finished(run: Run, name: str) -> pd.DataFrame:
    """A table that every finished run of its kind has. Raises NotRecorded for a run that did not
    come to its end.
    """
    if name not in run.tables:
        raise NotRecorded(f"This needs a finished {run.info.kind}: {run.path} is not. Resume it.")
    return run.table(name)


def whole_table(name: str) -> cached_property[Any]:
    """A table of a reader as it is, read once; None when it was not written."""
    return cached_property(lambda reader: reader.table(name))


@dataclass(frozen=True, eq=False)
class Reader:
    """One run as reports read it: its tables, and its facts by layer and by step. None for a table
    that was not written.
    """

    run: Run
    label: str
    repeats: str
    """common name of runs that differ in their seed alone; the label of a run without repeats"""

    kind: ClassVar[str] = ""
    """the kind of run that the class reads, and its product"""
    origin: ClassVar[str] = ""
    """source of such runs, for errors"""
    columns: ClassVar[dict[str, set[str]]] = {}
    """columns that a table must have"""

    @cached_property
    def sink_count(self) -> int:
        """Number of added sinks: columns in front of the keys."""
        return int(self.run.info.model.get("sink_count") or 0)

    @property
    def causal_steps(self) -> int:
        """Steps of a causal warm start; 0 without one."""
        return 0

    def table(self, name: str) -> pd.DataFrame | None:
        """A table of the run, None when it was not written or is empty. ValueError when columns are
        missing.
        """
        if name not in self.run.tables:
            return None
        frame = checked(self.run, name, self.columns.get(name, set()), what=self.origin)
        return None if frame.empty else frame

    def over(self, axis: str) -> pd.DataFrame:
        """The facts by "layer" or by "step", a row each, under one name in runs of every kind
        (``added_share``, …).

        Empty if nothing was recorded.
        """
        frame = self.table(axis)
        return pd.DataFrame() if frame is None else frame

    def each(self, axis: str) -> pd.DataFrame:
        """The facts by axis of each sample, a row a sample and place; empty if a run has no
        samples.
        """
        return pd.DataFrame()


MOST = 1.002
"""Share of attention that a key may have in float16, which rounds both it and the queries."""
MASK = "[MASK]"
ADDED = "added sink"
_COLUMNS = {
    "tokens": {"sample", "step", "position", "token_id", "text", "state"},
    "steps": {"sample", "step", "block"},
}
# Runs of checkpoints without special tokens may lack the last two columns.
_ABSENT: dict[str, tuple[object, str]] = {
    "token_id": (-1, "i8"),
    "text": (None, "O"),
    "state": (None, "O"),
    "special": ("", "O"),
    "template": (False, "?"),
}
"""column of the table tokens -> value if no position is there, and the type"""


def _recorded(name: str) -> cached_property[np.ndarray | None]:
    """An array of a sample, read once; None when it was not recorded."""
    return cached_property(lambda sample: sample.array(name))


def _of_grid(name: str) -> cached_property[np.ndarray]:
    """A column of the table tokens on the grid of a sample."""
    return cached_property(lambda sample: sample._grid[name])


@dataclass(frozen=True, eq=False)
class Sample:
    """One prompt of a run: its attention, and the contents of the canvas before each recorded step.

    Arrays are read on first use; those that are not of single heads and keys live as long as the
    object. Missing values are NaN. ``slabs`` reads attention step by step; ``seen`` has the results
    of one such pass.

    Received attention and visible queries are scaled as if all positions had run as queries, so
    that an even share is 1 at every step, under a cache and in a decoder that runs one query a
    step. If keys are seen by different numbers of queries, as in an autoregressive text, they are
    compared by their mean weights.
    """

    run: Run
    index: int
    """number of the sample, and of its parts in the folder"""
    added: int
    """added sink columns in front of the keys"""
    rule: Rule
    """definition of a sink"""
    received: str = "received"
    """the array of received attention that the rule and all statements read"""
    twin: str = ""
    """model of the attention: the run's own if empty, else this control on the same canvases"""

    @property
    def attention(self) -> str:
        return of_twin("attention", self.twin)

    def _has(self, name: str) -> bool:
        """Whether the run has a part of this table or file of arrays for the sample."""
        return name in (*self.run.tables, *self.run.array_files) and self.index in self.run.parts(
            name
        )

    @property
    def has_attention(self) -> bool:
        """Whether attention was recorded."""
        return self._has(self.attention)

    @cached_property
    def names(self) -> frozenset[str]:
        """Names of the recorded arrays; empty when no attention was recorded. ValueError for axes
        of another layout.
        """
        if not self.has_attention:
            return frozenset()
        dims = self.run.dims(self.attention, part=self.index)
        needed = {"received", "visible", "positions", "step_number"}
        wrong = [
            key
            for key, axes in STUDY_DIMS.items()
            if (key in dims or key in needed) and dims.get(key) != axes
        ]
        if wrong:
            raise ValueError(
                f"{self.run.path / ARRAYS.file(self.attention, self.index)} is not that of a "
                f"study: {wrong[0]!r} has axes {dims.get(wrong[0])}, not {STUDY_DIMS[wrong[0]]}."
            )
        return frozenset(dims)

    def array(self, name: str) -> np.ndarray | None:
        """A recorded array in single precision (integers as they are), None when it was not
        recorded. Not kept.
        """
        if name not in self.names:
            return None
        array = self.run.array(self.attention, name, part=self.index)
        return widened(array).astype(np.float32, copy=False) if array.dtype.kind == "f" else array

    def _needed(self, name: str) -> np.ndarray:
        array = self.array(name)
        if array is None:
            raise NotRecorded(
                f"This needs recorded attention: {self.run.path} has none of sample {self.index}."
            )
        return array

    @cached_property
    def step_numbers_T(self) -> np.ndarray:
        """Numbers of the recorded steps."""
        return self._needed("step_number")

    @cached_property
    def positions_T(self) -> np.ndarray:
        """Number of canvas positions at each step (it grows in an autoregressive decoder)."""
        return self._needed("positions")

    @cached_property
    def _counts_TK(self) -> np.ndarray:
        """Queries that ran and see the key."""
        visible_TK = self._needed("visible")
        if self.received == "received":
            return visible_TK
        ran_T = [~np.isnan(rows_TLHK).all((1, 2, 3)) for _, rows_TLHK in self._rows()]
        return visible_TK * np.concatenate(ran_T)[:, None]

    @cached_property
    def visible_TK(self) -> np.ndarray:
        """Queries that see the key, as if all positions had run; 0 or NaN if the key does not
        exist.

        For statistics of the masked queries: 0 for all keys of a step at which too few of them ran.
        """
        return even_share(self._counts_TK, self._counts_TK, self.positions_T)[0]

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Numbers of steps, layers, heads and keys."""
        self._needed("step_number")
        return self.run.shape(self.attention, self.received, self.index)

    def _rows(self) -> Iterator[tuple[slice, np.ndarray]]:
        """The steps, some together, and the attention the keys received then, as recorded (step,
        layer, head, key).
        """
        steps, *size = self.shape
        parts = spans(steps, math.prod(size))
        return zip(
            parts, self.run.rows(self.attention, self.received, self.index, parts), strict=True
        )

    def slabs(self) -> Iterator[Slab]:
        """Received attention a_j of all steps, as if all positions had run: an even share is 1."""
        counts_TK, positions_T = self._counts_TK[:, None, None], self.positions_T[:, None, None]
        factor_T = even_share(np.ones_like(counts_TK), counts_TK, positions_T)[0][:, 0, 0, 0]
        for steps, rows_TLHK in self._rows():
            scaled = even_share(widened(rows_TLHK), counts_TK[steps], positions_T[steps])
            self._check_possible(*scaled)
            yield from apart((steps,), *scaled, rows_TLHK, factor_T[steps])

    def _check_possible(self, received_TLHK: np.ndarray, visible: np.ndarray) -> None:
        """Raises ValueError for attention that no query can have given; unseen keys are left."""
        most = MOST * np.nanmax(visible) or np.inf
        if (received_TLHK < 0).any() or (received_TLHK > most).any():
            raise ValueError(
                f"{self.run.path / ARRAYS.file(self.attention, self.index)} is damaged: a key gets "
                f"a share of 0 to 1 of each query's attention, but {self.received!r} has sums from "
                f"{np.nanmin(received_TLHK):.6g} to {np.nanmax(received_TLHK):.6g} of at most "
                f"{np.nanmax(visible):.6g} queries. Run it again."
            )

    def read(self, *counters: Counter) -> Seen:
        """Read the attention once, for ``seen`` and for ``counters``."""
        seen = Seen(
            self.shape,
            self.added,
            self.rule,
            np.where(self.exists_TK, self.visible_TK, np.nan),
            self.positions_T,
        )
        one_pass(self.slabs(), seen, *counters)
        self.__dict__["seen"] = seen
        for counter in counters:
            if isinstance(counter, MotionCounter):
                self.__dict__["motion"] = counter.motion
        return seen

    @cached_property
    def seen(self) -> Seen:
        """Results of one pass over the attention."""
        return self.read()

    @property
    def received_TLHK(self) -> np.ndarray:
        """Received attention a_j, as if all positions had run: an even share is 1. Whole, and not
        kept.
        """
        counts_TK, positions_T = self._needed("visible"), self.positions_T
        return even_share(
            self._needed(self.received), counts_TK[:, None, None], positions_T[:, None, None]
        )[0]

    @property
    def score_TLHK(self) -> np.ndarray:
        """Mean weight of the keys in multiples of an even share; NaN if no key is defined. Whole,
        and not kept.
        """
        return np.concatenate([slab.score for slab in self.slabs()])

    @cached_property
    def exists_TK(self) -> np.ndarray:
        """Whether the key is there, and enough queries see it to be judged (`is_judgeable`)."""
        return is_judgeable(self.visible_TK)

    @cached_property
    def reading(self) -> str:
        """Queries that are read: "all queries" or "all queries so far"."""
        return reading_of(self.run.info)

    @cached_property
    def strongest(self) -> Strongest:
        """The strongest key of every head. Reads the attention, unless that was done."""
        how: dict[str, Any] = {"windows_WLHK": self.array("window_received")}
        if self.reading != SO_FAR:
            how = {"mobility_LH": self.motion.mobility}
        elif how["windows_WLHK"] is None:
            # a text of fewer than eight queries
            how = {"mobility_LH": np.full(self.shape[1:3], np.nan)}
        return strongest(self.seen.main_TLH, self.seen.share_TLH, added=self.added, **how)

    @cached_property
    def motion(self) -> Motion:
        """How the main sinks move under the rule. Reads the attention, unless that was done."""
        counter = MotionCounter(self.shape, self.rule, self.added)
        one_pass(self.slabs(), counter)
        return counter.motion

    @cached_property
    def last_row_mobility_LH(self) -> np.ndarray | None:
        """Chance that the last rows of two steps have different strongest keys; None if it was not
        recorded.
        """
        main_TLH = self.array("last_row_main")
        return None if main_TLH is None else chance_elsewhere(main_TLH.astype(int), main_TLH >= 0)

    @cached_property
    def mean_share_TK(self) -> np.ndarray:
        """Mean weight that the queries which see a key give it, mean over layers and heads; NaN if
        it does not exist.
        """
        return self.seen.share_TLK.mean(1)

    @cached_property
    def main_TLH(self) -> np.ndarray:
        """The strongest key, -1 if none is defined."""
        return self.seen.main_TLH

    @property
    def threshold_T(self) -> np.ndarray:
        """Received attention above which a key is a sink; NaN under a rule that is no such
        bound.
        """
        return np.full(len(self.positions_T), threshold(self.rule, self.positions_T), dtype=float)

    @cached_property
    def events_TK(self) -> np.ndarray:
        """Number of (layer, head) pairs that have a sink at the key."""
        return self.seen.events_TLK.sum(1, dtype=np.int64)

    value_norm_TLK = _recorded("value_norm")
    """Length of value vectors, mean over heads."""
    key_norm_TLK = _recorded("key_norm")
    """Length of key vectors, mean over heads."""
    share_by_state_TGLH = _recorded("share_by_state")
    """Mean weight the queries of one state give to the key that they attend to most."""
    output_norm_TGLH = _recorded("output_norm")
    """Length of a head's output, mean over the queries of one state."""
    noop_bound_TGLH = _recorded("noop_bound")
    """Upper bound of that length (sink-token paper, Eq. 20), mean over the same queries."""

    @cached_property
    def map_names(self) -> tuple[tuple[int, int, int], ...]:
        """(step, layer, head) of the exact attention maps that were kept."""
        if not self._has("maps"):
            return ()
        named = [key.split("-") for key in self.run.dims("maps", part=self.index)]
        return tuple(sorted((int(t[4:]), int(layer[5:]), int(h[4:])) for t, layer, h in named))

    def map_name(self, *wanted: int | None) -> tuple[int, int, int]:
        """The first kept map with this step, layer and head, None for any. NotRecorded names those
        there are.
        """
        for name in self.map_names:
            if all(given in (None, has) for given, has in zip(wanted, name, strict=True)):
                return name
        given = ", ".join("any" if number is None else str(number) for number in wanted)
        kept = ", ".join(map(str, self.map_names)) or "none"
        raise NotRecorded(
            f"{self.run.path} kept no map of (step, layer, head) ({given}) of sample "
            f"{self.index}: it has "
            f"{kept}. The setting `maps` of a trace asks for them, as step:layer:head: 3:5:2."
        )

    def map(self, step: int, layer: int, head: int) -> np.ndarray:
        """The attention map (query, key). Raises NotRecorded for one that was not kept, naming
        those there are.
        """
        name = "step{}-layer{}-head{}".format(*self.map_name(step, layer, head))
        return self.run.array("maps", name, part=self.index).astype(np.float32)

    @cached_property
    def _grid(self) -> dict[str, np.ndarray]:
        """Columns of the table tokens as (step, position) arrays."""
        if not self.has_tokens:
            raise NotRecorded(
                f"This needs the table tokens: {self.run.path} has none of sample {self.index}."
            )
        frame = checked(self.run, "tokens", _COLUMNS["tokens"], self.index)
        numbers = self.step_numbers_T if self.names else np.unique(frame["step"])
        frame = frame[frame["step"].isin(numbers)]
        positions = (
            self.visible_TK.shape[1] - self.added
            if self.names
            else int(frame["position"].max()) + 1
        )
        if len(frame) and not 0 <= frame["position"].min() <= frame["position"].max() < positions:
            raise ValueError(
                f"{self.run.path / f'tokens-{self.index:04d}.parquet'} does not fit the recorded "
                f"attention: a position lies outside 0 to {positions - 1}."
            )
        place = (pd.Index(numbers).get_indexer(frame["step"]), frame["position"].to_numpy(int))
        grid = {}
        for name, (absent, dtype) in _ABSENT.items():
            grid[name] = np.full((len(numbers), positions), absent, dtype=dtype)
            if name in frame:
                grid[name][place] = frame[name].to_numpy()
        return grid

    @cached_property
    def has_tokens(self) -> bool:
        """Whether the tokens of this sample were kept."""
        return self._has("tokens")

    ids_TS = _of_grid("token_id")
    """Token ids before each step, -1 if the position does not exist."""
    texts_TS = _of_grid("text")
    """Token texts before each step, None if the position does not exist."""
    specials_TS = _of_grid("special")
    """Special role of a token ("" for ordinary ones)."""

    @cached_property
    def read_TS(self) -> np.ndarray:
        """Texts as they are read: the first of several tokens that make one character holds it."""
        return np.array(
            [characters([text or "" for text in row_S]) for row_S in self.texts_TS], dtype=object
        )

    @cached_property
    def states_TS(self) -> np.ndarray:
        """Index into STATES (masked, committed, prompt), int8; -1 if the position is absent."""
        states_TS = self._grid["state"]
        return (
            pd.Index(STATES).get_indexer(states_TS.ravel()).reshape(states_TS.shape).astype(np.int8)
        )

    @cached_property
    def ages_TS(self) -> np.ndarray:
        """Masked, just committed, committed or prompt; None if the position does not exist; object.

        Just committed: masked, or not there yet, at the recorded step before.
        """
        return token_ages(self.states_TS)

    @cached_property
    def classes_TS(self) -> np.ndarray:
        """Class of the token; None if the position does not exist."""
        specials_TS = self.specials_TS.copy()
        specials_TS[self.states_TS == 0] = "mask"
        return token_classes(self.texts_TS, specials_TS, self._grid["template"])

    @cached_property
    def blocks_T(self) -> np.ndarray:
        """Block of the decoder at each recorded step, -1 if it was not written down."""
        if not self._has("steps"):
            return np.full(len(self.step_numbers_T), -1)
        blocks = (
            checked(self.run, "steps", _COLUMNS["steps"], self.index)
            .groupby("step")["block"]
            .last()
        )
        return blocks.reindex(self.step_numbers_T, fill_value=-1).to_numpy(int)

    @cached_property
    def borders(self) -> np.ndarray:
        """Rows of the recorded steps at which another block begins."""
        return np.flatnonzero(np.diff(self.blocks_T)) + 1

    def over_keys(self, values_TS: np.ndarray, added: object) -> np.ndarray:
        """``values_TS`` (step, position) behind the added sink columns, which hold ``added``; None
        for keys that do not exist.
        """
        over = np.full((len(values_TS), self.visible_TK.shape[1]), None, dtype=object)
        over[:, self.added :] = values_TS
        over[:, : self.added] = added
        over[~self.exists_TK] = None
        return over

    @cached_property
    def labels_TK(self) -> np.ndarray:
        """Label of each key: the text of its token, MASK, or ADDED; None if the key does not
        exist.
        """
        labels_TS = self.texts_TS.copy()
        labels_TS[self.states_TS == 0] = MASK
        return self.over_keys(labels_TS, ADDED)

    @cached_property
    def classes_TK(self) -> np.ndarray:
        """Class of each key; the added sink columns are "sink"."""
        return self.over_keys(self.classes_TS, "sink")

    @cached_property
    def ages_TK(self) -> np.ndarray:
        """Name of the age of each key; ADDED for the added sink columns."""
        return self.over_keys(self.ages_TS, ADDED)


class Samples:
    """The samples of a run. Each access gives a new Sample, so that the arrays one has read are
    freed when it is let go.
    """

    def __init__(self, run: Run, *of_each: Any) -> None:
        """`of_each`: the other fields of a sample."""
        self._run, self._of_each = run, of_each
        known = [
            name for name in ("attention", "tokens") if name in (*run.array_files, *run.tables)
        ]
        self.numbers = sorted({number for name in known for number in run.parts(name)})

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, place: int) -> Sample:
        return Sample(self._run, self.numbers[place], *self._of_each)

    def __iter__(self) -> Iterator[Sample]:
        return map(self.__getitem__, range(len(self)))


def checked(
    run: Run, name: str, columns: set[str], part: int | None = None, what: str = "a study"
) -> pd.DataFrame:
    """A table that has ``columns``; ValueError naming the missing ones otherwise."""
    frame = run.table(name, part)
    if missing := columns - set(frame.columns):
        raise ValueError(
            f"{run.path}: table {name} is not that of {what}: it lacks "
            f"{', '.join(sorted(missing))}."
        )
    return frame
