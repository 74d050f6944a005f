"""Numbers, shares and tokens as text for sentences and tables."""

import math

from sinklab.lab.analysis.words import percent as percent
from sinklab.lab.reports.samples import ADDED, MASK
from sinklab.lab.reports.style import printable


def number(value: float, significant: int = 3) -> str:
    """A few significant digits, without an exponent if that reads well."""
    if math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        digits = 0
        if value:
            digits = max(0, significant - 1 - math.floor(math.log10(abs(value))))
        return f"{value:.{digits}f}".replace("-", "−")
    return f"{value:.{significant - 1}e}".replace("-", "−")


def signed(value: float, digits: int = 3) -> str:
    """A number with its sign and so many decimals."""
    if math.isnan(value):
        return "–"
    return f"{value:+.{digits}f}".replace("-", "−")


def quoted(label: str) -> str:
    """A token as text in a sentence."""
    if label == ADDED:
        return f"the {ADDED}"
    return label if label == MASK else printable(label)
