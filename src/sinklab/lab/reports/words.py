"""Numbers, shares and tokens as text for sentences and tables."""

import math
import re
from collections.abc import Callable, Iterable
from importlib import resources
from typing import Any

import pandas as pd
from jinja2 import Environment, FunctionLoader, StrictUndefined

from sinklab.lab.analysis.estimates import Estimate
from sinklab.lab.analysis.sentences import percent as percent
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


def ranged(row: Any, name: str, form: Callable[[float], str]) -> str:
    """A number of a row of a table, `name`, with the 95 % interval `name_low` … `name_high` if it
    is known.
    """
    value, low, high = (form(row[f"{name}{end}"]) for end in ("", "_low", "_high"))
    if math.isnan(row[f"{name}_low"]):
        return value
    return f"{value} (95 % {low} … {high})"


def interval(estimate: Estimate) -> str:
    """The 95 % interval of a loss; empty if it is not known."""
    low, high = estimate.interval
    return "" if math.isnan(low) else f"{number(low, 4)} to {number(high, 4)}"


def quoted(label: str) -> str:
    """A token as text in a sentence."""
    if label == ADDED:
        return f"the {ADDED}"
    return label if label == MASK else printable(label)


def statements(
    package: str,
    filters: Iterable[Callable[..., Any]],
    tests: dict[str, Any] | None = None,
    *,
    file: str = "sentences.jinja",
    **known: Any,
) -> Callable[..., list[str]]:
    """Return a function that states the sentences of a package's sentences.jinja, or another
    ``file``, from the name of a statement and its subject; none if there is nothing to say. "¶"
    stands between sentences of a statement; white space is free.

    Args:
        filters: functions that the statements use, by their names.
        tests: and tests.
        known: and constants.
    """
    text = resources.files(package).joinpath(file).read_text("utf-8")
    # Plain text: a page escapes it.
    words = Environment(
        loader=FunctionLoader(lambda name: text),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    words.filters |= {each.__name__.lstrip("_"): each for each in (number, percent, *filters)}
    words.tests |= {"unknown": pd.isna} | (tests or {})
    words.globals |= known
    module = words.get_template(file).module

    def told(statement: str, *about: Any, **facts: Any) -> list[str]:
        said = getattr(module, statement)(*about, **facts)
        # not the spaces that do not break
        parts = [re.sub(r"[ \n]+", " ", part).strip(" ") for part in said.split("¶")]
        return [part for part in parts if part]

    return told
