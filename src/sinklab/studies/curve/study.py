"""The masking curve as a study: its command, and the function that Python calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sinklab.registry import studies
from sinklab.studies.base import Study, Work, heldout_text
from sinklab.studies.curve.settings import CurveSettings

if TYPE_CHECKING:
    from sinklab.checkpoints.loading import Loaded
    from sinklab.records.reading import Run
    from sinklab.studies.processes import Progress


@studies.register("curve")
class Curve(Study):
    """Measure the held-out loss with 0, 1, 2, 5, … sinks hidden per head: a cheap proxy for a benchmark.

    For diffusion models the masked-token loss, for autoregressive ones the next-token loss. A clean pass over the same
    text selects the columns; the controls are equally many random and least attended ones. Each model gets a run folder
    OUT/<name>; masking_curve.md, .csv and .png are written to OUT. A complete curve is not scored again.

    Try
        sinklab curve
        sinklab curve --model tiny --ks 0 1 5 --rows 12 --out runs/quick
        sinklab curve --model tiny runs/laptop-causal/model --relative --scale linear
        sinklab curve --model /models/LLaDA-8B-Instruct --dtype bfloat16 --device cuda --heldout my_texts/ --length 512
    """

    Settings = CurveSettings
    model = ("tiny", "tiny-sink")
    keeps = True

    @dataclass(frozen=True)
    class Options:
        """How the curves are drawn."""

        relative: bool = False
        """Draw the change relative to the loss with nothing hidden, in percent."""
        scale: Literal["log", "linear"] = "log"
        """Scale of the figure's horizontal axis."""
        change: Literal["log", "linear"] = "linear"
        """Scale of its vertical axis."""
        figures: tuple[str, ...] = ("png",)
        """Formats of the figure: png, svg, pdf; a bare --figures draws none."""

    def prepare(self, loaded: Loaded, settings: CurveSettings, progress: Progress) -> Any:
        """The text to score, once the model is known to score it."""
        from sinklab.scoring.heldout import heldout_rows
        from sinklab.studies.curve.run import check_curve

        check_curve(loaded, settings)
        return heldout_rows(loaded, heldout_text(settings.heldout), rows=settings.rows, length=settings.length)

    def run(self, work: Work) -> None:
        """Score every choice of columns."""
        from sinklab.studies.curve.run import score

        score(work)

    def sentences(self, runs: list[Run]) -> list[str]:
        """What the curves say."""
        from sinklab.studies.curve.figures import masking_curve_sentences

        return masking_curve_sentences(runs)

    def draw(self, runs: list[Run], out: Path, options: Any) -> list[Path]:
        """masking_curve.md, .csv and the figure."""
        from sinklab.studies.curve.figures import write_masking_curves

        look = {name: getattr(options, name) for name in ("relative", "scale", "change")}
        return write_masking_curves(runs, out, options.figures, **look)


def masking_curve(
    loaded: Loaded,
    out: str | Path,
    settings: CurveSettings | None = None,
    *,
    progress: Progress | Callable[[str], object] | None = None,
    overwrite: bool = False,
) -> Path:
    """Score held-out text with 0, 1, 2, … columns hidden, and write a run folder of kind "curve".

    A diffusion model is scored by its masked-token bound, an autoregressive one by its next-token loss; what is hidden
    is chosen by a clean pass over the same row, see `hidden_losses`. Table ``curve``: one row per (k, control), see
    `curve_table`; table ``curve_rows``: the loss of every row of text, from which all else follows.

    Args:
        loaded: a diffusion model or an autoregressive one, with its tokenizer.
        out: folder to write; it must be empty or absent, or hold this very curve, which is not scored again.
        settings: what to hide, from what text.
        progress: shows the progress.
        overwrite: replace a run that is there.

    Raises:
        ValueError: for a model without a mask token, rows that do not fit its context, a k that does not fit a row.
    """
    return Curve()(loaded, out, settings, progress=progress, overwrite=overwrite)
