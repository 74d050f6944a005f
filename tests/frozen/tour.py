"""Every number on the page of `sinklab tour`, by heading and in order, the texts that its models
wrote, and the tables behind the page.

`numbers/HEADING` is a text a line, with the numbers that this line of the page prints. One that is
rounded, to a percentage or to decimals, may differ by one unit of its last digit: it then counts as
the frozen one. `words/HEADING` are the lines themselves: they are not compared, and are there to
find where a number went when the page is laid out anew. Left out are the axes of the figures and
what the explorer draws, which the tables have. Of a table of more than 100 rows the means are kept,
by run, statistic, layer and state.

The tour is not taken here, for a minute is too long: what is read is the folder that it left, named
by $SINKLAB_TOUR. Without it there are no cells, but for make.py, which takes the tour.
"""

import os
import re
import sys
import tempfile
from contextlib import redirect_stdout
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import frozen
import sinklab
from frozen import Cells

TOLERANCE = 1e-4
"""weights of float32, and attention that is kept in float16"""
EXCEPTED = {"words/": "prose, kept to find numbers again"}
RUNS = ("plain", "sink", "causal")
ENDS = {"p", "li", "tr", "small", "summary", "article", "section", "header"}
"""tags at whose beginning and end a line ends"""
HEADINGS = ("h1", "h2", "h3")
UNREAD = ("head", "script", "style", "svg", "footer")
NUMBER = re.compile(r"(?<![\w.])[+−-]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[+−-]?\d+)?(?:\s?%)?")
OF_THE_DAY = ("created", "versions", "weights_sha256")
"""beginnings of lines that say when and with what a run was made"""
LONG = 100
GROUPED = ("run", "statistic", "layer", "state")
PRINTED = ("sentence", "controls")
"""columns of text that the page has too"""


def cells(run_it: bool = Path(sys.argv[0]).name == "make.py") -> Cells:
    """The cells of a tour that was taken, or that is taken here if `run_it`."""
    given = os.environ.get("SINKLAB_TOUR")
    if given:
        yield from of_folder(Path(given))
    elif run_it:
        with tempfile.TemporaryDirectory() as folder:
            take_tour(Path(folder) / "tour")
            yield from of_folder(Path(folder) / "tour")


def take_tour(out: Path) -> None:
    """Take the tour: the one place to adapt to another command."""
    from sinklab.lab.cli import main

    with redirect_stdout(StringIO()):
        assert main(["tour", "--out", str(out)]) == 0


def of_folder(folder: Path) -> Cells:
    """The cells of the folder that a tour left."""
    page = Page()
    page.feed((folder / "report" / "report.html").read_text("utf-8"))
    kept = frozen.read("tour")
    for heading, lines in page.lines.items():
        told = [line for line in lines if NUMBER.search(line) and not line.startswith(OF_THE_DAY)]
        if told:
            name = f"numbers/{heading}"
            yield name, settled(kept.get(name, []), [*map(numbers_of, told)])
            yield f"words/{heading}", told
    tables = (folder / "report" / "tables").glob("*.csv")
    for path in sorted([*tables, folder / "masking" / "masking_curve.csv"]):
        yield f"tables/{path.stem}", table_of(pd.read_csv(path))
    for name in RUNS:
        yield from of_run(name, folder / name)


def of_run(name: str, folder: Path) -> Cells:
    """The texts of a run folder, and the means of its other tables and of its arrays."""
    run = sinklab.open_run(folder)
    yield f"texts/{name}", run.texts
    for one in run.tables:
        if one not in ("generations", "twins"):
            # two activations that are nearly equal change ranks with the kernels of a machine
            table = run.table(one).drop(columns="rank", errors="ignore")
            yield f"runs/{name}/{one}", means_of(table)
    for one in run.array_files:
        samples = [run.arrays(one, sample) for sample in run.samples]
        means = {key: [finite_mean(sample[key]) for sample in samples] for key in samples[0]}
        yield f"runs/{name}/{one}", means


