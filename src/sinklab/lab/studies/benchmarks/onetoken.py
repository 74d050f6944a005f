"""Tables 1 to 5 of «One Token Is Enough», measured beside published, and the commands that fill
missing cells.
"""

from __future__ import annotations

import json
import math
import shlex
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd

from sinklab.lab.analysis import mean_over
from sinklab.lab.reports import Printed, as_trainings, write_printed
from sinklab.lab.reports.training import FREE, Training, variant
from sinklab.lab.studies import Row
from sinklab.lab.studies.benchmarks.tables import ONE_TOKEN, Benchmark, found_in
from sinklab.lab.training import VARIANTS as TRAINED

Table = dict[str, Any]
"""One table of the paper: number, title, start of its models ("autoregressive" or "scratch"),
benchmarks, and rows by the words for their models. A row is the name in the paper, the variant in
the words of `variant`, and percent right by benchmark.
"""
TABLES = [{"number": number, **table} for number, table in enumerate(ONE_TOKEN["tables"], 1)]
COLUMNS = ONE_TOKEN["columns"]
RECIPES = ONE_TOKEN["recipes"]
VARIANTS = {variant(model): name for name, model in TRAINED.items()}
"""Variant in words -> its name in `sinklab train --variant`."""
LOSS = "held-out loss"
LESS = "loss less the first row's"
SHARE = "attention on the sinks, %"
RUNS_ONLY = (LOSS, LESS, SHARE)
# Settings that make a variant, or follow from it: runs of one experiment may differ in these.
_OF_VARIANT = frozenset(
    {"sink_kind", "sink_count", "sink_side", "gate", "gate_bias", "init_from", "reproduce"}
)


CELL: Row = dict.fromkeys(("value", "stderr", "low", "high"), math.nan) | {
    "runs": 0,
    "samples": 0,
}
CELL |= {"task": "", "metric": "", "command": ""}
"""A number of a group of runs that differ in their seed alone; these values if nothing was
measured. stderr: of one run, over its rows or documents; low, high: of several, the 95 % interval
over runs, of fewer than 6 the range.
"""


@dataclass(eq=False)
class Repeats:
    """The runs of one variant, which differ in their seed alone."""

    trainings: list[Training] = field(default_factory=list)
    tuned: list[Training] = field(default_factory=list)
    """Runs that fine-tuned one of them on questions."""
    benchmarks: list[Benchmark] = field(default_factory=list)

    def cell(self, column: str, first: Repeats, metric: str | None = None) -> Row:
        """A column of a table, mean over the runs, as in `CELL`, empty without runs; `first` are
        the table's first row.

        Held-out loss in nats per token. Loss less that of the first row with the same seed, paired
        by row of text. Share of attention on the added sinks at the last look of the monitor, in
        percent.
        """
        if column in COLUMNS:
            return self._score(column, metric)
        theirs = {one.run.info.seed: one for one in first.trainings if first is not self}
        return _mean(
            [_measured(one, column, theirs.get(one.run.info.seed)) for one in self.trainings]
        )

    def _score(self, column: str, metric: str | None) -> Row:
        """A benchmark in percent; if several tasks exist for it, the paper's own."""
        plain = [
            one for one in self.benchmarks if one.k == 0 and not one.run.info.settings.get("edits")
        ]
        for task in COLUMNS[column]["tasks"]:
            scores = [one.score(task, metric) for one in plain if task in one.tasks]
            if scores:
                rows = pd.DataFrame(scores)
                # a first try with a limit does not count beside the whole benchmark
                rows = rows[rows["samples"] == rows["samples"].max()]
                about = rows[["task", "metric", "samples"]].iloc[0].to_dict()
                return _mean(100 * rows[["value", "stderr"]].to_numpy(float)) | about
        return {}

    @property
    def model(self) -> str | None:
        """Folder or name of the first model."""
        if self.trainings:
            return str(self.trainings[0].run.path / "model")
        if self.benchmarks:
            return str(self.benchmarks[0].model.get("name"))
        return None


@dataclass(eq=False)
class Experiment:
    """Models that differ in their variant and their seed alone: a block of a table."""

    start: str
    """"autoregressive", "scratch", "retrofit" (the backbone was frozen), or "unknown" without the
    training run.
    """
    label: str
    variants: defaultdict[str, Repeats] = field(default_factory=lambda: defaultdict(Repeats))


