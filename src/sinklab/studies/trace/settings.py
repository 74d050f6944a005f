"""What a study does: one frozen dataclass, written into its run folder."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, fields

from sinklab.sampling.settings import DecodingSettings

PROMPTS = (
    "It was a dark and stormy night, and",
    '"My dear sir," said the old man,',
    "The house stood at the end of a",
)
STATISTICS = (
    "received",
    "value_norm",
    "key_norm",
    "main_by_state",
    "row_entropy",
    "row_logsumexp",
    "output_norm",
    "noop_bound",
    "received_by_state",
)
"""What a study can record. Row statistics are kept as means over the queries of a state."""
ROW_STATISTICS = ("row_entropy", "row_logsumexp", "output_norm", "noop_bound")


@dataclass(frozen=True)
class StudySettings(DecodingSettings):
    """What a study writes, how, and what it watches and scores.

    Raises ValueError for unknown statistics and for numbers that make no sense with any model.
    """

    prompts: tuple[str, ...] = PROMPTS
    """Beginnings that the model continues, one sample each."""
    chat: bool = False
    """Put each prompt into the model's chat format; the tokens around it are marked as template."""
    new_tokens: int = 64
    """Tokens to write per sample."""
    block_length: int | None = 32
    """Semi-autoregressive blocks of this many tokens; None writes everything as one block."""
    seed: int | None = 0
    """Seed of all noise; each sample has its own, which follows from this one and its number."""
    statistics: tuple[str, ...] = STATISTICS[:-1]
    """What to record: received (always), value_norm, key_norm, main_by_state, row_entropy, row_logsumexp, output_norm,
    noop_bound, received_by_state, or all. Left out by default is received_by_state, three times as large as received.
    """
    layers: tuple[int, ...] = ()
    """Layers to record, -1 the last; all when left out."""
    heads: tuple[int, ...] = ()
    """Query heads to record; all when left out."""
    every: int = 1
    """Record every n-th step, beginning with the first."""
    only_steps: tuple[int, ...] = ()
    """Record these steps alone; all when left out."""
    maps: tuple[str, ...] = ()
    """Keep whole attention maps, query × key, of these "step:layer:head", e.g. 3:5:2."""
    edits: tuple[str, ...] = ()
    """Write under these interventions, e.g. mask_sinks:k=5 or window_attention:radius=16, in this order."""
    full_forward: bool = False
    """An autoregressive model runs the whole text at every step (column sums of the causal map) in place of the last
    token on top of its cache (the last row)."""
    truncate: bool = False
    """Also write each sample with the middle quarter of its positions hidden from half of the steps on."""
    mask_sinks: tuple[int, ...] = (5,)
    """Also write each sample with this many sinks of the previous step hidden (per layer and head), and keep the
    text.
    """
    ks: tuple[int, ...] = (0, 1, 5, 10)
    """Numbers of hidden sinks for the held-out loss."""
    heldout: str | None = None
    """Corpus for the held-out loss; None takes the excerpt inside the package, "" skips the loss."""
    heldout_rows: int = 48
    """Rows of held-out text."""
    heldout_length: int = 256
    """Tokens in a row of held-out text."""

    def __post_init__(self) -> None:
        super().__post_init__()
        names = STATISTICS if "all" in self.statistics else ("received", *self.statistics)
        for name in names:
            if name not in STATISTICS:
                near = difflib.get_close_matches(name, STATISTICS, n=1)
                hint = f"did you mean {near[0]}?" if near else "choose among them."
                raise ValueError(f"statistics of a study are {', '.join(STATISTICS)}, or all, got {name!r}; {hint}")
        object.__setattr__(self, "statistics", tuple(name for name in STATISTICS if name in names))
        for name in ("prompts", "layers", "heads", "only_steps", "maps", "edits", "mask_sinks", "ks"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.every < 1:
            raise ValueError(f"every counts steps, at least 1, got {self.every}; 1 records every step.")
        if wrong := [step for step in self.only_steps if step < 0]:
            raise ValueError(f"steps are counted from 0, got only_steps with {wrong[0]}.")
        if self.only_steps and self.every > 1:
            raise ValueError(f"every={self.every} and only_steps both choose the steps to record; give one of them.")
        self.map_places()

    def map_places(self) -> tuple[tuple[int, int, int], ...]:
        """`maps` as (step, layer, head). Raises ValueError for one that is not written as three numbers."""
        places = []
        for text in self.maps:
            if not re.fullmatch(r"\d+:-?\d+:\d+", text):
                raise ValueError(f"maps are written step:layer:head, such as 3:5:2, got {text!r}.")
            step, layer, head = map(int, text.split(":"))
            places.append((step, layer, head))
        return tuple(places)

    def records(self, step: int) -> bool:
        """Whether this step is recorded."""
        if any(step == place[0] for place in self.map_places()):
            return True
        return step % self.every == 0 and (not self.only_steps or step in self.only_steps)

    def changed(self, names: tuple[str, ...]) -> list[str]:
        """Those of these fields that do not have their defaults."""
        defaults = {field.name: field.default for field in fields(self)}
        return [name for name in names if getattr(self, name) != defaults[name]]