def finite_mean(numbers: np.ndarray) -> float:
    """The mean of the finite numbers, NaN without any."""
    known = numbers[np.isfinite(numbers)]
    return float(known.mean()) if known.size else float("nan")


class Page(HTMLParser):
    """Lines of text of a page by heading; a second heading of the same words has a number."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[str, list[str]] = {}
        self._part = self._heading = "beginning"
        self._open: list[str] = []
        self._text = ""

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        if tag in UNREAD:
            self._open.append(tag)
        if tag in ENDS or tag in HEADINGS:
            self._end_line()
        if tag in ("td", "th"):
            self._text += " "

    def handle_endtag(self, tag: str) -> None:
        if self._open and tag == self._open[-1]:
            self._open.pop()
        if tag in HEADINGS:
            self._begin(tag, " ".join(self._text.split()))
        elif tag in ENDS:
            self._end_line()

    def handle_data(self, data: str) -> None:
        if not self._open:
            self._text += data

    def _begin(self, tag: str, heading: str) -> None:
        if tag == "h3":
            heading = f"{self._part}, {heading}"
        else:
            self._part = heading
        self._text, self._heading, count = "", heading, 1
        while self._heading in self.lines:
            count += 1
            self._heading = f"{heading} ({count})"
        self.lines[self._heading] = []

    def _end_line(self) -> None:
        line, self._text = " ".join(self._text.split()), ""
        if line:
            self.lines.setdefault(self._heading, []).append(line)


def numbers_of(line: str) -> str:
    """The numbers of a line as they are printed; a percentage with its sign."""
    return " ".join(re.sub(r"\s", "", number) for number in NUMBER.findall(line))


def settled(old: list[str], new: list[str]) -> list[str]:
    """The new lines, with the frozen number in place of each that is as good as equal to it."""
    if len(old) != len(new):
        return new
    lines = []
    for before, now in zip(old, new, strict=True):
        pairs = [*zip(before.split(), now.split(), strict=False)]
        is_long = len(before.split()) != len(now.split())
        agreed = [one if is_alike(one, other) else other for one, other in pairs]
        lines.append(now if is_long else " ".join(agreed))
    return lines


def is_alike(one: str, other: str) -> bool:
    """Whether two printed numbers differ by at most one unit of a last digit that was rounded."""
    is_rounded = "%" in one or "." in one
    (value, places), (new, new_places) = map(read, (one, other))
    is_same_form = places == new_places and one.endswith("%") == other.endswith("%")
    return is_rounded and is_same_form and abs(value - new) < 1.5 * 10.0**-places


def read(number: str) -> tuple[float, int]:
    """The value of a printed number, and its decimals."""
    digits = number.rstrip("%").replace(",", "").replace("−", "-")
    return float(digits), len(digits.partition(".")[2])


def table_of(frame: pd.DataFrame) -> dict[str, Any]:
    """The columns of a table; of a long one the means."""
    if len(frame) > LONG:
        return means_of(frame)
    columns = {name: frame[name].tolist() for name in frame if name not in PRINTED}
    if "estimate" in columns:
        # a record as text, whose last digits may differ
        columns["estimate"] = [
            [float(number) for number in NUMBER.findall(str(text))] for text in columns["estimate"]
        ]
    return columns


def means_of(frame: pd.DataFrame) -> dict[str, Any]:
    """The number of rows, and the mean of every column of numbers, by groups."""
    by = [name for name in GROUPED if name in frame]
    numbers = frame.select_dtypes(["number", "bool"]).columns.difference(["sample", "seed", *by])
    found = {}
    for key, rows in frame.groupby(by or (lambda row: "all"), sort=False):
        means = rows[numbers].astype(float).mean().to_dict()
        found[" ".join(map(str, np.atleast_1d(key)))] = {"rows": len(rows)} | means
    return found
