"""`sinklab eval`, `table1` and `onetoken`: benchmarks and the papers' tables."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from sinklab.cli.command import Reading
from sinklab.cli.progress import working
from sinklab.cli.watching import loaded_here, run_settings
from sinklab.studies.base import folder_names
from sinklab.studies.benchmarks.settings import EvalSettings
from sinklab.studies.processes import Processes, refuse_taken

if TYPE_CHECKING:
    from sinklab.reports.printed import Printed


@dataclass(frozen=True)
class Evaluation(EvalSettings):
    """The settings of a benchmark run as the command line takes them."""

    def __post_init__(self) -> None:
        """Nothing is checked while arguments are parsed: the run makes its own settings, and says what is wrong in one
        line.
        """

    def checked(self) -> EvalSettings:
        """The settings themselves. Raises ValueError for what makes no sense."""
        return run_settings(EvalSettings, self)


def evaluate_command(
    model: str = "tiny",
    out: Path = Path("runs/eval"),
    reading: tyro.conf.OmitArgPrefixes[Reading] = Reading(),  # noqa: B008 (a frozen record)
    settings: tyro.conf.OmitArgPrefixes[Evaluation] = Evaluation(),
) -> None:
    """Score a model on benchmarks, with its sinks or without them.

    Prompts, metrics and filters are lm-eval's own. Diffusion models write by denoising and score continuations by a
    Monte Carlo bound; autoregressive ones write token after token and score exactly. --mask-sinks K hides the K keys
    that received most at the step before from every head while the model writes (where it scores: that receive most in
    a clean pass over the same text). The run folder holds the scores, every prompt and answer, and what the sinks did
    in the very runs that were scored; lm-eval's own result files lie beside them. Every answer is kept as it comes:
    --resume goes on after an interruption. Under `accelerate launch` the documents are dealt to the processes.

    Benchmarks are read from files below --data, or from the Hub when it is left out. HumanEval runs what the model
    wrote, in a process of its own with limits, and only with --run-code.

    Try
        sinklab eval --tasks gsm8k --data benchmarks --limit 8 --num-fewshot 0 --new-tokens 64
        sinklab eval --tasks piqa,arc_easy --data benchmarks --limit 20 --mc-samples 16 --out runs/choices
        sinklab eval --model tiny-sink --tasks gsm8k --data benchmarks --mask-sinks 5 --limit 8 --out runs/masked
        sinklab eval --tasks humaneval --data benchmarks --run-code --limit 4 --out runs/code
        sinklab eval --model /models/LLaDA-8B-Instruct --dtype bfloat16 --device cuda --tasks gsm8k --chat --resume
        accelerate launch --num_processes 4 -m sinklab.cli eval --tasks hellaswag --device cuda --out runs/hellaswag

    Args:
        model: "tiny" or "tiny-sink" (inside the package), a folder, or a name on the Hub.
        out: folder to write; it must be empty or absent, but for --resume.
        reading: how the weights are read.
        settings: what to score, and how.
    """
    # read when tqdm is imported: the bars of lm-eval and datasets would run through ours
    os.environ.setdefault("TQDM_DISABLE", "1")
    checked = settings.checked()
    first = Processes.here().is_first
    if not checked.resume and first:
        refuse_taken(out)
    from sinklab.studies.benchmarks.offline import needs_lm_eval
    from sinklab.studies.benchmarks.run import evaluate
    from sinklab.studies.benchmarks.tables import score_lines

    needs_lm_eval()
    with working() as progress:
        folder = evaluate(checked, lambda: loaded_here(model, reading), out, progress=progress)
    if first:
        print("\n".join([*score_lines(folder), f"run folder: {folder}"]))


evaluate_command.__name__ = "eval"


@dataclass(frozen=True)
class Cells(Evaluation):
    """The settings of the table's cells as the command line takes them."""

    tasks: tuple[str, ...] = ("gsm8k", "humaneval")
    """Benchmarks, separated by commas or spaces."""
    mask_sinks: tyro.conf.Suppress[int | None] = None
    """Differs from cell to cell."""
    control: tyro.conf.Suppress[str] = "sinks"
    """Differs from cell to cell."""
    chat: tyro.conf.Suppress[bool] = False
    """Asked for the whole table."""
    resume: tyro.conf.Suppress[bool] = False
    """A table always goes on."""