def experiments(benchmarks: Sequence[Benchmark], trainings: Sequence[Any]) -> list[Experiment]:
    """The runs as blocks, by how they were trained; benchmarks join the training run of the model
    that they scored.
    """
    runs = []
    if trainings:
        runs = as_trainings(trainings)
    models = {(one.run.path / "model").resolve(): one for one in runs}
    # by the very weights, if the folder was moved since
    by_weights: dict[str, Training] = {}
    for folder, one in models.items():
        file = folder / "weights.sha256"
        if file.is_file():
            by_weights.setdefault(file.read_text().strip(), one)
    blocks: dict[str, Experiment] = {}

    def repeats(about: tuple[str, str, str], name: str) -> Repeats:
        key, start, label = about
        return blocks.setdefault(key, Experiment(start, label)).variants[name]

    for one in runs:
        if one.run.info.settings.get("objective") != "autoregressive":
            own = repeats(_described(_base(one, models)), one.variant)
            if _is_tuned(one):
                own.tuned.append(one)
            else:
                own.trainings.append(one)
    for bench in benchmarks:
        if not bench.is_diffusion:
            continue
        model = bench.model
        home = models.get(Path(str(model.get("name"))).resolve())
        home = home or by_weights.get(str(model.get("weights_sha256")))
        if home is not None:
            about = _described(_base(home, models))
        else:
            sizes = [model.get(name) for name in ("hidden_size", "layers", "heads")]
            words = f"{sizes[1]} layers of {sizes[0]}, trained elsewhere"
            about = json.dumps(["unknown", sizes]), "unknown", words
        repeats(about, variant(model)).benchmarks.append(bench)
    return list(blocks.values())


def _is_tuned(one: Training) -> bool:
    return one.run.info.settings.get("pairs", "none") != "none"


def _base(one: Training, homes: dict[Path, Training]) -> Training:
    """The run that made the model before fine-tuning; the run itself if it was not fine-tuned, or
    that run is not there.
    """
    if not _is_tuned(one):
        return one
    before = homes.get(Path(str(one.run.info.settings.get("init_from"))).resolve())
    if before is None or before is one:
        return one
    return _base(before, homes)


def _described(base: Training) -> tuple[str, str, str]:
    """Key of an experiment, from the settings that its runs share; its start; its label in words:
    origin, size and number of tokens read.
    """
    settings = base.run.info.settings
    model = settings.get("init_from")
    start = "scratch"
    label = "from scratch"
    if model:
        start = "autoregressive"
        label = f"from {Path(str(model)).parent.name or model}"
    if settings.get("train_only", "all") != "all":
        start = "retrofit"
    if _is_tuned(base):
        start = "unknown"
    alike = {key: value for key, value in settings.items() if key not in FREE | _OF_VARIANT}
    size = base.run.info.model.get("parameters")
    if size:
        label += f", {_short(size)} parameters"
    tokens = math.prod(int(settings.get(name) or 0) for name in ("steps", "batch", "length"))
    if tokens:
        label += f", {_short(tokens)} tokens"
    return json.dumps([start, alike], sort_keys=True), start, label


def _short(count: float) -> str:
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g}{letter}"
    return str(count)


def _measured(one: Training, column: str, other: Training | None) -> tuple[float, float]:
    """A number of a run with its standard error over rows of text, NaN if they are not known.

    Args:
        other: the run with the same seed that a loss is less than.
    """
    error = math.nan
    if column == LOSS and one.loss is not None:
        if one.heldout_rows is not None:
            error = float(one.heldout_rows["loss"].sem())
        return one.loss.value, error
    if column == SHARE and one.sink_count:
        looks = one.over("step")
        if len(looks):
            return 100 * float(looks.iloc[-1]["added_share"]), error
    if column == LESS and other is not None:
        rows = one.apart(other)
        if rows is not None:
            return rows.mean(), rows.std(ddof=1) / math.sqrt(len(rows))
    return math.nan, error


def _mean(runs: Any) -> Row:
    """Summary of runs, (value, standard error) each: one as it is; the mean of several, with the
    interval over them. Empty if no value is known.
    """
    known = [(value, error) for value, error in runs if not math.isnan(value)]
    if not known:
        return {}
    over = mean_over([value for value, _ in known])
    found = {"value": over.value, "runs": len(known)}
    if len(known) == 1:
        return found | {"stderr": float(known[0][1])}
    return found | {"low": over.low, "high": over.high}


def onetoken_numbers(blocks: Sequence[Experiment], *, metric: str | None = None) -> pd.DataFrame:
    """One row per cell: of the paper, and of every block of runs that belongs to the table.

    Columns: table, block, source ("published" or "measured"), row, variant, column, value, stderr,
    low, high, runs, samples, task, metric (`CELL`); and command, which would fill a cell that is
    missing (its value is NaN).
    """
    rows = []
    for table in TABLES:
        for models, printed in table["blocks"].items():
            about = {"table": table["number"], "block": models, "source": "published"}
            for name, of_variant, *scores in printed:
                row = about | {"row": name, "variant": of_variant}
                for column, score in zip(table["benchmarks"], scores, strict=True):
                    rows.append(row | {"column": column} | CELL | {"value": score})
    for table, block in product(TABLES, blocks):
        variants = _variants(table)
        shared = len(block.variants.keys() & variants.keys())
        # the first two differ in how models began; the others take whatever has two of their
        # variants
        belongs = shared > 1
        if table["number"] <= 2:
            belongs = shared > 0 and block.start == table["start"]
        if not belongs:
            continue
        first = block.variants.get(next(iter(variants)), Repeats())
        about = {"table": table["number"], "block": block.label, "source": "measured"}
        columns = (*table["benchmarks"], *RUNS_ONLY)
        for (of_variant, name), column in product(variants.items(), columns):
            repeats = block.variants.get(of_variant, Repeats())
            cell = repeats.cell(column, first, metric)
            cell = cell or {"command": _command(table, repeats, of_variant, column)}
            row = {"row": name, "variant": of_variant, "column": column}
            rows.append(about | row | CELL | cell)
    return pd.DataFrame(rows)


