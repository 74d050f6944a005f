"""Tables 1 to 5 of «One Token Is Enough», measured beside published."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from sinklab.lab.analysis import mean_over
from sinklab.lab.analysis.differences import effects
from sinklab.lab.reports import Printed, as_trainings, write_printed
from sinklab.lab.reports.training import FREE, Training, variant
from sinklab.lab.studies import Row
from sinklab.lab.studies.benchmarks.tables import ONE_TOKEN, Benchmark, found_in

TABLES = [{"number": number, **table} for number, table in enumerate(ONE_TOKEN["tables"], 1)]
"""Tables of the paper: number, title, start of its models ("autoregressive" or "scratch"),
benchmarks, and rows by the words for their models. A row is the name in the paper, the variant in
the words of `variant`, and percent right by benchmark.
"""
COLUMNS = ONE_TOKEN["columns"]
LOSS = "held-out loss"
LESS = "loss less the first row's"
SHARE = "attention on the sinks, %"
RUNS_ONLY = (LOSS, LESS, SHARE)
# Settings that make a variant, or follow from it: runs of one experiment may differ in these.
_OF_VARIANT = frozenset(
    {"sink_kind", "sink_count", "sink_side", "gate", "gate_bias", "init_from", "reproduce"}
)
CELL: Row = dict.fromkeys(("value", "stderr", "low", "high"), math.nan)
CELL |= {"runs": 0, "samples": 0, "task": "", "metric": ""}
"""A number of a group of runs that differ in their seed alone; these values if nothing was
measured. stderr: of one run, over its rows or documents; low, high: of several, the 95 % interval
over runs, of fewer than 8 the range.
"""


def read_runs(
    benchmarks: Sequence[Benchmark], trainings: Sequence[Any], metric: str | None = None
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Measurements of runs, a row per model and column; and held-out losses of their rows
    of text.

    Models are named by block (models that differ in variant and seed alone), start, variant and
    seed. The start is "autoregressive", "scratch", "retrofit" (the backbone was frozen), or
    "unknown" without the training run. A benchmark is of the training run of the model that it
    scored, or of the one that this was fine-tuned from.
    """
    runs = []
    if trainings:
        runs = as_trainings(trainings)
    rows, losses = [], []
    for one in runs:
        if one.run.info.settings.get("objective") == "autoregressive" or _is_tuned(one):
            continue
        about = _described(one)
        error = math.nan
        if one.heldout_rows is not None:
            error = float(one.heldout_rows["loss"].sem())
            text = f"{one.run.info.model.get('data_sha256')}/"
            own = one.heldout_rows[["row", "loss"]].assign(**about)
            losses.append(own.assign(row=text + own["row"].astype(str)))
        if one.loss is not None:
            rows.append(about | {"column": LOSS, "value": one.loss.value, "stderr": error})
        looks = one.over("step")
        if one.sink_count and len(looks):
            share = 100 * float(looks.iloc[-1]["added_share"])
            rows.append(about | {"column": SHARE, "value": share})
    models = {(one.run.path / "model").resolve(): one for one in runs}
    for bench in benchmarks:
        if bench.is_diffusion and not (bench.k or bench.run.info.settings.get("edits")):
            rows += _scores(bench, models, metric)
    whole = pd.DataFrame(columns=["key", "variant", "seed"])
    if losses:
        whole = pd.concat(losses)
    empty = {"order": math.nan, "samples": math.nan, "stderr": math.nan}
    return pd.DataFrame([empty | row for row in rows]), whole


def _scores(bench: Benchmark, models: dict[Path, Training], metric: str | None) -> list[Row]:
    """Scores of the columns of a table, by whichever of their tasks."""
    home = models.get(Path(str(bench.model.get("name"))).resolve())
    sizes = [bench.model.get(name) for name in ("hidden_size", "layers", "heads")]
    words = f"{sizes[1]} layers of {sizes[0]}, trained elsewhere"
    about: Row = {"block": words, "key": json.dumps(sizes), "start": "unknown", "seed": 0}
    if home is not None:
        about = _described(_base(home, models))
    about |= {"variant": variant(bench.model)}
    rows = []
    for column, how in COLUMNS.items():
        for order, task in enumerate(how["tasks"]):
            score = bench.score(task, metric)
            if score is not None:
                found = score[["task", "metric", "samples"]].to_dict()
                found |= {"value": 100 * score["value"], "stderr": 100 * score["stderr"]}
                rows.append(about | found | {"column": column, "order": order})
    return rows


def _is_tuned(one: Training) -> bool:
    return one.run.info.settings.get("pairs", "none") != "none"


