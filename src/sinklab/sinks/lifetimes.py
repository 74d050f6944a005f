"""How long keys stay sinks: births, deaths and runs, counted step by step."""

# L layers, H heads, K keys
from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass
class Lifetimes:
    """Counts over one sample, filled by ``add`` in the order of the steps. Working memory: two slabs."""

    births: np.ndarray = field(init=False)
    """(layer, head) keys that became sinks, those of the first step apart"""
    deaths: np.ndarray = field(init=False)
    """(layer, head) sinks that stopped being one at the next step"""
    finished: np.ndarray = field(init=False)
    """(layer, head) steps that the sinks of ``deaths`` had lasted"""
    at_risk: np.ndarray = field(init=False)
    """(layer, head) sinks that had a next step at which they could stop"""
    age: np.ndarray | None = field(init=False, default=None)
    """(layer, head, key) steps that the key has been a sink without a break"""
    alive: np.ndarray = field(init=False)
    """(layer, head) whether the step before existed"""

    def add(self, sinks_LHK: np.ndarray, exists_LH: np.ndarray) -> None:
        """One step: which keys are sinks, and for which heads the step exists. A missing step ends the watch."""
        if self.age is None:
            self.births, self.deaths, self.finished, self.at_risk = np.zeros((4, *exists_LH.shape), dtype=np.int64)
            self.age = np.zeros(sinks_LHK.shape, dtype=np.int32)
            self.alive = np.zeros(exists_LH.shape, dtype=bool)
        pair_LH = self.alive & exists_LH
        before_LHK = self.age > 0
        ended_LHK = before_LHK & ~sinks_LHK
        self.births += np.where(pair_LH, (sinks_LHK & ~before_LHK).sum(-1), 0)
        self.deaths += np.where(pair_LH, ended_LHK.sum(-1), 0)
        self.finished += np.where(pair_LH, np.where(ended_LHK, self.age, 0).sum(-1), 0)
        self.at_risk += np.where(pair_LH, before_LHK.sum(-1), 0)
        self.age = np.where(sinks_LHK, self.age + 1, 0)
        self.alive = exists_LH

    @property
    def lasting(self) -> np.ndarray:
        """(layer, head) sinks still there at the last step: their whole lives are not known."""
        assert self.age is not None
        return (self.age > 0).sum(-1)
