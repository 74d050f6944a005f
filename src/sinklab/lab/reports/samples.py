"""One sample of a study run folder: its arrays, and its tokens on the grid of the recorded
steps.
"""

# T recorded steps, L recorded layers, H recorded heads, K keys (added sinks first, then canvas
# positions), S positions, G states of queries (masked, committed, prompt)
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import pandas as pd

from sinklab.core.registry import rules
from sinklab.core.sinks import DEFAULT, Rule, even_share, is_judgeable
from sinklab.lab.analysis.counts import Scored, scored
from sinklab.lab.analysis.facts import FACTS, FACTS_TABLE, facts, means, others
from sinklab.lab.analysis.tokens import (
    ADDED,
    MASK,
    STATES,
    characters,
    token_ages,
    token_classes,
)
from sinklab.lab.records.info import SO_FAR, STUDY_DIMS, of_twin, reading_of
from sinklab.lab.records.reading import Run


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

    def has(self, name: str) -> bool:
        """Whether an attribute has anything in it; always for no name."""
        found: Any = getattr(self, name, None) if name else True
        return found is True or (found is not None and len(found) > 0)

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
READ: tuple[str, ...] = (
    "visible",
    "positions",
    "step_number",
    "value_norm",
    "key_norm",
    "share_by_state",
)
READ += ("window_received", "last_row_main")
"""arrays that facts are made of, besides received attention"""
FIRST = "first token"
"""names the text position 0, whatever its token"""
OTHER = "other token"
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


def _recorded(name: str) -> Any:
    """An array of a sample; None when it was not recorded."""
    return property(lambda sample: sample.array(name))


def _of_grid(name: str) -> cached_property[np.ndarray]:
    """A column of the table tokens on the grid of a sample."""
    return cached_property(lambda sample: sample._grid[name])


