"""The numbers of a run as tables, in memory and as Parquet, CSV and Markdown files."""

# L layers, H heads
from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sinklab.analysis.estimates import Estimate
from sinklab.analysis.movement import motion_word
from sinklab.analysis.tokens import Enrichment
from sinklab.errors import unknown
from sinklab.records.storage import write_beside
from sinklab.reports.runs import Runs, as_shown
from sinklab.reports.study import Study
from sinklab.reports.training import Training


def outcome_table(run: Training) -> pd.DataFrame:
    """A row per run: variant, the held-out loss with its 95 % interval, when sinks emerged, the last measurement."""
    nothing = Estimate(math.nan, math.nan, math.nan, 0)
    loss, info = run.loss or nothing, run.run.info
    row = {"variant": run.variant, "seed": info.seed, "status": info.status, "heldout_loss": loss.value}
    low, high = loss.interval
    row |= {"low": low, "high": high, "heldout_rows": loss.samples}
    row |= {"takeover_step": run.takeover, "emergence_step": run.emergence}
    if run.monitor is not None:
        whole = run.monitor[run.monitor["layer"] == -1].sort_values("step")
        row |= whole.iloc[-1].drop(["layer", "causal"]).to_dict()
    return pd.DataFrame([row]).astype({"takeover_step": "Int64", "emergence_step": "Int64"})


TRAINING_TABLES: dict[str, Callable[[Training], pd.DataFrame]] = {
    "outcome": outcome_table,
    "history": lambda run: pd.DataFrame() if run.history is None else run.history,
    "monitor": lambda run: pd.DataFrame() if run.monitor is None else run.monitor,
}


MARKDOWN_ROWS = 60


def enrichment_table(found: Enrichment | None, name: str) -> pd.DataFrame:
    """Columns of an `Enrichment`, its labels under ``name``; no row without one."""
    columns = ("events", "occurrences", "frequency", "occupancy", "enrichment")
    if found is None:
        return pd.DataFrame(columns=[name, *columns])
    return pd.DataFrame({name: found.label, **{column: getattr(found, column) for column in columns}})


def sink_tokens_table(study: Study) -> pd.DataFrame:
    """Which tokens sinks are (analysis paper, Table 2): events, frequency, occupancy, enrichment of every token."""
    return enrichment_table(study.sink_tokens, "token")


def classes_table(study: Study) -> pd.DataFrame:
    """The same by class of token and by age of the position (masked, just committed, committed, prompt)."""
    parts = [
        enrichment_table(found, "label").assign(by=by).pipe(_first, "by")
        for by, found in (("class", study.classes), ("age", study.ages))
    ]
    return pd.concat(parts, ignore_index=True)


def motion_table(study: Study) -> pd.DataFrame:
    """Motion of the main sink of every (sample, layer, head); the fields are those of ``sinks.Motion``."""
    table = study.measured.motions
    if table.empty:
        return table
    return table.assign(word=[motion_word(value) for value in table["mobility"]])


def rules_table(study: Study) -> pd.DataFrame:
    """Sink rules side by side: what each flags, and how far it agrees with the first one (Jaccard overlap)."""
    shown = {"rule": "name", "sinks_per_head": "per_head", "heads_with_sink": "rate"}
    shown |= {"filtered": "filtered", "absorbed": "absorb", "agreement": "agreement"}
    rules = study.measured.rules
    return pd.DataFrame({column: [getattr(rule, name) for rule in rules] for column, name in shown.items()})


def curve_table(study: Study) -> pd.DataFrame:
    """Share of tokens that are no sinks over the threshold (analysis paper, Fig. 10), all layers and each of them."""
    curve = study.curve
    if curve is None:
        return pd.DataFrame()
    columns = {f"layer_{layer}": row for layer, row in zip(study.layers, curve.filtered_by_layer, strict=True)}
    return pd.DataFrame({"epsilon": curve.epsilon, "filtered": curve.filtered, **columns})


