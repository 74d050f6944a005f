"""Cost of an edit against the attention it removed: models at the same removed mass."""

# R rows of text, K doses
import math
from dataclasses import dataclass

import numpy as np

PHENOMENON = 0.05
"""A model has heavy sinks if one key holds more than 30 % of the attention in no smaller share of
its heads.
"""
MATCHED = 0.5
"""With fewer heads that have a control of equal mass, the comparison hardly describes the model."""


@dataclass(frozen=True)
class Doses:
    """Costs of rising doses of one edit for a model."""

    masses_K: np.ndarray
    """Share of attention that each dose really removed, mean over rows."""
    costs_RK: np.ndarray
    """Excess cost of each row under the edit, in any unit that the models share."""

    def at(self, mass: float) -> np.ndarray:
        """The cost (R,) at a mass between two doses, linear between them. NaN outside of the
        doses.
        """
        order = np.argsort(self.masses_K, kind="stable")
        masses_K, costs_RK = self.masses_K[order], self.costs_RK[:, order]
        return np.array(
            [np.interp(mass, masses_K, cost_K, math.nan, math.nan) for cost_K in costs_RK]
        )


def common_mass(one: Doses, other: Doses) -> float:
    """The greatest removed mass that the measured doses of both reach, never beyond the doses of
    either; NaN if there is none.

    Only doses that removed something count: between nothing and its first dose a model was not
    measured.
    """
    masses = [doses.masses_K[doses.masses_K > 0] for doses in (one, other)]
    if any(not len(some) for some in masses):
        return math.nan
    most = min(some.max() for some in masses)
    return float(most) if most >= max(some.min() for some in masses) else math.nan
