"""`sinklab report`, `figures`, `table1` and `onetoken`: run folders to pages,
figures and tables.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sinklab.lab.cli.command import Reading, folder_names
from sinklab.lab.cli.options import MARK, REQUIRED, Command
from sinklab.lab.cli.progress import say, show, working
from sinklab.lab.records.storage import RUN_FILE
from sinklab.lab.registry import commands
from sinklab.lab.studies.benchmarks.study import EvalSettings, Plan

if TYPE_CHECKING:
    import pandas as pd

    from sinklab.lab.records.reading import Run
    from sinklab.lab.reports.printed import Printed


def tell_answers(studies: Any, texts: Sequence[str] = ()) -> None:
    """The three answers about the model of each run, below its name and its texts, and how the
    models differ.
    """
    from sinklab.lab.reports.build import answers

    found, contrast = answers(studies)
    for place, one in enumerate(found):
        say("\n".join(["", one.model, *texts[place : place + 1], *one.sentences]))
    if contrast:
        say(f"\n{contrast}")


@commands.register("report")
@dataclass(frozen=True)
class Report(Command):
    """One page of the runs: the answers, the maps, the texts.

    It is report.html, with tables beside it. Several runs are shown side by side, e.g. without and
    with a sink token. Runs of `sinklab trace` give a page to explore, and three answers about each
    model, which are printed too: whether sinks exist, which they are and whether they stay, and the
    cost of blocking them (from a run of `sinklab curve` beside that of the trace). Of two runs the
    differences are printed too, second less first; where both have the same prompts, 8 or more,
    with 95 % intervals over them, not corrected for their number. Runs of `sinklab train` give
    training curves: losses, when sinks emerge, which tokens they are. Figures for a paper are drawn
    by `sinklab figures`.

    Try
        sinklab report runs/plain runs/sink --out runs/report
        sinklab report runs/house runs/curve --no-tables
        sinklab report runs/laptop-scratch runs/laptop-scratch-sink --out runs/curves
        sinklab report runs/house --sink-rule excess:epsilon=6
    """

    runs: MARK.Positional[tuple[Path, ...]] = ()
    """Run folders of `sinklab trace`, or of `sinklab train`, or one that holds them, such as that
    of `sinklab tour`; one kind at a time, but for those of `sinklab curve`, which stand beside
    those of `sinklab trace`.
    """
    out: Path = Path("runs/report")
    """Folder for the page and its tables."""
    tables: bool = True
    """Whether tables (CSV) lie beside the page."""
    sink_rule: str | None = None
    """Definition of a sink in runs of `sinklab trace`, NAME:field=value; excess:epsilon=3 when left
    out.
    """
    group = "watch"

    def run(self) -> None:
        from sinklab.lab.reports.build import report as build
        from sinklab.lab.reports.runs import as_shown, left_out
        from sinklab.lab.reports.tables import compare

        if not self.runs:
            raise ValueError(
                "report needs at least one run folder; make one with `sinklab trace` or `sinklab "
                "train`"
            )
        runs = _opened(self.runs)
        read = as_shown(runs, rule=self.sink_rule)
        is_study = read[0].run.info.kind == "study"
        with working() as progress:
            progress.stage("reading the runs")
            _ = [one.answers for one in read if is_study]
        if is_study:
            tell_answers(read)
            if len(read) == 2:
                _show_table(compare(*read))
        with working() as progress:
            progress.stage("drawing the page")
            page = build([*read, *left_out(runs, read)], self.out, tables=self.tables)
        say(f"report: {page}")


def _opened(folders: Iterable[Path]) -> list[Run]:
    """Runs, those of a folder that holds several, as that of a tour, in the order in which they
    were written.
    """
    from sinklab.lab.records.reading import open_run

    runs = []
    for folder in folders:
        below = [path.parent for path in folder.glob(f"*/{RUN_FILE}")]
        if not below or (folder / RUN_FILE).is_file():
            runs.append(open_run(folder))
        else:
            runs += sorted(map(open_run, below), key=lambda run: run.info.created)
    return runs


@commands.register("figures")
@dataclass(frozen=True)
class Figures(Command):
    """The figures of runs for a paper.

    Vector graphics, each with its numbers (NAME.csv). Bands are 95 % intervals over samples.

    Try
        sinklab figures runs/plain --only sink_paths
        sinklab figures runs/plain runs/sink --only sink_share layer_head_map
        sinklab figures runs/curve --formats svg
    """

    runs: MARK.Positional[tuple[Path, ...]] = ()
    """Run folders of one kind, of `sinklab trace`, `train` or `curve`."""
    out: Path = Path("runs/figures")
    """Folder for the figures."""
    only: tuple[str, ...] = ()
    """Names of figures; all that the runs recorded enough for, when left out.
    `sinklab list figures` has them.
    """
    formats: tuple[Literal["pdf", "svg", "png"], ...] = ("pdf", "png")
    """Formats of the files."""
    group = "watch"

    def run(self) -> None:
        from sinklab.lab.reports.drawing import draw_all

        if not self.runs:
            raise ValueError(
                "figures needs at least one run folder; make one with `sinklab trace` or `sinklab "
                "train`"
            )
        opened = _opened(self.runs)
        with working() as progress:
            progress.stage("drawing")
            written, skipped = draw_all(opened, self.out, self.formats, names=self.only or None)
        for name, why in skipped.items():
            say(f"not drawn: {name}: {why}")
        say(f"figures: {self.out} ({len(written)} files)")


def _show_table(rows: pd.DataFrame, title: str = "") -> None:
    from sinklab.lab.reports.printed import shown

    show([[*map(shown, row)] for row in rows.itertuples(index=False)], [*rows.columns], title)


MODELS = ("tiny", "tiny-sink")


@commands.register("table1")
@dataclass(frozen=True)
class Table1(Command):
    """Table 1 of the analysis paper, beside the published numbers.

    Accuracy with the 0, 1, 5 and 10 most attended keys blocked. Every cell is a run folder of
    `sinklab eval`, OUT/<model>/<task>-k<K>. Cells that are there are not scored again and an
    interrupted one goes on, so the command can be stopped and repeated. As in the paper: blocks of
    32, 256 new tokens for GSM8K and 512 for HumanEval, one token a step, temperature 0, closed
    loop; --protocols sets other ways to mask beside it. Printed and written to OUT: accuracy ±
    binomial standard error beside the published numbers; below, what each cell lost, with its dose
    (keys, how many of them are sinks by the rule, their attention), and whether that is more than 5
    points; and other keys of equal mass (--controls equal_mass). HumanEval runs code that models
    write: it takes --run-code.

    Try
        sinklab table1 --tasks gsm8k --data benchmarks --limit 4 --num-fewshot 0 --new-tokens 32 \\
            --ks 0 5
        sinklab table1 --model tiny --tasks gsm8k,humaneval --run-code --data benchmarks --limit \\
            2 --num-fewshot 0
        sinklab table1 --tasks piqa --data benchmarks --limit 40 --mc-samples 16 --ks 0 5 \\
            --controls sinks equal_mass
        sinklab table1 --tasks gsm8k --data benchmarks --limit 4 --num-fewshot 0 --ks 0 5 \\
            --protocols paper held rule
        sinklab table1 --render runs/table1 --out runs/table1
        sinklab table1 --model /models/LLaDA-8B-Instruct /models/Dream-v0-Instruct-7B --run-code \\
            --device cuda
    """

    model: tuple[str, ...] = MODELS
    """"tiny", "tiny-sink", "tiny-causal" (inside the package), folders, or names on the Hub."""
    out: Path = Path("runs/table1")
    """Folder for the cells and the table."""
    render: tuple[Path, ...] = ()
    """Only make the table from the run folders at or below these."""
    reading: Reading = Reading()
    plan: Plan = Plan()
    settings: EvalSettings = EvalSettings(tasks=("gsm8k", "humaneval"))
    group = "evaluate"

    def hidden(self) -> tuple[str, ...]:
        """Settings that are the plan's."""
        return ("mask_sinks", "control", "protocol")

    def run(self) -> None:
        from sinklab.lab.studies.benchmarks.table1 import write_table1

        folders = list(self.render)
        if not folders:
            folders = _scored(self.model, self.out, self.plan, self.reading, self.settings)
        if folders:
            _show([write_table1(folders, self.out)])


