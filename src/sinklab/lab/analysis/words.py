"""Controls, shares, losses and counts as people read them."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from sinklab.lab.analysis.estimates import mean_over

CONTROLS = {"permuted": "shuffled weights", "initialised": "fresh weights"}
"""Controls as run folders name them -> as people read them; the first that was run is the one of a
sentence.
"""


def beside(texts: Mapping[str, str], own: Any = (), theirs: Mapping[str, Any] | None = None) -> str:
    """Numbers of the controls, written behind that of the model: «shuffled weights 6.3 %, fresh
    weights 2.6 %».

    Args:
        texts: the number of each control as it is written, by the control's name in a run folder;
            empty for none.
        own: (S,) the numbers of the model's samples; a control that is not distinguishable (the
            95 % interval of the paired difference holds 0) is marked «not distinguishable».
        theirs: (S,) those of each control.
    """
    said = []
    for kind in CONTROLS:
        if not texts.get(kind):
            continue
        words = f"{CONTROLS[kind]} {texts[kind]}"
        others = (theirs or {}).get(kind, ())
        if np.size(own) and np.shape(own) == np.shape(others):
            difference = mean_over(np.subtract(own, others))
            if difference.is_interval and difference.above() is None:
                words += " (not distinguishable)"
        said.append(words)
    return ", ".join(said)


def percent(share: float) -> str:
    """A share as a percentage with one decimal."""
    if math.isnan(share):
        return "–"
    return f"{100 * share:.1f}\u00a0%".replace("-", "−")


def whole(share: float) -> str:
    """A share as a whole percentage."""
    return f"{100 * share:.0f}\u00a0%"


def nats(value: float, sign: str = "+") -> str:
    """A loss or its change with two decimals."""
    return f"{value:{sign}.2f}".replace("-", "−")


def counted(number: int, noun: str) -> str:
    """A number of things: «1 sample», «2 samples»."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
