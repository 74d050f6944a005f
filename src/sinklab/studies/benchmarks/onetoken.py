"""Tables 1 to 5 of «One Token Is Enough», measured beside published, and the commands that fill what is missing."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sinklab.reports.printed import Printed, write_printed
from sinklab.reports.runs import as_trainings
from sinklab.reports.training import FREE, Training, variant
from sinklab.studies.benchmarks.published import ONE_TOKEN, ONE_TOKEN_FACTS, PaperTable
from sinklab.studies.benchmarks.read import Benchmark, Score, found_in

COLUMNS: dict[str, Any] = ONE_TOKEN_FACTS["columns"]
RECIPES: dict[str, list[str]] = ONE_TOKEN_FACTS["recipes"]
VARIANTS: dict[str, str] = ONE_TOKEN_FACTS["variants"]
# What makes a variant, and what follows from it: runs of one experiment may differ in these.
_OF_VARIANT = frozenset({"sink_kind", "sink_count", "sink_side", "gate", "gate_bias", "init_from", "reproduce"})


@dataclass(frozen=True)
class Cell:
    """A number of a group of runs that differ in their seed alone."""

    value: float = math.nan
    stderr: float = math.nan
    runs: int = 0
    samples: int = 0
    task: str = ""
    metric: str = ""


@dataclass(eq=False)
class Experiment:
    """Models that differ in their variant and their seed alone: a block of a table."""

    start: str
    """"autoregressive", "scratch", "retrofit" (the backbone was frozen), or "unknown" without the training run."""
    label: str
    trainings: list[Training] = field(default_factory=list)
    benchmarks: list[Benchmark] = field(default_factory=list)

    @cached_property
    def variants(self) -> set[str]:
        """What there is."""
        return {one.variant for one in self.trainings} | {variant(one.model) for one in self.benchmarks}

    def score(self, name: str, column: str, metric: str | None = None) -> Cell | None:
        """A benchmark of a variant in percent, mean over its runs; of several tasks for it the paper's own."""
        for task in COLUMNS[column]["tasks"]:
            scores: list[Score] = []
            for one in self.benchmarks:
                if variant(one.model) == name and one.k == 0 and not one.run.info.settings.get("edits"):
                    found = one.score(task, metric) or one.score(task)
                    scores += [found] if found else []
            if scores:
                # a first try with a limit does not count beside the whole benchmark
                scores = [one for one in scores if one.samples == max(one.samples for one in scores)]
                about = {"samples": scores[0].samples, "task": task, "metric": scores[0].metric}
                return _mean([(100 * one.value, 100 * one.stderr) for one in scores], **about)
        return None

    def of(self, name: str) -> list[Training]:
        """The training runs of a variant; those that fine-tuned one on questions are not among them."""
        return [one for one in self.trainings if one.variant == name and not _is_tuned(one)]

    def loss(self, name: str) -> Cell | None:
        """Held-out loss of a variant in nats per token, mean over its runs, ± one standard error over rows of text."""
        known = [(one.loss, one.heldout_rows) for one in self.of(name) if one.loss is not None]
        return _mean([(loss.value, math.nan if rows is None else float(rows["loss"].sem())) for loss, rows in known])

    def less(self, name: str, other: str) -> Cell | None:
        """Held-out loss less that of another variant of the same seed, paired by row of text; mean over seeds."""
        theirs = {one.run.info.seed: one for one in self.of(other)} if name != other else {}
        pairs = [one.against(theirs[one.run.info.seed]) for one in self.of(name) if one.run.info.seed in theirs]
        return _mean([(pair[0], pair[1] / 1.96) for pair in pairs if pair is not None])

    def share(self, name: str) -> Cell | None:
        """Percent of attention on the added sinks when the monitor last measured it, mean over runs."""
        found = [one.over("step") for one in self.of(name) if one.sink_count]
        return _mean([(100 * float(table.iloc[-1]["added_share"]), math.nan) for table in found if not table.empty])

    def model_of(self, name: str, *, tuned: bool = False) -> str | None:
        """Folder or name of the first model of a variant; `tuned`: the one fine-tuned on questions."""
        for one in self.trainings:
            if one.variant == name and _is_tuned(one) == tuned:
                return str(one.run.path / "model")
        names = [str(one.model.get("name")) for one in self.benchmarks if variant(one.model) == name]
        return None if tuned or not names else names[0]


