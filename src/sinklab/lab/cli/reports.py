"""`sinklab report`, `figures`, `compare`, `table1` and `onetoken`: run folders to pages, figures
and tables.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from sinklab.lab.cli.command import Reading, say, show, working
from sinklab.lab.cli.options import checked
from sinklab.lab.records.storage import RUN_FILE
from sinklab.lab.registry import studies
from sinklab.lab.studies.base import folder_names
from sinklab.lab.studies.benchmarks.study import EvalSettings, Plan
from sinklab.lab.studies.processes import Processes

if TYPE_CHECKING:
    import pandas as pd

    from sinklab.lab.records.reading import Run
    from sinklab.lab.reports.printed import Printed


Folders = Annotated[tuple[Path, ...], tyro.conf.Positional]


def tell_answers(studies: Any, texts: Sequence[tuple[Any, ...]] = ()) -> None:
    """The three answers about the model of each run, below its name and its texts, and how the
    models differ.
    """
    from sinklab.lab.reports.build import answers

    found, contrast = answers(studies)
    for place, one in enumerate(found):
        say("\n", (one.model, "bold"))
        for parts in texts[place : place + 1]:
            say(*parts)
        for sentence in one.sentences:
            say(sentence)
    if contrast:
        say(f"\n{contrast}")


def report(
    runs: Folders,
    out: Path = Path("runs/report"),
    tables: tuple[str, ...] = ("parquet", "csv", "md"),
    sink_rule: str | None = None,
) -> None:
    """One page of the runs: the answers, the maps, the texts.

    It is report.html, with tables beside it. Several runs are shown side by side, e.g. without and
    with a sink token. Runs of `sinklab trace` give a page to explore, and three answers about each
    model, which are printed too: whether sinks exist, which they are and whether they stay, and the
    cost of blocking them (from a run of `sinklab curve` beside that of the trace). Runs of `sinklab
    train` give training curves: losses, when sinks emerge, which tokens they are. Figures for a
    paper are drawn by `sinklab figures`.

    Try
        sinklab report runs/plain runs/sink --out runs/report
        sinklab report runs/house runs/curve --tables csv
        sinklab report runs/laptop-scratch runs/laptop-scratch-sink --out runs/curves
        sinklab report runs/house --sink-rule excess:epsilon=6

    Args:
        runs: run folders of `sinklab trace`, or of `sinklab train`, or one that holds them, such as
            that of `sinklab tour`; one kind at a time, but for those of `sinklab curve`, which
            stand beside those of `sinklab trace`.
        out: folder for the page and its tables.
        tables: formats of the tables beside the page, of parquet, csv and md; none after a bare
            --tables.
        sink_rule: definition of a sink in runs of `sinklab trace`, NAME:field=value;
            excess:epsilon=3 when left out.
    """
    from sinklab.core.registry import rules
    from sinklab.lab.reports.build import report as build
    from sinklab.lab.reports.runs import as_shown

    if not runs:
        raise ValueError(
            "report needs at least one run folder; make one with `sinklab trace` or `sinklab train`"
        )
    rule = None
    if sink_rule is not None:
        rule = rules.parse(sink_rule)
    opened = _opened(runs)
    replaced = (
        " in place of the one that was there (--out names another folder)"
        * (out / "report.html").is_file()
    )
    read = as_shown(opened, rule=rule)
    with working():
        page = build(read, out, tables=tables)
    if read[0].kind == "study":
        tell_answers(read)
    say(f"report: {page}{replaced}")


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


def figures(
    runs: Folders,
    out: Path = Path("runs/figures"),
    only: tuple[str, ...] = (),
    style: Literal["neurips", "icml", "acl", "thesis"] = "neurips",
    formats: tuple[Literal["pdf", "svg", "png"], ...] = ("pdf", "png"),
) -> None:
    """The figures of runs for a paper.

    Vector graphics of its widths, each with a caption beside it. Colour scales are shared by the
    figures of several runs, bands are 95 % intervals over samples. NAME.txt holds a caption with
    the samples, seeds and settings; names of files have the models in them.

    Try
        sinklab figures runs/plain --only figure_1
        sinklab figures runs/plain runs/sink --only sink_share layer_head_map --style icml
        sinklab figures runs/curve --formats svg

    Args:
        runs: run folders of one kind, of `sinklab trace`, `train`, `curve`, `ablate`, …
        out: folder for the figures.
        only: names of figures; all that the runs recorded enough for, when left out.
            `sinklab list figures` has them.
        style: of the widths of text and column, and sizes of letters.
        formats: of the files.
    """
    from sinklab.lab.reports.drawing import draw_all

    if not runs:
        raise ValueError(
            "figures needs at least one run folder; make one with `sinklab trace` or `sinklab "
            "train`"
        )
    opened = _opened(runs)
    with suppress(ModuleNotFoundError):
        # a study registers the figures of its kind of run
        kind = opened[0].info.kind
        if kind in studies:
            home = studies[kind].__module__.rpartition(".")[0]
            import_module(f"{home}.figures")
    with working():
        drawn = draw_all(opened, out, formats, names=only or None, paper=style)
    for name, why in drawn.skipped.items():
        say(f"not drawn: {name}: {why}")
    say(f"figures: {out} ({len(drawn.written)} files)")


def compare(
    a: Annotated[Path, tyro.conf.Positional],
    b: Annotated[Path, tyro.conf.Positional],
    out: Path = Path("runs/compare"),
) -> None:
    """Two runs side by side.

    A table of numbers on the terminal, and one page that shows both. Where both have the same
    prompts, 8 or more, each difference has its 95 % interval over them, not corrected for their
    number.

    Try
        sinklab compare runs/plain runs/sink
        sinklab compare runs/plain runs/masked --out runs/both

    Args:
        a: folder of the first run.
        b: folder of the second run; differences are second minus first.
        out: folder for the page and its tables.
    """
    from sinklab.lab.records.reading import open_run
    from sinklab.lab.reports.build import report as build
    from sinklab.lab.reports.tables import compare as compared

    runs = [open_run(run) for run in (a, b)]
    with working():
        table = compared(*runs)
        page = build(runs, out)
    _show_table(table)
    say(f"report: {page}")


def _show_table(rows: pd.DataFrame, title: str = "") -> None:
    show([[*map(_cell, row)] for row in rows.itertuples(index=False)], [*rows.columns], title)


def _cell(value: object) -> str:
    if value is None or value != value:
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def table1(
    model: tuple[str, ...] = ("tiny", "tiny-sink"),
    out: Path = Path("runs/table1"),
    chat: Literal["auto", "yes", "no"] = "auto",
    render: tuple[Path, ...] = (),
    figures: tuple[str, ...] = ("png",),
    reading: Reading = Reading(),  # noqa: B008 (a frozen record)
    plan: Plan = Plan(),  # noqa: B008
    settings: EvalSettings = EvalSettings(tasks=("gsm8k", "humaneval")),  # noqa: B008
) -> None:
    """Table 1 of the analysis paper, beside the published numbers.

    Accuracy with the 0, 1, 5 and 10 most attended keys blocked. Every cell is a run folder of
    `sinklab eval`, OUT/<model>/<task>-k<K>. Cells that are there are not scored again and an
    interrupted one goes on, so the command can be stopped and repeated. As in the paper: blocks of
    32, 256 new tokens for GSM8K and 512 for HumanEval, one token a step, temperature 0, closed
    loop; --protocols sets other ways to mask beside it. Printed and written to OUT: accuracy ±
    binomial standard error with the dose of the blocking (keys, how many of them are sinks by the
    rule, their attention), the published numbers, and which numbers of blocked keys cost more than
    5 points; below, other keys of equal mass (--controls equal_mass), and which of a diffusion and
    an autoregressive model loses more, if both have sinks and a score to lose.

    With --paper the models are those of the paper, in the type of their weights. The rows to expect
    and the cost come first; files that are not on this machine are refused. HumanEval runs code
    that models write: it takes --run-code.

    Try
        sinklab table1 --paper --run-code --device cuda --out runs/paper
        sinklab table1 --paper --model /models/LLaDA-8B-Instruct --tasks gsm8k --limit 8
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

    Args:
        model: "tiny", "tiny-sink", "tiny-causal" (inside the package), folders, or names on the
            Hub.
        out: folder for the cells and the table.
        chat: put questions into the model's chat format; auto: if it has one.
        render: only make the table from the run folders at or below these.
        figures: formats of the figure, of png, svg and pdf; none after a bare --figures.
        reading: how the weights are read.
        plan: which cells.
        settings: how the cells are scored.
    """
    from sinklab.lab.studies.benchmarks import table1_report as paper

    folders = list(render)
    if not render:
        cells = checked(plan, chat={"yes": True, "no": False}.get(chat))
        settings = checked(settings)
        if cells.paper:
            if model == inspect.signature(table1).parameters["model"].default:
                model = tuple(paper.MODELS.values())
            meant = paper.whose(model)
            rows = paper.expected([*meant.values()], settings.tasks)
            if len(rows):
                _show_table(rows, "To expect (arXiv 2510.15731v2, Table 1)")
            say(f"- {paper.NOT_RUN}")
            say(f"- {paper.cost(settings.tasks, cells.ks)}")
            changed = paper.deviations(settings, cells)
            if changed:
                say(f"- not as in the paper: {', '.join(changed)}")
            paper.check_weights(model)
            if reading.dtype == Reading().dtype:
                reading = dataclasses.replace(reading, dtype="auto")
        folders = _scored(model, out, cells, reading, settings)
    if not folders or not Processes.here().is_first:
        return
    _show([paper.write_table1(folders, out, figures)])


table1.hidden = ("mask_sinks", "control", "protocol")  # type: ignore[attr-defined]


def merge(runs: Folders, out: Path) -> None:
    """One run of several that hold parts of it.

    On machines that share no folder, or of earlier workers. They must be of the same kind, model,
    settings and seed. Parts that several of them hold are kept once, and refused if they differ.
    Their folders are removed. `--resume` writes missing parts.

    Try
        sinklab merge runs/here runs/there --out runs/both

    Args:
        runs: run folders.
        out: run folder to write; it may hold some parts already.
    """
    from sinklab.lab.records.writing import merge_runs

    run = merge_runs(runs, out)
    say(f"run folder: {run.path} ({run.info.status})")
    if run.info.status != "complete":
        say("what is missing: the command that began it, with this --out and --resume")


def onetoken(runs: Folders, out: Path = Path("runs/onetoken"), metric: str | None = None) -> None:
    """Tables 1 to 5 of the sink-token paper, likewise.

    From your run folders, each cell beside the published one. Takes folders of `sinklab train` and
    of `sinklab eval`, or folders above them. A benchmark run is matched with the training run of
    the model it scored; runs that differ in their seed alone are averaged. A cell that is missing
    is –, and the command that would fill it stands below its table. Held-out losses and the share
    of attention on the sinks come from the training runs.

    Try
        sinklab onetoken runs/ --out runs/onetoken
        sinklab onetoken runs/laptop-from-causal runs/laptop-from-causal-sink
        sinklab onetoken runs/ --metric acc_norm

    Args:
        runs: folders, at or below which run folders lie.
        out: folder for the tables.
        metric: of lm-eval, shown if a task has it, e.g. acc_norm; acc when left out.
    """
    from sinklab.lab.studies.benchmarks.onetoken import write_onetoken

    if not runs:
        raise ValueError(
            "onetoken needs a folder of runs; make them with `sinklab train` and `sinklab eval`"
        )
    _show(write_onetoken(runs, out, metric=metric))


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
