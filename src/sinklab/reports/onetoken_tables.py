"""Tables 1 to 5 of «One Token Is Enough», measured beside published, and the commands that fill what is missing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import pandas as pd

from .benchmarks import found_in
from .onetoken_runs import TASKS, Cell, Experiment, experiments
from .printed import Printed, write_printed
from .published_scores import ONE_TOKEN, PaperTable

# How the released code scores a column: the paper names neither the estimator nor the guidance.
PROTOCOL = {
    "ARC-e": "--noise smdm --mc-samples 1024 --likelihood-cfg-scale 0.6",
    "ARC-c": "--noise smdm --mc-samples 1024 --likelihood-cfg-scale 0.6",
    "HellaSwag": "--noise smdm --mc-samples 1024 --likelihood-cfg-scale 0.7",
    "PIQA": "--estimator chain_rule --likelihood-cfg-scale 0.6",
    "RACE": "--noise smdm --mc-samples 1024 --likelihood-cfg-scale 0.7",
    "SIQA": "--noise smdm --mc-samples 1024 --likelihood-cfg-scale 0.6",
    "LAMBADA": "--estimator chain_rule --likelihood-cfg-scale 1.1",
    "GSM8K": "",
}
# Recipes by the start of a table's models: on a laptop, and as published.
_RECIPES = {"autoregressive": ("laptop-from-causal", "qwen-0.5b"), "scratch": ("laptop-scratch", "scratch-472m")}
_WORDS = {"sink at the end": "end", "2 sinks": "2-sinks", "4 sinks": "4-sinks", "zero-value sink": "zero"}
LOSS, LESS, SHARE = "held-out loss", "loss less the first row's", "attention on the sinks, %"
RUNS_ONLY = (LOSS, LESS, SHARE)
NOTES = (
    "Published: arXiv 2601.19657, Tables 1 to 5, percent right; the paper gives no errors. Measured cells are percent "
    "right ± one binomial standard error, means over runs that differ in their seed alone; the held-out loss is in "
    "nats per token, ± one standard error over rows of text, on the text of the runs themselves; where it is less the "
    "first row's, it is paired by row and seed. A mean over fewer runs than the row above is of other seeds.",
    "The paper does not say whether HellaSwag, ARC and PIQA are acc or acc_norm, nor that its released code uses "
    "guidance: the commands below give what that code gives. Its LAMBADA is lm-eval's lambada_standard. No script "
    "scores ARC-c; ARC-e's settings are taken for it.",
)


def onetoken_numbers(blocks: Sequence[Experiment], *, metric: str | None = None) -> pd.DataFrame:
    """One row per cell: of the paper, and of every block of runs that belongs to the table.

    Columns: table, block, source ("published" or "measured"), row, variant, column, value, stderr, runs, samples, task,
    metric; and command, what would fill a cell that is missing (its value is NaN).
    """
    rows: list[dict[str, object]] = []
    for table in ONE_TOKEN:
        for size, paper_rows in table.blocks.items():
            for paper in paper_rows:
                for column, score in zip(table.benchmarks, paper.scores, strict=True):
                    rows.append(
                        _row(table, size, "published", (paper.name, paper.variant), column, Cell(score, _NAN, 0))
                    )
        for block in _belonging(table, blocks):
            for name, of_variant in table.variants:
                for column in (*table.benchmarks, *RUNS_ONLY):
                    cell = _cell(block, (of_variant, table.variants[0][1]), column, metric)
                    row = _row(table, block.label, "measured", (name, of_variant), column, cell)
                    rows.append(row | {"command": "" if cell else _command(table, block, of_variant, column)})
    return pd.DataFrame(rows)


_NAN = float("nan")


def _belonging(table: PaperTable, blocks: Sequence[Experiment]) -> list[Experiment]:
    """Tables 1 and 2 differ in how models began; the others take whatever has two of their variants."""
    if table.number <= 2:
        return [block for block in blocks if block.start == table.start and block.variants & _wanted(table)]
    return [block for block in blocks if len(block.variants & _wanted(table)) > 1]


def _wanted(table: PaperTable) -> set[str]:
    return {name for _, name in table.variants}


def _cell(block: Experiment, variants: tuple[str, str], column: str, metric: str | None) -> Cell | None:
    """Of a variant, given with the one of the table's first row."""
    if column in RUNS_ONLY:
        known = {LOSS: block.loss, SHARE: block.share, LESS: lambda name: block.less(name, variants[1])}
        return known[column](variants[0])
    return block.score(variants[0], column, metric)


def _row(
    table: PaperTable, block: str, source: str, row: tuple[str, str], column: str, cell: Cell | None
) -> dict[str, object]:
    cell = cell or Cell(_NAN, _NAN, 0)
    return {
        "table": table.number,
        "block": block,
        "source": source,
        "row": row[0],
        "variant": row[1],
        "column": column,
        "value": cell.value,
        "stderr": cell.stderr,
        "runs": cell.runs,
        "samples": cell.samples,
        "task": cell.task,
        "metric": cell.metric,
        "command": "",
    }