def experiments(benchmarks: Sequence[Benchmark], trainings: Sequence[Any]) -> list[Experiment]:
    """The runs as blocks: by how they were trained; benchmarks join the training run whose model they scored."""
    runs = as_trainings(trainings) if trainings else []
    homes = {(one.run.path / "model").resolve(): one for one in runs}
    # by the very weights, where the folder was moved since
    files = [(one.run.path / "model" / "weights.sha256", one) for one in reversed(runs)]
    by_weights = {file.read_text().strip(): one for file, one in files if file.is_file()}
    blocks: dict[str, Experiment] = {}
    for one in runs:
        if one.run.info.settings.get("objective") == "autoregressive":
            continue
        key, start, label = _described(_base(one, homes))
        blocks.setdefault(key, Experiment(start, label)).trainings.append(one)
    for bench in benchmarks:
        if bench.model.get("family") != "diffusion":
            continue
        home = homes.get(Path(str(bench.model.get("name"))).resolve())
        home = home or by_weights.get(str(bench.model.get("weights_sha256")))
        if home is not None:
            key, start, label = _described(_base(home, homes))
        else:
            sizes = [bench.model.get(name) for name in ("hidden_size", "layers", "heads")]
            key, start = json.dumps(["unknown", sizes]), "unknown"
            label = f"{sizes[1]} layers of {sizes[0]}, trained elsewhere"
        blocks.setdefault(key, Experiment(start, label)).benchmarks.append(bench)
    return list(blocks.values())


def _is_tuned(one: Training) -> bool:
    return one.run.info.settings.get("pairs", "none") != "none"


def _base(one: Training, homes: dict[Path, Training]) -> Training:
    """The run that made the model which was fine-tuned; the run itself where it was not, or that one is not there."""
    if not _is_tuned(one):
        return one
    before = homes.get(Path(str(one.run.info.settings.get("init_from"))).resolve())
    return _base(before, homes) if before is not None and before is not one else one


def _start(base: Training) -> str:
    if _is_tuned(base):
        return "unknown"
    if base.run.info.settings.get("train_only", "all") != "all":
        return "retrofit"
    return "autoregressive" if base.run.info.settings.get("init_from") else "scratch"


def _described(base: Training) -> tuple[str, str, str]:
    """What runs of one experiment have in common; how it began; in words: from where, how large, what it has read."""
    settings, start = base.run.info.settings, _start(base)
    alike = {key: value for key, value in settings.items() if key not in FREE | _OF_VARIANT}
    tokens = int(settings.get("steps") or 0) * int(settings.get("batch") or 0) * int(settings.get("length") or 0)
    size = base.run.info.model.get("parameters")
    parts = [f"{_short(size)} parameters"] if size else []
    parts += [f"{_short(tokens)} tokens"] if tokens and not settings.get("epochs") else []
    model = settings.get("init_from")
    label = ", ".join([f"from {Path(str(model)).parent.name or model}" if model else "from scratch", *parts])
    return json.dumps([start, alike], sort_keys=True), start, label


def _short(count: float) -> str:
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g}{letter}"
    return str(count)


def _mean(runs: Sequence[tuple[float, float]], **about: Any) -> Cell | None:
    """Mean over runs, and its standard error from those of the runs: seeds beyond that are not in it."""
    if not runs:
        return None
    values, errors = np.array(runs).T
    return Cell(float(values.mean()), float(np.sqrt((errors**2).sum()) / len(runs)), len(runs), **about)


LOSS, LESS, SHARE = "held-out loss", "loss less the first row's", "attention on the sinks, %"
RUNS_ONLY = (LOSS, LESS, SHARE)


