"""Tables of text as files, Markdown, LaTeX and CSV, and the figure beside one."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd

from sinklab.lab.records.storage import write_text
from sinklab.lab.reports.drawing import write_csv

_SIGNS = {"±": r"$\pm$", "−": "$-$", "–": "--", "…": r"\ldots{}", "×": r"$\times$", "\u00a0": "~"}
"""letters that LaTeX writes its own way"""


def markdown(table: pd.DataFrame) -> str:
    """A table as GitHub Markdown, numbers with four digits."""
    rows = [table.columns, *table.itertuples(index=False)]
    lines = ["| " + " | ".join(map(_cell, row)) + " |" for row in rows]
    lines.insert(1, "|" + " --- |" * len(table.columns))
    return "\n".join(lines) + "\n"


def shown(value: object) -> str:
    """A number with four digits, anything else as text, what is missing as a dash."""
    if value is None or value is pd.NA or value != value:
        return "–"
    return f"{value:.4g}" if isinstance(value, float | np.floating) else str(value)


def _cell(value: object) -> str:
    text = (
        shown(value).replace("\\", "\\\\").replace("|", "\\|").replace("\r", "").replace("\n", "↵")
    )
    # a token's own spaces at its ends would not be seen
    body = text.strip(" ")
    lead = len(text) - len(text.lstrip(" "))
    return "␣" * lead + body + "␣" * (len(text) - lead - len(body))


def latex(table: pd.DataFrame, caption: str) -> str:
    """A table as LaTeX with booktabs, every cell as it stands, special characters escaped."""
    named = re.sub(r"([&%$#_{}])", r"\\\1", caption)
    text = table.astype(str).to_latex(index=False, escape=True, caption=named)
    for sign, written in _SIGNS.items():
        text = text.replace(sign, written)
    return text


@dataclass(frozen=True, eq=False)
class Printed:
    """A table as people read it, the sentences below it, and the files it was written to."""

    title: str
    text: pd.DataFrame
    notes: tuple[str, ...]
    paths: tuple[Path, ...]
    beside: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    """Tables that stand below it, by their titles."""


def write_printed(
    stem: Path,
    title: str,
    text: pd.DataFrame,
    numbers: pd.DataFrame,
    notes: Sequence[str] = (),
    beside: Mapping[str, pd.DataFrame] | None = None,
) -> Printed:
    """Write STEM.md and STEM.tex of the table as people read it and of those beside it, and
    STEM.csv of its numbers.
    """
    stem.parent.mkdir(parents=True, exist_ok=True)
    more = beside or {}
    whole = f"# {title}\n\n{markdown(text)}\n"
    for name, table in more.items():
        whole += f"## {name}\n\n{markdown(table)}\n"
    whole += "".join(f"- {note}\n" for note in notes)
    tables = "\n".join([latex(text, title), *(latex(table, name) for name, table in more.items())])
    paths = tuple(stem.with_name(f"{stem.name}.{suffix}") for suffix in ("md", "tex", "csv"))
    write_text(paths[0], whole)
    write_text(paths[1], tables)
    write_csv(paths[2], numbers)
    return Printed(title, text, tuple(notes), paths, more)


def write_page(path: Path, table: pd.DataFrame, sentences: Iterable[str], more: str = "") -> Path:
    """Write a Markdown page: a table, the text below it, and sentences. Returns its path."""
    text = f"{markdown(table)}{more}\n" + "".join(f"- {line}\n" for line in sentences)
    write_text(path, text)
    return path