def verdicts_table(study: Study) -> pd.DataFrame:
    """Failure signatures and statements: whether they hold, the number that decides, what it is held against."""
    table = pd.DataFrame([dataclasses.asdict(verdict) for verdict in study.verdicts])
    return table.assign(holds=table["holds"].astype("boolean"))


TABLES: dict[str, Callable[[Study], pd.DataFrame]] = {
    "sink_tokens": sink_tokens_table,
    "classes": classes_table,
    "layers": lambda study: study.over("layer"),
    "motion": motion_table,
    "rules": rules_table,
    "curve": curve_table,
    "verdicts": verdicts_table,
}


def table(run: Runs, name: str) -> pd.DataFrame:
    """One of ``TABLES`` of a study, or of ``TRAINING_TABLES`` of a training run. Raises ValueError for another name."""
    reader = as_shown(run)[0]
    tables = _tables_of(reader)
    if name not in tables:
        raise unknown("table of a report", name, tables)
    return tables[name](reader)


def _tables_of(reader: Study | Training) -> Mapping[str, Callable[[Any], pd.DataFrame]]:
    return TRAINING_TABLES if isinstance(reader, Training) else TABLES


def write_tables(
    runs: Runs,
    folder: str | Path,
    formats: Iterable[str] = ("parquet", "csv", "md"),
    names: Iterable[str] | None = None,
) -> list[Path]:
    """Write the tables of some runs, a file per table and format, with the run in the first column.

    ``names``: all that there are of runs of this kind, when left out. A table that no run has anything for is not
    written. Markdown shows at most 60 rows and says how many more there are. Returns the paths. Raises ValueError for
    unknown formats or names.
    """
    readers, target, formats = as_shown(runs), Path(folder), tuple(formats)
    for form in formats:
        if form not in WRITERS:
            raise unknown("format of a table", form, WRITERS)
    target.mkdir(parents=True, exist_ok=True)
    written = []
    for name in _tables_of(readers[0]) if names is None else names:
        parts = [_first(part.assign(run=run.label), "run") for run in readers if len(part := table(run, name))]
        if not parts:
            continue
        whole = pd.concat(parts, ignore_index=True)
        for form in formats:
            path = target / f"{name}.{form}"
            write_beside(path, partial(WRITERS[form], whole))
            written.append(path)
    return written


def markdown(table: pd.DataFrame, most: int = MARKDOWN_ROWS) -> str:
    """A table as GitHub Markdown, numbers with four digits; at most ``most`` rows."""
    lines = ["| " + " | ".join(map(_cell, table.columns)) + " |", "|" + " --- |" * len(table.columns)]
    lines += ["| " + " | ".join(map(_cell, row)) + " |" for row in table.head(most).itertuples(index=False)]
    if len(table) > most:
        lines.append(f"\n{len(table) - most:,} more rows are left out here.")
    return "\n".join(lines) + "\n"


def _cell(value: object) -> str:
    if value is None or value is pd.NA or value != value:
        return "–"
    if isinstance(value, float | np.floating):
        return f"{value:.4g}"
    text = str(value).replace("\\", "\\\\").replace("|", "\\|").replace("\r", "").replace("\n", "↵")
    # a token's own spaces at its ends would not be seen
    body = text.strip(" ")
    lead = len(text) - len(text.lstrip(" "))
    return "␣" * lead + body + "␣" * (len(text) - lead - len(body))


WRITERS: dict[str, Callable[[pd.DataFrame, Path], object]] = {
    "parquet": lambda table, path: table.to_parquet(path, index=False),
    "csv": lambda table, path: table.to_csv(path, index=False),
    "md": lambda table, path: path.write_text(markdown(table), encoding="utf-8"),
}


def _first(table: pd.DataFrame, column: str) -> pd.DataFrame:
    return table[[column, *(name for name in table.columns if name != column)]]