def onetoken_numbers(blocks: Sequence[Experiment], *, metric: str | None = None) -> pd.DataFrame:
    """One row per cell: of the paper, and of every block of runs that belongs to the table.

    Columns: table, block, source ("published" or "measured"), row, variant, column, value, stderr, runs, samples, task,
    metric; and command, what would fill a cell that is missing (its value is NaN).
    """
    rows: list[dict[str, object]] = []
    for table in ONE_TOKEN:
        for size, paper_rows in table.blocks.items():
            about: dict[str, object] = {"table": table.number, "block": size, "source": "published"}
            for paper in paper_rows:
                here = about | {"row": paper.name, "variant": paper.variant}
                for column, score in zip(table.benchmarks, paper.scores, strict=True):
                    rows.append(here | {"column": column} | asdict(Cell(score)) | {"command": ""})
        for block in (block for block in blocks if _belongs(block, table)):
            about = {"table": table.number, "block": block.label, "source": "measured"}
            for name, of_variant in table.variants:
                here = about | {"row": name, "variant": of_variant}
                for column in (*table.benchmarks, *RUNS_ONLY):
                    cell = _cell(block, of_variant, table.variants[0][1], column, metric)
                    command = "" if cell else _command(table, block, of_variant, column)
                    rows.append(here | {"column": column} | asdict(cell or Cell()) | {"command": command})
    return pd.DataFrame(rows)


def _belongs(block: Experiment, table: PaperTable) -> bool:
    """Tables 1 and 2 differ in how models began; the others take whatever has two of their variants."""
    shared = len(block.variants & {name for _, name in table.variants})
    return shared > 0 and block.start == table.start if table.number <= 2 else shared > 1


def _cell(block: Experiment, of_variant: str, first: str, column: str, metric: str | None) -> Cell | None:
    """Of a variant; `first` is that of the table's first row."""
    of_runs: dict[str, Any] = {LOSS: block.loss, LESS: partial(block.less, other=first), SHARE: block.share}
    return of_runs[column](of_variant) if column in of_runs else block.score(of_variant, column, metric)


def _command(table: PaperTable, block: Experiment, of_variant: str, column: str) -> str:
    """What fills a missing cell; nothing where there is none to be filled."""
    model = block.model_of(of_variant)
    word = VARIANTS.get(of_variant, of_variant)
    if model is None:
        laptop, published = RECIPES[table.start]
        return f"sinklab train {laptop} --variant {word}   (as published: {published})"
    if column in RUNS_ONLY:
        watched = "" if of_variant in ("plain", "gate") else "train with --monitor-every"
        return {LOSS: f"sinklab curve --model {model}", SHARE: watched, LESS: ""}[column]
    flags = COLUMNS[column]["flags"]
    how = f"{'smdm' if 'smdm' in flags else 'chain'}-{flags.split()[-1]}" if flags else "two-stage"
    if column == "GSM8K":
        tuned = block.model_of(of_variant, tuned=True)
        if tuned is None:
            return f"sinklab train sft-gsm8k --init-from {model} --corpus gsm8k_aug/train.txt"
        model = tuned
    where = f"--data benchmarks --out runs/onetoken/{word.replace(' ', '-')}-{how}"
    return " ".join(f"sinklab eval --model {model} --tasks {COLUMNS[column]['tasks'][0]} {flags} {where}".split())


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
    together: dict[str, dict[str, None]] = {}
    for command in part["command"]:
        tasks = together.setdefault(re.sub(r"--tasks \S+", "--tasks …", command), {})
        tasks |= dict.fromkeys(re.findall(r"--tasks (\S+)", command))
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
        part = numbers[numbers["table"] == table.number]
        commands = missing_commands(numbers, table.number)
        notes = [*ONE_TOKEN_FACTS["notes"], *(f"missing: `{command}`" for command in commands)]
        if "measured" not in set(part["source"]):
            laptop, published = RECIPES[table.start]
            variants = ", ".join(VARIANTS.get(name, name) for name in sorted({name for _, name in table.variants}))
            notes.append(
                f"no run of these folders belongs here: `sinklab train {laptop}` with the variants {variants} (as "
                f"published: {published})"
            )
        notes += [f"not finished, so left out: {path}" for path in found.unfinished]
        text = onetoken_text(numbers, table.number)
        title = f"One Token Is Enough, Table {table.number}: {table.title}"
        written.append(write_printed(Path(out) / f"onetoken-{table.number}", title, text, part, notes))
    return written
