"""The masking curve as a study: its settings, its command, and the function that Python calls."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sinklab.core.errors import Checked, limited
from sinklab.core.probing.scope import CONTROLS
from sinklab.core.registry import interventions, of, rules, studies
from sinklab.lab.studies.base import Study, deferred
from sinklab.lab.studies.processes import Amount

if TYPE_CHECKING:
    from sinklab.lab.records.reading import Run


@dataclass(frozen=True)
class CurveSettings(Checked):
    """Keys to hide, the text to score, and how sure the result has to be.

    Raises ValueError for unknown controls and for numbers that make no sense with any model.
    """

    ks: tuple[int, ...] = limited((0, 1, 2, 5, 10, 20), at_least=0)
    """Numbers of keys to hide per row, layer and query head; 0 is always scored."""
    controls: tuple[str, ...] = limited(("sinks", "random", "equal_mass"), one_of=CONTROLS)
    """Keys to hide: those that receive most (sinks), as many others drawn (random), others that are
    no sinks and together hold as much (equal_mass, compared in the heads that have some), the least
    attended (lowest), the last (recent).
    """
    sink_rule: Any = of(rules, None)  # noqa: RUF009
    """Rule for sinks, NAME:field=value: of the most attended keys only such are hidden, at most k.
    When left out all k are, and excess:epsilon=3 counts how many of them are sinks.
    """
    edits: tuple[Any, ...] = field(default=(), metadata={"registry": interventions})
    """Further edits to score, each by itself: NAME:field=value."""
    heldout: str | None = None
    """Corpus to score; None uses the excerpt in the package."""
    rows: int = limited(48, at_least=1)
    """Rows of text."""
    length: int = limited(256, at_least=2)
    """Tokens in a row."""
    draws: int = limited(1, at_least=1)
    """Repetitions per row, each with its own noise and random columns; the mean counts."""
    batch: int = limited(16, at_least=1)
    """Rows per forward pass."""
    seed: int = 0
    """Seed of the noise and of the random columns."""
    twin: bool | None = limited(None, free=True)
    """Score two controls on the same rows too, the model with shuffled weights and with fresh ones;
    their numbers stand beside its own. When left out, if both take less than a minute. A curve that
    is there gets none.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "ks", tuple(sorted({0, *self.ks})))
        object.__setattr__(self, "controls", tuple(dict.fromkeys(self.controls)))
        if not self.controls and self.ks != (0,):
            raise ValueError(
                f"a curve over ks {self.ks} needs at least one of the controls "
                f"{', '.join(CONTROLS)}"
            )


@studies.register("curve")
class Curve(Study):
    """Measure the held-out loss with 0, 1, 2, 5, … keys hidden per head: a cheap proxy for a
    benchmark.

    For diffusion models the masked-token loss, for autoregressive ones the next-token loss. A clean
    pass over the same text chooses the most attended keys (with --sink-rule those among them that
    it calls sinks); controls are as many random ones, and others of equal mass. Beside every loss
    stand the keys hidden, how many of them are sinks, the attention they held and the share really
    removed. Models are compared at equal count and at equal removed attention, if they have heavy
    sinks at all. Results of controls stand beside it. Each model gets a run folder OUT/<name>;
    masking_curve.md, .csv and pictures are written to OUT. A complete curve is not scored again.

    Try
        sinklab curve
        sinklab curve --model tiny --ks 0 1 5 --rows 12 --out runs/quick
        sinklab curve --model tiny --sink-rule excess:epsilon=3 --edits \\
            mask_sinks:k=5,removal=zero_value
        sinklab curve --model tiny runs/laptop-causal/model --relative --scale linear
        sinklab curve --model /models/LLaDA-8B-Instruct --dtype bfloat16 --device cuda --heldout \\
            my_texts/ --length 512
    """

    Settings = CurveSettings
    model = ("tiny", "tiny-sink")
    keeps = True
    prepare = deferred("sinklab.lab.studies.curve.run:prepare")
    run = deferred("sinklab.lab.studies.curve.run:score")
    sentences = deferred("sinklab.lab.studies.curve.figures:masking_curve_sentences")

    def amount(self, settings: CurveSettings, info: Any) -> Amount:
        """A pass over all rows clean, one for every number of keys, control and edit, and three for
        the attention that sinks hold.
        """
        # beside keys of equal mass stand the most attended ones of the same heads
        controls = len(settings.controls) + ("equal_mass" in settings.controls)
        ways = 1 + (len(settings.ks) - 1) * controls + len(settings.edits)
        batches = math.ceil(settings.rows / settings.batch)
        counted, evaluations = (
            batches * settings.draws * ways,
            batches * (settings.draws * ways + 3),
        )
        positions = min(settings.rows, settings.batch) * settings.length
        first, words = counted / evaluations, f"{settings.rows} rows × {ways} ways"
        return Amount(words, evaluations, positions, twins=settings.twin, first=first)

    @dataclass(frozen=True)
    class Options:
        """Look of the curves."""

        relative: bool = False
        """Draw the change relative to the loss with nothing hidden, in percent."""
        scale: Literal["log", "linear"] = "log"
        """Scale of the figure's horizontal axis."""
        change: Literal["log", "linear"] = "linear"
        """Scale of its vertical axis."""
        figures: tuple[str, ...] = ("png",)
        """Formats of the figure: png, svg, pdf; a bare --figures draws none."""

    def draw(self, runs: list[Run], out: Path, options: Any) -> list[Path]:
        """masking_curve.md, .csv and the figure."""
        from sinklab.lab.studies.curve.figures import write_masking_curves

        look = asdict(options)
        return write_masking_curves(runs, out, look.pop("figures"), **look)


masking_curve = Curve()
"""Score held-out text with 0, 1, 2, … keys blocked, and write a run folder of kind "curve".

A diffusion model is scored by its masked-token bound, an autoregressive one by its next-token loss;
the blocked keys are chosen by a clean pass over the same row, see `edited_losses`. Table ``curve``:
one row per (k, control), see `curve_table`; table ``curve_rows``: the loss of every row of text,
from which all else follows; table ``phenomenon``: by row of text, main, the share of attention on
the key of a head that receives most, and gu, the share of heads that give it more than 30 % (mean
over layers and heads); table ``grown``: change of the other keys of each head when that one is
masked, see `grown_table`. Each of these of untrained twins too, with the name of the twin behind it
(curve-permuted), as table ``twins`` says.

Args:
    loaded: a diffusion model or an autoregressive one, with its tokenizer.
    out: folder to write; it must be empty or absent, or hold this very curve, which is not scored
        again.
    settings: the keys to block, and the text.
    progress: shows the progress.
    overwrite: replace a run that is there.

Raises:
    ValueError: for a model without a mask token, rows that do not fit its context, a k that does
        not fit a row.
"""
