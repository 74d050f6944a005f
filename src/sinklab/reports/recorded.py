"""The arrays of one sample of a study run folder, on one scale, read when asked for."""

# T recorded steps, L recorded layers, H recorded heads, K keys (added sinks first, then canvas positions), S positions,
# G states of queries (masked, committed, prompt)
from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sinklab.records import STUDY_DIMS, Run
from sinklab.sinks import Excess, even_share, find_sinks, main_sink

RULE = Excess(3.0)


class NotRecorded(ValueError):
    """What was asked for needs something that the run did not record."""


@dataclass(frozen=True, eq=False)
class Recorded:
    """The attention of one prompt. Arrays are read on first use and live as long as the object; NaN where nothing is.

    Received attention and visible queries are scaled as if all positions had run as queries, so that an even share is
    1 at every step, under a cache and in a decoder that runs one query a step.
    """

    run: Run
    index: int
    """number of the sample, and of its parts in the folder"""
    added: int
    """added sink columns in front of the keys"""

    @cached_property
    def names(self) -> frozenset[str]:
        """Names of the recorded arrays; empty when no attention was recorded. ValueError for axes of another layout."""
        if "attention" not in self.run.array_files or self.index not in self.run.parts("attention"):
            return frozenset()
        dims = self.run.dims("attention", part=self.index)
        needed = {"received", "visible", "positions", "step_number"}
        wrong = [key for key, axes in STUDY_DIMS.items() if (key in dims or key in needed) and dims.get(key) != axes]
        if wrong:
            raise ValueError(
                f"{self.run.path / f'attention-{self.index:04d}.safetensors'} is not that of a study: {wrong[0]!r} has "
                f"axes {dims.get(wrong[0])}, expected {STUDY_DIMS[wrong[0]]}."
            )
        return frozenset(dims)

    def array(self, name: str) -> np.ndarray | None:
        """A recorded array in single precision (integers as they are), None when it was not recorded. Not kept."""
        if name not in self.names:
            return None
        array = self.run.array("attention", name, part=self.index)
        return array.astype(np.float32) if array.dtype.kind == "f" else array

    def _needed(self, name: str) -> np.ndarray:
        array = self.array(name)
        if array is None:
            raise NotRecorded(f"This needs recorded attention: {self.run.path} has none of sample {self.index}.")
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
    def visible_TK(self) -> np.ndarray:
        """Queries that see the key, as if all positions had run; 0 or NaN where the key is not there."""
        visible_TK = self._needed("visible")
        return even_share(visible_TK, visible_TK, self.positions_T)[0]

    @cached_property
    def received_TLHK(self) -> np.ndarray:
        """Received attention a_j, as if all positions had run: an even share is 1."""
        visible_TK, positions_T = self._needed("visible"), self.positions_T
        return even_share(self._needed("received"), visible_TK[:, None, None], positions_T[:, None, None])[0]

    @cached_property
    def exists_TK(self) -> np.ndarray:
        """Whether some query sees the key."""
        return np.nan_to_num(self.visible_TK) > 0

    @cached_property
    def share_TLHK(self) -> np.ndarray:
        """Mean weight that the queries which see a key give it; NaN where the key is not there."""
        visible_TK = np.where(self.exists_TK, self.visible_TK, np.nan)
        return self.received_TLHK / visible_TK[:, None, None]

    @cached_property
    def mean_share_TK(self) -> np.ndarray:
        """The same, mean over layers and heads."""
        return self.share_TLHK.mean((1, 2))

    @cached_property
    def sinks_TLHK(self) -> np.ndarray:
        """Which keys are sinks under Excess(3)."""
        return find_sinks(self.received_TLHK, RULE, self.visible_TK[:, None, None])

    @cached_property
    def events_TK(self) -> np.ndarray:
        """Number of (layer, head) pairs that have a sink at the key."""
        return self.sinks_TLHK.sum((1, 2))

    @cached_property
    def main_TLH(self) -> np.ndarray:
        """Key with the greatest share, -1 where nothing is there."""
        return main_sink(self.share_TLHK)

    @cached_property
    def value_norm_TLK(self) -> np.ndarray | None:
        """Length of value vectors, mean over heads."""
        return self.array("value_norm")

    @cached_property
    def key_norm_TLK(self) -> np.ndarray | None:
        """Length of key vectors, mean over heads."""
        return self.array("key_norm")

    @cached_property
    def main_by_state_TGLH(self) -> np.ndarray | None:
        """Main sink of the queries of one state; -1 where there are none."""
        return self.array("main_by_state")

    @cached_property
    def share_by_state_TGLH(self) -> np.ndarray | None:
        """Mean weight the queries of one state give to their main sink."""
        return self.array("share_by_state")

    @cached_property
    def row_entropy_TGLH(self) -> np.ndarray | None:
        """Entropy of attention rows in nats, mean over the queries of one state."""
        return self.array("row_entropy")

    @cached_property
    def output_norm_TGLH(self) -> np.ndarray | None:
        """Length of a head's output, mean over the queries of one state."""
        return self.array("output_norm")

    @cached_property
    def noop_bound_TGLH(self) -> np.ndarray | None:
        """Upper bound of that length (sink-token paper, Eq. 20), mean over the same queries."""
        return self.array("noop_bound")

    @cached_property
    def map_names(self) -> tuple[tuple[int, int, int], ...]:
        """(step, layer, head) of the exact attention maps that were kept."""
        if "maps" not in self.run.array_files or self.index not in self.run.parts("maps"):
            return ()
        named = [key.split("-") for key in self.run.dims("maps", part=self.index)]
        return tuple(sorted((int(t[4:]), int(layer[5:]), int(h[4:])) for t, layer, h in named))

    def map(self, step: int, layer: int, head: int) -> np.ndarray:
        """The attention map (query, key). Raises ValueError for one that was not kept, naming those there are."""
        if (step, layer, head) not in self.map_names:
            kept = ", ".join(map(str, self.map_names)) or "none"
            raise NotRecorded(
                f"{self.run.path} has no map of (step, layer, head) {(step, layer, head)} of sample {self.index}: it "
                f"has {kept}. Ask for maps when tracing: `sinklab trace --maps {step}:{layer}:{head}`."
            )
        return self.run.array("maps", f"step{step}-layer{layer}-head{head}", part=self.index).astype(np.float32)