def _base(one: Training, homes: dict[Path, Training]) -> Training:
    """The run that made the model before fine-tuning; the run itself if it was not fine-tuned, or
    that run is not there.
    """
    before = homes.get(Path(str(one.run.info.settings.get("init_from"))).resolve())
    if not _is_tuned(one) or before is None or before is one:
        return one
    return _base(before, homes)


def _described(base: Training) -> Row:
    """Names of a model, by the settings that runs of its block share; the block is its origin, size
    and number of tokens read.
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
    key = json.dumps([start, alike], sort_keys=True)
    names = {"block": label, "key": key, "start": start, "variant": base.variant}
    return names | {"seed": base.run.info.seed}


def _short(count: float) -> str:
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g}{letter}"
    return str(count)


def onetoken_numbers(runs: pd.DataFrame, losses: pd.DataFrame) -> pd.DataFrame:
    """One row per cell: of the paper, and of every block of models that belongs to the table.

    Columns: table, block, source ("published" or "measured"), row, variant, column, and those of
    `CELL`. Held-out loss in nats per token; less that of the table's first row, paired by seed and
    row of text (`effects`); share of attention on the added sinks at the last look of the monitor,
    in percent.

    Args:
        runs: as of `read_runs`.
        losses: likewise.
    """
    rows: list[Row] = []
    for table in TABLES:
        names = {row[1]: row[0] for block in table["blocks"].values() for row in block}
        for models, printed in table["blocks"].items():
            about = {"table": table["number"], "block": models, "source": "published"}
            for name, of_variant, *scores in printed:
                row = about | {"row": name, "variant": of_variant}
                for column, score in zip(table["benchmarks"], scores, strict=True):
                    rows.append(row | {"column": column} | CELL | {"value": score})
        for key in dict.fromkeys(runs.get("key", ())):
            mine = runs[runs["key"] == key]
            shared = len({*mine["variant"]} & names.keys())
            # the first two differ in how models began; the others take whatever has two of their
            # variants
            belongs = shared > 1
            if table["number"] <= 2:
                belongs = shared > 0 and mine["start"].iloc[0] == table["start"]
            if not belongs:
                continue
            about = {"table": table["number"], "block": mine["block"].iloc[0], "source": "measured"}
            less = _less(losses[losses["key"] == key], [*names])
            for of_variant, name in names.items():
                own = mine[mine["variant"] == of_variant]
                for column in (*table["benchmarks"], *RUNS_ONLY):
                    cell = _cell(own[own["column"] == column])
                    if column == LESS:
                        cell = less.get(of_variant, {})
                    row = {"row": name, "variant": of_variant, "column": column}
                    rows.append(about | row | CELL | cell)
    return pd.DataFrame(rows)


def _cell(rows: pd.DataFrame) -> Row:
    """Summary of runs; if several tasks exist for a column, of the paper's own."""
    if rows.empty:
        return {}
    if rows["order"].notna().any():
        rows = rows[rows["order"] == rows["order"].min()]
        # a first try with a limit does not count beside the whole benchmark
        rows = rows[rows["samples"] == rows["samples"].max()]
    over = mean_over(rows["value"])
    found = {"value": over.value, "runs": len(rows)}
    if rows["samples"].notna().any():
        found |= rows[["task", "metric", "samples"]].iloc[0].to_dict()
    if len(rows) == 1:
        return found | {"stderr": float(rows["stderr"].iloc[0])}
    return found | {"low": over.low, "high": over.high}


def _less(losses: pd.DataFrame, variants: list[str]) -> dict[str, Row]:
    """Losses of variants less those of the first, over texts and seeds that both have."""
    found = {}
    first = losses[losses["variant"] == variants[0]]
    for of_variant in variants[1:]:
        own = losses[losses["variant"] == of_variant]
        seeds = {*own["seed"]} & {*first["seed"]}
        if not seeds:
            continue
        both = pd.concat([first, own])
        how: dict[str, Any] = {"arm": "variant", "unit": ("row", "seed"), "design": "crossed"}
        pairs = [(of_variant, variants[0])]
        line = effects(both[both["seed"].isin(seeds)], "loss", pairs=pairs, **how).iloc[0]
        numbers = line[["low", "high"]].to_dict()
        found[of_variant] = {"value": line["mean"], "runs": len(seeds), **numbers}
    return found


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
    numbers = onetoken_numbers(*read_runs(found.benchmarks, found.trainings, metric))
    notes = list(ONE_TOKEN["notes"])
    for column, how in COLUMNS.items():
        command = f"sinklab eval --tasks {how['tasks'][0]} {how['flags']}".strip()
        notes.append(f"{column} as published: `{command}`")
    notes += [f"not finished, so left out: {path}" for path in found.unfinished]
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
