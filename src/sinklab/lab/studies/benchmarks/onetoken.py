"""Tables 1 to 5 of «One Token Is Enough», measured beside published."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from sinklab.lab.analysis import mean_over
from sinklab.lab.reports import Printed, as_shown, write_printed
from sinklab.lab.reports.training import FREE, OF_VARIANT, Training, variant
from sinklab.lab.studies import Row
from sinklab.lab.studies.benchmarks.tables import ONE_TOKEN, Benchmark, as_printed, found_in

TABLES = [{"number": number, **table} for number, table in enumerate(ONE_TOKEN["tables"], 1)]
"""Tables of the paper: number, title, start of its models ("autoregressive" or "scratch"),
benchmarks, and rows by the words for their models. A row is the name in the paper, the variant in
the words of `variant`, and percent right by benchmark.
"""
COLUMNS = ONE_TOKEN["columns"]
CELL: Row = dict.fromkeys(("value", "stderr", "low", "high"), math.nan)
CELL |= {"runs": 0, "samples": 0, "task": "", "metric": ""}
"""Percent right of a group of models that differ in their seed alone; these values if nothing was
measured. stderr: of one run, over its documents; low, high: of several, the 95 % interval over
runs, of fewer than 8 the range.
"""


def read_scores(
    benchmarks: Sequence[Benchmark], trainings: Sequence[Any], metric: str | None = None
) -> pd.DataFrame:
    """Scores of runs with nothing blocked, a row per model and column, by whichever of its tasks.

    Models are named by block (models that differ in variant and seed alone), start, variant and
    seed. The start is "autoregressive", "scratch", "retrofit" (the backbone was frozen), or
    "unknown" without the training run of the model that was scored, or of the one that this was
    fine-tuned from.
    """
    homes: dict[Path, Training] = {}
    if trainings:
        homes = {(one.run.path / "model").resolve(): one for one in as_shown(trainings, "training")}
    rows = []
    for bench in benchmarks:
        if not bench.is_diffusion or bench.k or bench.run.info.settings.get("edits"):
            continue
        sizes = [bench.model.get(name) for name in ("hidden_size", "layers", "heads")]
        words = f"{sizes[1]} layers of {sizes[0]}, trained elsewhere"
        about: Row = {"block": words, "key": json.dumps(sizes), "start": "unknown", "seed": 0}
        home = _base(str(bench.model.get("name")), homes)
        if home is not None:
            about = _described(home)
        about |= {"variant": variant(bench.model), "path": str(bench.run.path)}
        about["model"] = str([bench.model.get("name"), bench.model.get("weights_sha256")])
        for column, how in COLUMNS.items():
            for order, task in enumerate(how["tasks"]):
                score = bench.score(task, metric)
                if score is not None:
                    found = score[["task", "metric", "samples"]].to_dict()
                    found |= {"value": 100 * score["value"], "stderr": 100 * score["stderr"]}
                    rows.append(about | found | {"column": column, "order": order})
    if not rows:
        return pd.DataFrame(columns=["key"])
    return pd.DataFrame(rows)


def _base(model: str, homes: Mapping[Path, Training]) -> Training | None:
    """The run that made a model before fine-tuning."""
    home = homes.get(Path(model).resolve())
    if home is None or home.run.info.settings.get("pairs", "none") == "none":
        return home
    return _base(str(home.run.info.settings.get("init_from")), homes) or home


def _described(base: Training) -> Row:
    """Names of a model, by the settings that runs of its block share; the block is its origin, size
    and number of tokens read.
    """
    settings = base.run.info.settings
    model = settings.get("init_from")
    start, label = "scratch", "from scratch"
    if model:
        start = "autoregressive"
        label = f"from {Path(str(model)).parent.name or model}"
    if settings.get("train_only", "all") != "all":
        start = "retrofit"
    if settings.get("pairs", "none") != "none":
        start = "unknown"
    alike = {key: value for key, value in settings.items() if key not in FREE | OF_VARIANT}
    tokens = math.prod(int(settings.get(name) or 0) for name in ("steps", "batch", "length"))
    label += f", {base.run.info.model.get('parameters', 0):,} parameters, {tokens:,} tokens"
    key = json.dumps([start, alike], sort_keys=True)
    return {"block": label, "key": key, "start": start, "seed": base.run.info.seed}


def onetoken_numbers(scores: pd.DataFrame) -> pd.DataFrame:
    """One row per cell: of the paper, and of every block of models in `read_scores` that belongs to
    the table.

    Columns: table, block, source ("published" or "measured"), row, variant, column, and those of
    `CELL`.
    """
    rows: list[Row] = []
    for table in TABLES:
        names = {row[1]: row[0] for block in table["blocks"].values() for row in block}
        for models, printed in table["blocks"].items():
            about = {"table": table["number"], "block": models, "source": "published"}
            for name, of_variant, *values in printed:
                row = about | {"row": name, "variant": of_variant}
                for column, value in zip(table["benchmarks"], values, strict=True):
                    rows.append(row | {"column": column} | CELL | {"value": value})
        for _, mine in scores.groupby("key", sort=False):
            shared = len({*mine["variant"]} & names.keys())
            # the first two differ in how models began; the others take whatever has two of their
            # variants
            belongs = shared > 1
            if table["number"] <= 2:
                belongs = shared > 0 and mine["start"].iloc[0] == table["start"]
            if not belongs:
                continue
            about = {"table": table["number"], "block": mine["block"].iloc[0], "source": "measured"}
            for of_variant, name in names.items():
                for column in table["benchmarks"]:
                    own = mine[(mine["variant"] == of_variant) & (mine["column"] == column)]
                    row = {"row": name, "variant": of_variant, "column": column}
                    rows.append(about | row | CELL | _cell(own))
    return pd.DataFrame(rows)


def _cell(rows: pd.DataFrame) -> Row:
    """Summary of runs; if several tasks exist for a column, of the paper's own."""
    if rows.empty:
        return {}
    rows = rows[rows["order"] == rows["order"].min()]
    # a first try with a limit does not count beside the whole benchmark
    rows = rows[rows["samples"] == rows["samples"].max()]
    twice = rows[rows.duplicated("model", keep=False)]
    if len(twice):
        raise ValueError(
            f"one model was scored more than once on {twice['task'].iloc[0]}, in "
            f"{' and '.join(twice['path'])}, and is one run all the same: give one of them"
        )
    over = mean_over(rows["value"])
    found = {"value": over.value, "runs": len(rows)}
    found |= rows[["task", "metric", "samples"]].iloc[0].to_dict()
    if len(rows) == 1:
        return found | {"stderr": rows["stderr"].iloc[0]}
    return found | {"low": over.low, "high": over.high}


