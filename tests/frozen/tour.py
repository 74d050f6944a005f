"""The texts that the models of `sinklab tour` wrote, the tables behind its page, and the means of
its run folders; what the page makes of tables is held in tests/reports.

Of a table of more than 100 rows the means are kept, by run, statistic, layer and state.

The tour is not taken here, for a minute is too long: what is read is the folder that it left, named
by $SINKLAB_TOUR. Without it there are no cells, but for make.py, which takes the tour.
"""

import os
import re
import sys
import tempfile
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import sinklab
from frozen import Cells

TOLERANCE = 1e-4
"""weights of float32, and attention that is kept in float16"""
RUNS = ("plain", "sink", "causal")
NUMBER = re.compile(r"(?<![\w.])[+−-]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[+−-]?\d+)?(?:\s?%)?")
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