@dataclass(frozen=True, eq=False)
class Sample:
    """One prompt of a run: its attention, and the contents of the canvas before each recorded step.

    Arrays are read when they are asked for, and not kept; missing values are NaN. `facts` are what
    the run wrote down when it was recorded, or, under another rule, what is derived from its arrays
    anew.

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
        return self.run.has(name, self.index)

    @property
    def has_attention(self) -> bool:
        """Whether attention was recorded."""
        return self._has(self.attention)

    @property
    def has_facts(self) -> bool:
        """Whether there are facts about attention, or arrays to derive them from."""
        return self.has_attention or self._has(of_twin(FACTS, self.twin))

    @cached_property
    def dims(self) -> Mapping[str, tuple[str, ...]]:
        """Recorded arrays and the names of their axes; empty when no attention was recorded.
        ValueError for axes of another layout.
        """
        if not self.has_attention:
            return {}
        dims = self.run.dims(self.attention, sample=self.index)
        needed = {"received", "visible", "positions", "step_number"}
        wrong = [
            key
            for key, axes in STUDY_DIMS.items()
            if (key in dims or key in needed) and dims.get(key) != axes
        ]
        if wrong:
            raise ValueError(
                f"{self.attention} of sample {self.index} of {self.run.path} is not that of a "
                f"study: {wrong[0]!r} has axes {dims.get(wrong[0])}, not {STUDY_DIMS[wrong[0]]}."
            )
        return dims

    def stored(self, name: str) -> np.ndarray:
        """A recorded array as it was stored."""
        if name not in self.dims:
            raise NotRecorded(
                f"This needs recorded attention: {self.run.path} has none of sample {self.index}. "
                "Facts are of the rule that was set; another needs the arrays, which the setting "
                "`keep_arrays` of a trace keeps."
            )
        array = self.run.array(self.attention, name, sample=self.index)
        if name == self.received:
            self._check_possible(array)
        return array

    def array(self, name: str) -> np.ndarray | None:
        """A recorded array in single precision (integers as they are), None when it was not
        recorded.
        """
        if name not in self.dims:
            return None
        array = self.stored(name)
        return array.astype(np.float32) if array.dtype.kind == "f" else array

    def _check_possible(self, received_TLHK: np.ndarray) -> None:
        """Raises ValueError for attention that no query can have given; unseen keys are left."""
        seen = float(np.nanmax(self.stored("visible"), initial=0))
        least, most = (float(of(received_TLHK, initial=0)) for of in (np.nanmin, np.nanmax))
        if least < 0 or most > (MOST * seen or np.inf):
            raise ValueError(
                f"{self.attention} of sample {self.index} of {self.run.path} is damaged: a key "
                f"gets a share of 0 to 1 of each query's attention, but {self.received!r} has sums "
                f"from {least:.6g} to {most:.6g} of at most {seen:.6g} queries. Run it again."
            )

    @cached_property
    def reading(self) -> str:
        """Queries that are read: "all queries" or "all queries so far"."""
        return reading_of(self.run.info)

    @cached_property
    def facts(self) -> dict[str, np.ndarray]:
        """`sinklab.lab.analysis.facts.facts` of the sample under the rule, and the means of the
        other statistics.
        """
        name = of_twin(FACTS, self.twin)
        is_other = self.rule != DEFAULT or self.received != "received"
        if is_other or not self._has(name):
            return self.derived()
        found = self.run.arrays(name, sample=self.index)
        keys = self.run.table(of_twin(FACTS_TABLE, self.twin), sample=self.index)["key"]
        return found | {"main": keys.to_numpy().reshape(-1, *found["share_LH"].shape)}

    def derived(self) -> dict[str, np.ndarray]:
        """The facts, from the arrays."""
        arrays = {self.received: self.stored(self.received)}
        arrays |= {name: self.stored(name) for name in READ if name in self.dims}
        arrays["visible"] = self._counts_TK
        found = facts(
            arrays,
            self.states_TS if self.has_tokens else None,
            rule=self.rule,
            added=self.added,
            so_far=self.reading == SO_FAR,
            of=self.received,
        )
        dims = {name: self.dims[name] for name in others(self.dims)}
        return found | means({name: self.stored(name) for name in dims}, dims)

    def _small(self, name: str) -> np.ndarray:
        """An array that is both in the facts and among the arrays."""
        written = of_twin(FACTS, self.twin)
        if self._has(written):
            return self.run.array(written, name, sample=self.index)
        array = self.stored(name)
        return array.astype(np.float32) if array.dtype.kind == "f" else array

    @cached_property
    def step_numbers_T(self) -> np.ndarray:
        """Numbers of the recorded steps."""
        return self._small("step_number")

    @cached_property
    def positions_T(self) -> np.ndarray:
        """Number of canvas positions at each step (it grows in an autoregressive decoder)."""
        return self._small("positions")

    @cached_property
    def visible_TK(self) -> np.ndarray:
        """Queries that see the key, as if all positions had run; 0 or NaN if the key does not
        exist.

        For statistics of the masked queries: 0 for all keys of a step at which too few of them ran.
        """
        return even_share(self._counts_TK, self._counts_TK, self.positions_T)[0]

    @cached_property
    def _counts_TK(self) -> np.ndarray:
        """Queries that ran and see the key."""
        if self.received == "received":
            return self._small("visible")
        # queries of one kind were read, of which a step may have too few
        ran_T = ~np.isnan(self.stored(self.received)).all((1, 2, 3))
        return self.stored("visible") * ran_T[:, None]

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Numbers of steps, layers, heads and keys."""
        if self.has_attention:
            return self.run.shape(self.attention, self.received, self.index)
        return (*self.facts["main"].shape, self.visible_TK.shape[1])

    def scored(self) -> Iterator[Scored]:
        """Received attention of each layer, (step, 1, head, key)."""
        received_TLHK = self.stored(self.received)
        around = self._counts_TK[:, None, None], self.positions_T[:, None, None]
        for layer in range(received_TLHK.shape[1]):
            yield scored(received_TLHK[:, layer : layer + 1], *around)

    @property
    def score_TLHK(self) -> np.ndarray:
        """Mean weight of the keys in multiples of an even share; NaN if no key is defined."""
        return np.concatenate([one.score for one in self.scored()], axis=1)

    @cached_property
    def received_TLK(self) -> np.ndarray:
        """The same, mean over heads."""
        return np.concatenate([one.score.mean(2) for one in self.scored()], axis=1)

    @cached_property
    def greatest(self) -> float:
        """The most that any key of any head receives."""
        return max(float(np.nan_to_num(one.score).max(initial=0)) for one in self.scored())

    @cached_property
    def exists_TK(self) -> np.ndarray:
        """Whether the key is there, and enough queries see it to be judged (`is_judgeable`)."""
        return is_judgeable(self.visible_TK)

    value_norm_TLK = _recorded("value_norm")
    """Length of value vectors, mean over heads."""
    key_norm_TLK = _recorded("key_norm")
    """Length of key vectors, mean over heads."""

    @cached_property
    def map_names(self) -> tuple[tuple[int, int, int], ...]:
        """(step, layer, head) of the exact attention maps that were kept."""
        if not self._has("maps"):
            return ()
        named = [key.split("-") for key in self.run.dims("maps", sample=self.index)]
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
        return self.run.array("maps", name, sample=self.index).astype(np.float32)

    @cached_property
    def _grid(self) -> dict[str, np.ndarray]:
        """Columns of the table tokens as (step, position) arrays."""
        if not self.has_tokens:
            raise NotRecorded(
                f"This needs the table tokens: {self.run.path} has none of sample {self.index}."
            )
        frame = checked(self.run, "tokens", _COLUMNS["tokens"], self.index)
        numbers = self.step_numbers_T if self.has_facts else np.unique(frame["step"])
        frame = frame[frame["step"].isin(numbers)]
        positions = (
            self.visible_TK.shape[1] - self.added
            if self.has_facts
            else int(frame["position"].max()) + 1
        )
        if len(frame) and not 0 <= frame["position"].min() <= frame["position"].max() < positions:
            raise ValueError(
                f"the table tokens of {self.run.path} does not fit the recorded attention of "
                f"sample {self.index}: a position lies outside 0 to {positions - 1}."
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


def checked(
    run: Run, name: str, columns: set[str], sample: int | None = None, what: str = "a study"
) -> pd.DataFrame:
    """A table that has ``columns``; ValueError naming the missing ones otherwise."""
    frame = run.table(name, sample)
    if missing := columns - set(frame.columns):
        raise ValueError(
            f"{run.path}: table {name} is not that of {what}: it lacks "
            f"{', '.join(sorted(missing))}."
        )
    return frame