def onetoken_text(numbers: pd.DataFrame, table: int) -> pd.DataFrame:
    """A table as people read it: a row per variant and block, those of the paper first."""
    part = numbers[numbers["table"] == table]
    models = part["block"] + " (" + part["source"] + ")"
    return as_printed(part.assign(models=models, text=part.apply(_text, 1)), ["models", "row"])


def _text(cell: pd.Series) -> str:
    if pd.isna(cell["value"]):
        return "–"
    if not pd.isna(cell["low"]):
        return f"{cell['value']:.2f} ({cell['low']:.2f} to {cell['high']:.2f})"
    if not pd.isna(cell["stderr"]):
        return f"{cell['value']:.2f} ± {cell['stderr']:.2f}"
    return f"{cell['value']:.2f}"


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
    numbers = onetoken_numbers(read_scores(*found_in(folders), metric))
    notes = list(ONE_TOKEN["notes"])
    for column, how in COLUMNS.items():
        command = f"sinklab eval --tasks {how['tasks'][0]} {how['flags']}".strip()
        notes.append(f"{column} as published: `{command}`")
    written = []
    for table in TABLES:
        number = table["number"]
        laptop, published = ONE_TOKEN["recipes"][table["start"]]
        models = f"models: `sinklab train {laptop} --variant …` (as published: {published})"
        text, part = onetoken_text(numbers, number), numbers[numbers["table"] == number]
        title = f"One Token Is Enough, Table {number}: {table['title']}"
        stem = Path(out) / f"onetoken-{number}"
        written.append(write_printed(stem, title, text, part, [*notes, models]))
    return written
