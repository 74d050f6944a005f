"""One sample of a study run folder: its arrays, and its tokens on the grid of the recorded
steps.
"""

# T recorded steps, L recorded layers, H recorded heads, K keys (added sinks first, then canvas
# positions), S positions, G states of queries (masked, committed, prompt)
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

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


READ = ("visible", "positions", "step_number", "value_norm", "window_received")
"""arrays that facts are made of, besides received attention"""
FIRST = "first token"
"""names the text position 0, whatever its token"""
OTHER = "other token"
# Runs of checkpoints without special tokens may lack the last two columns.
ABSENT: dict[str, tuple[object, str]] = {
    "token_id": (-1, "i8"),
    "text": (None, "O"),
    "state": (None, "O"),
    "special": ("", "O"),
    "template": (False, "?"),
}
"""column of the table tokens -> value if no position is there, and the type"""


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
        return self.run.array(self.attention, name, sample=self.index)

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
        if self.rule != DEFAULT or not self._has(name):
            return self.derived()
        found = self.run.arrays(name, sample=self.index)
        keys = self.run.table(of_twin(FACTS_TABLE, self.twin), sample=self.index)["key"]
        return found | {"main": keys.to_numpy().reshape(-1, *found["share_LH"].shape)}

    def derived(self) -> dict[str, np.ndarray]:
        """The facts, from the arrays."""
        arrays = {"received": self.stored("received")}
        found = facts(
            arrays | {name: self.stored(name) for name in READ if name in self.dims},
            self.states_TS if self.has_tokens else None,
            rule=self.rule,
            added=self.added,
            so_far=self.reading == SO_FAR,
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
        """
        visible_TK = self._small("visible")
        return even_share(visible_TK, visible_TK, self.positions_T)[0]

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Numbers of steps, layers, heads and keys."""
        return (*self.facts["main"].shape, self.visible_TK.shape[1])

    def scored(self) -> Iterator[Scored]:
        """Received attention of each layer, (step, 1, head, key)."""
        received_TLHK = self.stored("received")
        around = self._small("visible")[:, None, None], self.positions_T[:, None, None]
        for layer in range(received_TLHK.shape[1]):
            yield scored(received_TLHK[:, layer : layer + 1], *around)

    @property
    def score_TLHK(self) -> np.ndarray:
        """Mean weight of the keys in multiples of an even share; NaN if no key is defined."""
        return np.concatenate([one.score for one in self.scored()], axis=1)

    @cached_property
    def received_TLK(self) -> np.ndarray:
        """Mean over heads of the same."""
        return np.concatenate([one.score.mean(2) for one in self.scored()], axis=1)

    @cached_property
    def greatest(self) -> float:
        """The most that any key of any head receives."""
        return max(float(np.nan_to_num(one.score).max(initial=0)) for one in self.scored())

    @cached_property
    def exists_TK(self) -> np.ndarray:
        """Whether the key is there, and enough queries see it to be judged (`is_judgeable`)."""
        return is_judgeable(self.visible_TK)

    @cached_property
    def map_names(self) -> tuple[tuple[int, int, int], ...]:
        """(step, layer, head) of the exact attention maps that were kept."""
        if not self._has("maps"):
            return ()
        named = [key.split("-") for key in self.run.dims("maps", sample=self.index)]
        return tuple(sorted((int(t[4:]), int(layer[5:]), int(h[4:])) for t, layer, h in named))

    def map(self, *wanted: int | None) -> tuple[tuple[int, int, int], np.ndarray]:
        """The first kept attention map with this step, layer and head, None for any: these numbers,
        and the map (query, key). NotRecorded names those there are.
        """
        for name in self.map_names:
            if all(given in (None, has) for given, has in zip(wanted, name, strict=True)):
                stored = "step{}-layer{}-head{}".format(*name)
                return name, self.run.array("maps", stored, self.index).astype(np.float32)
        raise NotRecorded(
            f"{self.run.path} kept no such map of sample {self.index}; of (step, layer, head) it "
            f"has {', '.join(map(str, self.map_names)) or 'none'}. The setting `maps` of a trace "
            "asks for them, as step:layer:head: 3:5:2."
        )

    @cached_property
    def grid(self) -> dict[str, np.ndarray]:
        """Columns of the table tokens before each step, (step, position); where no position is,
        those of `ABSENT`. "special" is the special role of a token, "" for ordinary ones.
        """
        if not self.has_tokens:
            raise NotRecorded(
                f"This needs the table tokens: {self.run.path} has none of sample {self.index}."
            )
        frame = self.run.table("tokens", self.index)
        frame = frame[frame["step"].isin(self.step_numbers_T)]
        step = pd.Index(self.step_numbers_T).get_indexer(frame["step"])
        place, shape = (step, frame["position"]), self.exists_TK[:, self.added :].shape
        grid = {}
        for name, (absent, dtype) in ABSENT.items():
            grid[name] = np.full(shape, absent, dtype=dtype)
            if name in frame:
                grid[name][place] = frame[name].to_numpy()
        return grid

    @cached_property
    def has_tokens(self) -> bool:
        """Whether the tokens of this sample were kept."""
        return self._has("tokens")

    @cached_property
    def read_TS(self) -> np.ndarray:
        """Texts as they are read: the first of several tokens that make one character holds it."""
        rows = [characters([text or "" for text in row_S]) for row_S in self.grid["text"]]
        return np.array(rows, dtype=object)

    @cached_property
    def states_TS(self) -> np.ndarray:
        """Index into STATES (masked, committed, prompt), int8; -1 if the position is absent."""
        states_TS = self.grid["state"]
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
        specials_TS = self.grid["special"].copy()
        specials_TS[self.states_TS == 0] = "mask"
        return token_classes(self.grid["text"], specials_TS, self.grid["template"])

    @cached_property
    def blocks_T(self) -> np.ndarray:
        """Block of the decoder at each recorded step, -1 if it was not written down."""
        if not self._has("steps"):
            return np.full(len(self.step_numbers_T), -1)
        blocks = self.run.table("steps", self.index).groupby("step")["block"].last()
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
        labels_TS = self.grid["text"].copy()
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