@commands.register("score")
@dataclass(frozen=True)
class Score(Command):
    """Run the programs that a run of `sinklab eval` keeps.

    Inside bubblewrap; the scores are written into the folder. No model is read.

    Try
        sinklab score runs/code
    """

    run_folder: MARK.Positional[Path] = REQUIRED
    """Run folder whose programs were kept and not run."""
    group = "evaluate"

    def run(self) -> None:
        from sinklab.lab.studies.benchmarks.run import score

        for line in score(self.run_folder):
            say(line)


@commands.register("onetoken")
@dataclass(frozen=True)
class OneToken(Command):
    """Tables 1 to 5 of the sink-token paper, likewise.

    From your run folders, each cell beside the published one. Takes folders of `sinklab train` and
    of `sinklab eval`, or folders above them. A benchmark run is matched with the training run of
    the model it scored; runs that differ in their seed alone are averaged. A cell that is missing
    is –, and the commands that fill a column stand below.

    Try
        sinklab onetoken runs/ --out runs/onetoken
        sinklab onetoken runs/laptop-from-causal runs/laptop-from-causal-sink
        sinklab onetoken runs/ --metric acc_norm
    """

    runs: MARK.Positional[tuple[Path, ...]] = ()
    """Folders, at or below which run folders lie."""
    out: Path = Path("runs/onetoken")
    """Folder for the tables."""
    metric: str | None = None
    """Metric of lm-eval, shown if a task has it, e.g. acc_norm; acc when left out."""
    group = "evaluate"

    def run(self) -> None:
        from sinklab.lab.studies.benchmarks.onetoken import write_onetoken

        if not self.runs:
            raise ValueError(
                "onetoken needs a folder of runs; make them with `sinklab train` and `sinklab eval`"
            )
        _show(write_onetoken(self.runs, self.out, metric=self.metric))


def _show(tables: list[Printed]) -> None:
    """Tables on the terminal, their notes below them, and the paths of their files."""
    said = []
    for one in tables:
        _show_table(one.text, one.title)
        for title, table in one.beside.items():
            _show_table(table, title)
        # tables of one paper share notes
        for note in [note for note in one.notes if note not in said]:
            said.append(note)
            say(f"- {note}")
    say(f"written: {', '.join(str(path) for one in tables for path in one.paths)}")


def _scored(
    model: tuple[str, ...], out: Path, plan: Plan, reading: Reading, settings: EvalSettings
) -> list[Path]:
    # read when tqdm is imported: the bars of lm-eval and datasets would run through ours
    os.environ.setdefault("TQDM_DISABLE", "1")
    from sinklab.lab.studies.benchmarks.run import table1 as scored

    if not model:
        raise ValueError("the table needs at least one model; give --model tiny, for example")
    reading.check(model)
    loaders = {
        folder: partial(reading.load, name)
        for name, folder in zip(model, folder_names(model), strict=True)
    }
    with working() as progress:
        return scored(loaders, settings, out, plan, progress=progress)
