"""One sample of a study run folder: its arrays, and its tokens on the grid of the recorded steps."""

# T recorded steps, K keys (added sinks first, then canvas positions), S positions
from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import overload

import numpy as np
import pandas as pd

from sinklab.records import Run
from sinklab.sinks import STATES, token_ages, token_classes

from .recorded import NotRecorded, Recorded

MASK = "[MASK]"
ADDED = "added sink"
_COLUMNS = {
    "tokens": {"sample", "step", "position", "token_id", "text", "state"},
    "steps": {"sample", "step", "block"},
}


@dataclass(frozen=True, eq=False)
class Sample(Recorded):
    """One prompt of a run: attention (see Recorded), and what the canvas held before each recorded step."""

    prompt: str | None = None
    completion: str | None = None

    @cached_property
    def _grid(self) -> dict[str, np.ndarray]:
        """Columns of the table tokens as (step, position) arrays."""
        if "tokens" not in self.run.tables or self.index not in self.run.parts("tokens"):
            raise NotRecorded(f"This needs the table tokens: {self.run.path} has none of sample {self.index}.")
        frame = checked(self.run, "tokens", _COLUMNS["tokens"], self.index)
        numbers = self.step_numbers_T if self.names else np.unique(frame["step"])
        row_of = {int(number): row for row, number in enumerate(numbers)}
        frame = frame[frame["step"].isin(row_of)]
        positions = self.visible_TK.shape[1] - self.added if self.names else int(frame["position"].max()) + 1
        if len(frame) and not 0 <= frame["position"].min() <= frame["position"].max() < positions:
            raise ValueError(
                f"{self.run.path / f'tokens-{self.index:04d}.parquet'} does not fit the recorded attention: a position "
                f"lies outside 0 to {positions - 1}."
            )
        place = (frame["step"].map(row_of).to_numpy(int), frame["position"].to_numpy(int))
        # Runs of checkpoints without special tokens may lack the last two columns.
        columns: dict[str, tuple[object, str]] = {"special": ("", "O"), "template": (False, "?")}
        columns |= {"token_id": (-1, "i8"), "text": (None, "O"), "state": (None, "O")}
        grid = {}
        for name, (absent, dtype) in columns.items():
            grid[name] = np.full((len(numbers), positions), absent, dtype=dtype)
            if name in frame:
                grid[name][place] = frame[name].to_numpy()
        return grid

    @property
    def has_tokens(self) -> bool:
        """Whether the tokens of this sample were kept."""
        return "tokens" in self.run.tables and self.index in self.run.parts("tokens")

    @property
    def ids_TS(self) -> np.ndarray:
        """Token ids before each step, -1 where the position is not there."""
        return self._grid["token_id"]

    @property
    def texts_TS(self) -> np.ndarray:
        """Token texts before each step, None where the position is not there."""
        return self._grid["text"]

    @property
    def specials_TS(self) -> np.ndarray:
        """Special role of a token ("" for ordinary ones)."""
        return self._grid["special"]

    @cached_property
    def states_TS(self) -> np.ndarray:
        """Index into STATES (masked, committed, prompt), -1 where the position is not there; int8."""
        names = self._grid["state"]
        states = np.full(names.shape, -1, dtype=np.int8)
        for code, name in enumerate(STATES):
            states[names == name] = code
        return states

    @cached_property
    def ages_TS(self) -> np.ndarray:
        """One of ``sinks.AGES`` (masked, just committed, committed, prompt), None where no position is; object.

        Just committed: masked, or not there yet, at the recorded step before.
        """
        absent = self.states_TS < 0
        ages = token_ages(np.where(absent, 0, self.states_TS))
        ages[absent] = None
        return ages

    @cached_property
    def classes_TS(self) -> np.ndarray:
        """Class of the token, one of ``sinks.CLASSES``; None where the position is not there."""
        specials = np.where(self.states_TS == 0, "mask", self.specials_TS)
        return token_classes(self.texts_TS, specials, self._grid["template"])

    @cached_property
    def blocks_T(self) -> np.ndarray:
        """Block of the decoder at each recorded step, -1 where it was not written down."""
        blocks_T = np.full(len(self.step_numbers_T), -1)
        if "steps" in self.run.tables and self.index in self.run.parts("steps"):
            frame = checked(self.run, "steps", _COLUMNS["steps"], self.index)
            known = dict(zip(frame["step"], frame["block"], strict=True))
            blocks_T = np.array([known.get(int(step), -1) for step in self.step_numbers_T], dtype=int)
        return blocks_T

    def over_keys(self, values_TS: np.ndarray, added: object) -> np.ndarray:
        """``values_TS`` (step, position) behind the added sink columns, which hold ``added`` where they are there."""
        keys = self.visible_TK.shape[1]
        over = np.full((len(values_TS), keys), None, dtype=object)
        over[:, self.added :] = values_TS
        over[:, : self.added] = added
        over[~self.exists_TK] = None
        return over

    @property
    def labels_TK(self) -> np.ndarray:
        """What each key held: the text of its token, MASK, or ADDED; None where the key is not there."""
        return self.over_keys(np.where(self.states_TS == 0, MASK, self.texts_TS), ADDED)

    @property
    def classes_TK(self) -> np.ndarray:
        """Class of each key; the added sink columns are "sink"."""
        return self.over_keys(self.classes_TS, "sink")

    @property
    def ages_TK(self) -> np.ndarray:
        """Name of the age of each key; ADDED for the added sink columns."""
        return self.over_keys(self.ages_TS, ADDED)


class Samples(Sequence[Sample]):
    """The samples of a run. Each access gives a new Sample, so that what one has read goes when it is let go."""

    def __init__(self, run: Run, added: int, generations: pd.DataFrame | None) -> None:
        self._run, self._added, self._texts = run, added, generations
        numbers: set[int] = set()
        for name in ("attention", "tokens"):
            if name in (*run.array_files, *run.tables):
                numbers.update(run.parts(name))
        self.numbers = tuple(sorted(numbers))

    def chosen(self, places: Sequence[int]) -> Samples:
        """The samples at some places only."""
        some = copy(self)
        some.numbers = tuple(self.numbers[place] for place in places)
        return some

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, place: int) -> Sample: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Sample]: ...
    def __getitem__(self, place: int | slice) -> Sample | Sequence[Sample]:
        if isinstance(place, slice):
            return [self[index] for index in range(*place.indices(len(self)))]
        number = self.numbers[place]
        prompt = completion = None
        if self._texts is not None:
            rows = self._texts[self._texts["sample"] == number]
            if "masked_sinks" in rows:
                rows = rows.sort_values("masked_sinks", kind="stable")
            if len(rows):
                prompt, completion = (
                    None if pd.isna(rows[key].iloc[0]) else str(rows[key].iloc[0]) for key in ("prompt", "completion")
                )
        return Sample(self._run, number, self._added, prompt, completion)

    def __iter__(self) -> Iterator[Sample]:
        return (self[place] for place in range(len(self)))


def checked(run: Run, name: str, columns: set[str], part: int | None = None) -> pd.DataFrame:
    """A table that has ``columns``; ValueError naming the missing ones otherwise."""
    frame = run.table(name, part)
    if missing := columns - set(frame.columns):
        raise ValueError(f"{run.path}: table {name} is not that of a study: it lacks {', '.join(sorted(missing))}.")
    return frame