def table1(
    model: tuple[str, ...] = ("tiny", "tiny-sink"),
    out: Path = Path("runs/table1"),
    ks: tuple[int, ...] = (0, 1, 5, 10),
    controls: tuple[Literal["sinks", "random", "recent", "lowest"], ...] = ("sinks",),
    chat: Literal["auto", "yes", "no"] = "auto",
    render: tuple[Path, ...] = (),
    figures: tuple[str, ...] = ("png",),
    reading: tyro.conf.OmitArgPrefixes[Reading] = Reading(),  # noqa: B008 (a frozen record)
    settings: tyro.conf.OmitArgPrefixes[Cells] = Cells(),
) -> None:
    """Table 1 of the analysis paper: accuracy with 0, 1, 5 and 10 sinks masked, beside what the paper prints.

    Every cell is a run folder of `sinklab eval`, OUT/<model>/<task>-k<K>. Cells that are there are not scored again and
    an interrupted one goes on, so the command can be stopped and repeated. As in the paper: blocks of 32, 256 new
    tokens for GSM8K and 512 for HumanEval, one token a step, temperature 0, closed loop. Printed and written to OUT:
    accuracy ± binomial standard error, the published numbers, and which numbers of masked sinks cost more than 5
    points.

    Try
        sinklab table1 --tasks gsm8k --data benchmarks --limit 4 --num-fewshot 0 --new-tokens 32 --ks 0 5
        sinklab table1 --model tiny --tasks gsm8k,humaneval --run-code --data benchmarks --limit 2 --num-fewshot 0
        sinklab table1 --render runs/table1 --out runs/table1
        sinklab table1 --model /models/LLaDA-8B-Instruct /models/Dream-v0-Instruct-7B --run-code --device cuda

    Args:
        model: "tiny" or "tiny-sink" (inside the package), folders, or names on the Hub.
        out: folder for the cells and the table.
        ks: numbers of sinks to mask; 0 is always there.
        controls: what to mask: sinks, and as many random, recent or lowest columns beside them.
        chat: put questions into the model's chat format; auto: where it has one.
        render: only make the table from the run folders at or below these.
        figures: formats of the figure, of png, svg and pdf; none after a bare --figures.
        reading: how the weights are read.
        settings: how the cells are scored.
    """
    from sinklab.studies.benchmarks.table1_report import write_table1

    folders: list[Path] = list(render)
    if not render:
        folders = _cells(model, out, (ks, controls, {"yes": True, "no": False}.get(chat)), reading, settings)
    if not Processes.here().is_first:
        return
    _show([write_table1(folders, out, figures)])


def onetoken(
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional],
    out: Path = Path("runs/onetoken"),
    metric: str | None = None,
) -> None:
    """Tables 1 to 5 of the sink-token paper from your run folders, each cell beside the published one.

    Takes folders of `sinklab train` and of `sinklab eval`, or folders above them. A benchmark run is matched with the
    training run whose model it scored; runs that differ in their seed alone are averaged. A cell that is missing is –,
    and the command that would fill it stands below its table. Held-out losses and the share of attention on the sinks
    come from the training runs.

    Try
        sinklab onetoken runs/ --out runs/onetoken
        sinklab onetoken runs/laptop-from-causal runs/laptop-from-causal-sink
        sinklab onetoken runs/ --metric acc_norm

    Args:
        runs: folders, at or below which run folders lie.
        out: folder for the tables.
        metric: of lm-eval, shown where a task has it, e.g. acc_norm; acc when left out.
    """
    from sinklab.studies.benchmarks.onetoken import write_onetoken

    if not runs:
        raise ValueError("onetoken needs a folder of runs; make them with `sinklab train` and `sinklab eval`")
    _show(write_onetoken(runs, out, metric=metric))


def _show(tables: list[Printed]) -> None:
    """Tables on the terminal, their notes below them, and where they were written."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, markup=False)
    said: list[str] = []
    for one in tables:
        shown = Table(title=Text(one.title), title_justify="left")
        for name in one.text.columns:
            shown.add_column(Text(str(name)))
        for row in one.text.itertuples(index=False):
            shown.add_row(*(Text(str(cell)) for cell in row))
        console.print(shown)
        # tables of one paper share notes
        for note in [note for note in one.notes if note not in said]:
            said.append(note)
            console.print(f"- {note}", soft_wrap=True)
    print(f"written: {', '.join(str(path) for one in tables for path in one.paths)}")


def _cells(
    model: tuple[str, ...], out: Path, plan: tuple[Any, ...], reading: Reading, settings: Evaluation
) -> list[Path]:
    from functools import partial

    from sinklab.studies.benchmarks.table1 import Plan
    from sinklab.studies.benchmarks.table1 import table1 as scored

    # read when tqdm is imported: the bars of lm-eval and datasets would run through ours
    os.environ.setdefault("TQDM_DISABLE", "1")
    if not model:
        raise ValueError("the table needs at least one model; give --model tiny, for example")
    loaders = {
        folder: partial(loaded_here, name, reading) for name, folder in zip(model, folder_names(model), strict=True)
    }
    with working() as progress:
        return scored(loaders, settings.checked(), out, Plan(*plan), progress=progress)