def _variants(table: Table) -> dict[str, str]:
    """Names of a table's rows by their variants."""
    return {row[1]: row[0] for rows in table["blocks"].values() for row in rows}


def _command(table: Table, repeats: Repeats, of_variant: str, column: str) -> str:
    """Command that fills a missing cell; empty if none does."""
    word = VARIANTS.get(of_variant, of_variant)
    if repeats.model is None:
        laptop, published = RECIPES[table["start"]]
        return f"sinklab train {laptop} --variant {word}   (as published: {published})"
    model = shlex.quote(str(repeats.model))
    if column in RUNS_ONLY:
        if column == LOSS:
            return f"sinklab curve --model {model}"
        if column == SHARE and of_variant not in ("plain", "gate"):
            return "train with --monitor-every"
        return ""
    flags = COLUMNS[column]["flags"]
    how = "two-stage"
    if flags:
        noise = "smdm" if "smdm" in flags else "chain"
        how = f"{noise}-{flags.split()[-1]}"
    if column == "GSM8K":
        if not repeats.tuned:
            return f"sinklab train sft-gsm8k --init-from {model} --corpus gsm8k_aug/train.txt"
        model = shlex.quote(str(repeats.tuned[0].run.path / "model"))
    where = f"--data benchmarks --out runs/onetoken/{word.replace(' ', '-')}-{how}"
    task = COLUMNS[column]["tasks"][0]
    return " ".join(f"sinklab eval --model {model} --tasks {task} {flags} {where}".split())


def onetoken_text(numbers: pd.DataFrame, table: int) -> pd.DataFrame:
    """A table as people read it: a row per variant and block, those of the paper first; – is
    missing.
    """
    rows = []
    part = numbers[numbers["table"] == table]
    for (source, block, name), cells in part.groupby(["source", "block", "row"], sort=False):
        shown = {cell["column"]: _text(cell) for _, cell in cells.iterrows()}
        row = {"models": f"{block} ({source})", "row": name, **shown}
        if source == "measured":
            row["runs"] = str(int(cells["runs"].max()))
        rows.append(row)
    text = pd.DataFrame(rows).fillna("")
    # only runs have these
    empty = [name for name in RUNS_ONLY if name in text and not text[name].str.strip("–").any()]
    return text.drop(columns=empty)


def _text(cell: pd.Series) -> str:
    if pd.isna(cell["value"]):
        return "–"
    form = {LOSS: ".4f", LESS: "+.4f"}.get(cell["column"], ".2f")
    text = f"{cell['value']:{form}}"
    if not pd.isna(cell["low"]):
        text += f" ({cell['low']:{form}} to {cell['high']:{form}})"
    elif not pd.isna(cell["stderr"]):
        text += f" ± {cell['stderr']:{form.removeprefix('+')}}"
    return text.replace("-", "−")


def missing_commands(numbers: pd.DataFrame, table: int) -> list[str]:
    """The commands that fill the cells of a table that are missing; benchmarks with the same
    settings in one.
    """
    part = numbers[(numbers["table"] == table) & (numbers["command"] != "")]
    alike = part["command"].str.replace(r"--tasks \S+", "--tasks …", regex=True)
    tasks = part["command"].str.extract(r"--tasks (\S+)")[0]
    groups = tasks.groupby(alike, sort=False)
    return [
        str(command).replace("…", ",".join(of_command.dropna().unique()))
        for command, of_command in groups
    ]


def write_onetoken(
    folders: Iterable[str | Path], out: str | Path, *, metric: str | None = None
) -> list[Printed]:
    """Read the run folders at or below `folders` and write onetoken-1 … onetoken-5 as .md, .tex and
    .csv.

    Args:
        folders: of training runs and of benchmark runs; a benchmark is matched with the training
            run of the model that it scored.
        out: folder to write into.
        metric: of lm-eval to show if a task has it, e.g. acc_norm; acc when left out.

    Raises:
        ValueError: for folders without any such run.
    """
    found = found_in(folders)
    numbers = onetoken_numbers(experiments(found.benchmarks, found.trainings), metric=metric)
    written = []
    for table in TABLES:
        number = table["number"]
        part = numbers[numbers["table"] == number]
        commands = missing_commands(numbers, number)
        notes = [*ONE_TOKEN["notes"], *(f"missing: `{command}`" for command in commands)]
        if "measured" not in set(part["source"]):
            laptop, published = RECIPES[table["start"]]
            variants = ", ".join(VARIANTS.get(name, name) for name in sorted(_variants(table)))
            notes.append(
                f"no run of these folders belongs here: `sinklab train {laptop}` with the variants "
                f"{variants} (as published: {published})"
            )
        notes += [f"not finished, so left out: {path}" for path in found.unfinished]
        text = onetoken_text(numbers, number)
        title = f"One Token Is Enough, Table {number}: {table['title']}"
        written.append(write_printed(Path(out) / f"onetoken-{number}", title, text, part, notes))
    return written