def _command(table: PaperTable, block: Experiment, of_variant: str, column: str) -> str:
    """What fills a missing cell; nothing where there is none to be filled."""
    model = block.model_of(of_variant)
    word = _WORDS.get(of_variant, of_variant)
    if model is None:
        laptop, published = _RECIPES[table.start]
        return f"sinklab train {laptop} --variant {word}   (as published: {published})"
    if column == SHARE:
        return "" if of_variant in ("plain", "gate") else "train with --monitor-every"
    if column == LESS:
        return ""
    if column == LOSS:
        return f"sinklab curve --model {model}"
    kind = "smdm" if "smdm" in PROTOCOL[column] else "chain"
    how = f"{kind}-{PROTOCOL[column].split()[-1]}" if PROTOCOL[column] else "two-stage"
    where = f"--data benchmarks --out runs/onetoken/{word.replace(' ', '-')}-{how}"
    if column == "GSM8K":
        tuned = block.model_of(of_variant, tuned=True)
        if tuned is None:
            return f"sinklab train sft-gsm8k --init-from {model} --corpus gsm8k_aug/train.txt"
        model = tuned
    return " ".join(f"sinklab eval --model {model} --tasks {TASKS[column][0]} {PROTOCOL[column]} {where}".split())


def onetoken_text(numbers: pd.DataFrame, table: int) -> pd.DataFrame:
    """One of the tables as people read it: a row per variant and block, those of the paper first; – is missing."""
    rows = []
    part = numbers[numbers["table"] == table]
    for (source, block, name), cells in part.groupby(["source", "block", "row"], sort=False):
        shown = {str(cell["column"]): _text(cell) for _, cell in cells.iterrows()}
        runs = {"runs": str(int(cells["runs"].max()))} if source == "measured" else {}
        rows.append({"models": f"{block} ({source})", "row": name, **shown, **runs})
    text = pd.DataFrame(rows).fillna("")
    # only runs have these
    empty = [name for name in RUNS_ONLY if name in text and not text[name].str.strip("–").any()]
    return text.drop(columns=empty)


def _text(cell: pd.Series) -> str:
    if pd.isna(cell["value"]):
        return "–"
    digits = 4 if cell["column"] in (LOSS, LESS) else 2
    spread = "" if pd.isna(cell["stderr"]) else f" ± {cell['stderr']:.{digits}f}"
    number = f"{cell['value']:+.{digits}f}" if cell["column"] == LESS else f"{cell['value']:.{digits}f}"
    return f"{number.replace('-', '−')}{spread}"


def missing_commands(numbers: pd.DataFrame, table: int) -> list[str]:
    """The commands that fill the cells of a table that are missing; benchmarks with the same settings in one."""
    part = numbers[(numbers["table"] == table) & (numbers["command"] != "")]
    together: dict[str, list[str]] = {}
    for command in part["command"]:
        tasks = re.search(r"--tasks (\S+)", command)
        alike = re.sub(r"--tasks \S+", "--tasks …", command)
        listed = together.setdefault(alike, [])
        listed += [tasks[1]] if tasks and tasks[1] not in listed else []
    return [alike.replace("…", ",".join(tasks)) for alike, tasks in together.items()]


def write_onetoken(folders: Iterable[str | Path], out: str | Path, *, metric: str | None = None) -> list[Printed]:
    """Read the run folders at or below `folders` and write onetoken-1 … onetoken-5 as .md, .tex and .csv.

    Args:
        folders: of training runs and of benchmark runs; a benchmark is matched with the training run whose model it
            scored.
        out: folder to write into.
        metric: of lm-eval to show where a task has it, e.g. acc_norm; acc when left out.

    Raises:
        ValueError: for folders without any such run.
    """
    found = found_in(folders)
    numbers = onetoken_numbers(experiments(found.benchmarks, found.trainings), metric=metric)
    written = []
    for table in ONE_TOKEN:
        notes = [*NOTES, *(f"missing: `{command}`" for command in missing_commands(numbers, table.number))]
        if not (numbers[numbers["table"] == table.number]["source"] == "measured").any():
            laptop, published = _RECIPES[table.start]
            notes.append(
                f"no run of these folders belongs here: `sinklab train {laptop}` with the variants "
                f"{', '.join(_WORDS.get(name, name) for name in sorted(_wanted(table)))} (as published: {published})"
            )
        notes += [f"not finished, so left out: {path}" for path in found.unfinished]
        text = onetoken_text(numbers, table.number)
        title = f"One Token Is Enough, Table {table.number}: {table.title}"
        part = numbers[numbers["table"] == table.number]
        written.append(write_printed(Path(out) / f"onetoken-{table.number}", title, text, part, notes))
    return written
