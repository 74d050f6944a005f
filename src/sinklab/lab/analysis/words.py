"""Controls, shares, losses and counts as people read them."""

import math
from collections.abc import Mapping

CONTROLS = {"permuted": "shuffled weights", "initialised": "fresh weights"}
"""Controls as run folders name them -> as people read them; the first that was run is the one of a
sentence.
"""


def beside(texts: Mapping[str, str]) -> str:
    """Numbers of the controls, by their names in a run folder, as they stand behind that of the
    model: «shuffled weights 6.3 %, fresh weights 2.6 %».
    """
    return ", ".join(
        f"{words} {texts[kind]}" for kind, words in CONTROLS.items() if texts.get(kind)
    )


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
