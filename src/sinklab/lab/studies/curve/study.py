"""The cost of blocking keys as a study: its settings, the base of its two kinds of run, its
command, and the function that Python calls.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from sinklab.core.errors import Checked, limited
from sinklab.core.registry import interventions, registered, rules
from sinklab.lab.measures.names import CONTROLS
from sinklab.lab.registry import studies
from sinklab.lab.studies import ScoredStudy, Study, ascending

CELL = ["layer", "head"]
"""Columns that tell the cells of a map apart; head −1 for all heads of the layer."""
DOSE = ("keys", "sinks", "held", "removed", "matched")
"""Columns of a curve on the dose."""
UNITS = ("model", "layer", "head")
REMOVALS = ("mask", "zero_value")


@dataclass(frozen=True)
class CurveSettings(Checked):
    """Keys to block, where and while the model does what, and the text.

    Raises ValueError for unknown names and for numbers that make no sense with any model.
    """

    by: str = limited("model", one_of=UNITS)
    """Block keys in the whole model, or map the cost of blocking them in one layer, or in one head,
    at a time.
    """
    ks: tuple[int, ...] = limited((), at_least=0)
    """Numbers of keys to block per row, layer and query head; when left out 0 1 2 5 10 20 (0 is
    always scored), 1 by layer or head.
    """
    controls: tuple[str, ...] = limited((), one_of=CONTROLS)
    """Keys to block: those that receive most (sinks), as many others drawn (random), others that
    are no sinks and together hold as much (equal_mass, compared in the heads that have some). When
    left out these three; sinks by layer or head.
    """
    sink_rule: Any = registered(rules, None)
    """Rule for sinks, NAME:field=value: of the most attended keys only such are blocked, at most k.
    When left out all k are, and excess:epsilon=3 counts how many of them are sinks.
    """
    removals: tuple[str, ...] = limited((), one_of=REMOVALS)
    """Ways of removal: mask (before the softmax, the weight goes to other keys) or zero_value (the
    weight stays and adds nothing). mask when left out.
    """
    layers: tuple[int, ...] = limited((), read=ascending)
    """Layers of a map; all when left out."""
    edits: tuple[Any, ...] = registered(interventions, ())
    """Further edits to score, each by itself: NAME:field=value."""
    heldout: str | None = None
    """Corpus to score; None uses the excerpt in the package."""
    rows: int | None = limited(None, at_least=1)
    """Rows of text; 48 when left out."""
    length: int = limited(256, at_least=2)
    """Tokens in a row that is read."""
    draws: int = limited(1, at_least=1)
    """Repetitions per row, each with its own noise and random columns; the mean counts."""
    batch: int | None = limited(None, at_least=1)
    """Rows per forward pass; 16 when left out."""
    seed: int = 0
    """Seed of the noise and of random controls."""
    twin: bool | None = limited(None, free=True)
    """Score two controls on the same rows too, the model with shuffled weights and with fresh ones;
    their numbers stand beside its own. When left out, if both take less than a minute. A curve that
    is there gets none.
    """


class CostStudy(ScoredStudy):
    """One kind of run that `sinklab curve` makes."""

    Settings = CurveSettings
    defaults: ClassVar[dict[str, Any]]
    """Values of settings that are left out."""
    reads: ClassVar[tuple[str, ...]]
    """Settings that it has, beside those with defaults."""

    def filled(self, settings: CurveSettings) -> CurveSettings:
        """The settings with its defaults. Raises ValueError for settings of another kind."""
        own = (*self.defaults, *self.reads)
        for one in dataclasses.fields(CurveSettings):
            value = getattr(settings, one.name)
            if one.name not in (*own, "by") and value != one.default:
                raise ValueError(
                    f"{one.name}={value} belongs to another kind of curve than by={settings.by}, "
                    f"whose settings are {', '.join(own)}; leave it out"
                )
        changes = {
            name: value
            for name, value in self.defaults.items()
            if getattr(settings, name) in (None, ())
        }
        return dataclasses.replace(settings, **changes)

    def record(self, settings: CurveSettings) -> dict[str, Any]:
        """Its own settings, as the run folder keeps them."""
        kept = super().record(settings)
        return {name: kept[name] for name in (*self.defaults, *self.reads) if name in kept}


@studies.register("curve")
class Curve(Study):
    """The loss with keys blocked, in all heads or in one, and controls.

    Held-out loss with 0, 1, 2, 5, … keys blocked per head: for diffusion models the masked-token
    loss, for autoregressive ones the next-token loss. A clean
    pass over the same text chooses the most attended keys (with --sink-rule those among them that
    it calls sinks); controls are as many random ones, and others of equal mass. Beside every loss
    stand the keys blocked, how many of them are sinks, the attention they held and the share really
    removed. Models are compared at equal count and at equal removed attention, if they have heavy
    sinks at all. Results of controls stand beside it. Each model gets a run folder OUT/<name>;
    masking_curve.md, .csv and pictures are written to OUT. What is complete is not scored again.

    With --by head (or layer) it maps the cost of blocking them in one head, or in all heads of one
    layer, beside the share of attention that they hold there: ablation.md, ablation.csv and two
    maps in each run folder.

    Try
        sinklab curve
        sinklab curve --model tiny --ks 0 1 5 --rows 12 --out runs/quick
        sinklab curve --model tiny --sink-rule excess:epsilon=3 --edits \\
            block_keys:keys=top:k=5,how=zero_value
        sinklab curve --model tiny runs/laptop-causal/model --figures svg
        sinklab curve --model /models/LLaDA-8B-Instruct --dtype bfloat16 --device cuda --heldout \\
            my_texts/ --length 512
        sinklab curve --by head --model tiny --rows 12 --length 128 --out runs/map
    """

    Settings = CurveSettings
    model: ClassVar[str | tuple[str, ...]] = ("tiny", "tiny-sink")
    group = "intervene"
    kinds: ClassVar = ("curve", "ablate")
    keeps = True
    shards = True

    @dataclass(frozen=True)
    class Options:
        """Look of the figures."""

        change: Literal["log", "linear"] = "linear"
        """Scale of a curve's vertical axis."""
        figures: tuple[str, ...] = ("png",)
        """Formats of the figure: png, svg, pdf; a bare --figures draws none."""

    def resolved(self, settings: Any) -> tuple[CostStudy, Any]:
        """The study that these settings ask for, and they with its defaults.

        Raises:
            ValueError: for settings of another one.
        """
        from sinklab.lab.studies.curve.reading import CostCurve, CostMap

        chosen: CostStudy = CostCurve()
        if settings.by != "model":
            chosen = CostMap()
        return chosen, chosen.filled(settings)

    def record(self, settings: Any) -> dict[str, Any]:
        """The settings as the run folder keeps them."""
        chosen, settings = self.resolved(settings)
        return chosen.record(settings)


masking_curve = Curve()
"""Score held-out text with 0, 1, 2, … keys blocked, and write a run folder of kind "curve".

A diffusion model is scored by its masked-token bound, an autoregressive one by its next-token loss;
the blocked keys are chosen by a clean pass over the same row, see `edited_losses`. Table ``curve``:
one row per (k, control), see `curve_table`; table ``curve_rows``: loss and dose of every row of
text under every arm, from which all else follows; table ``phenomenon``: by row of text, main, the
share of attention on the key of a head that receives most, and gu, the share of heads that give it
more than 30 % (mean over layers and heads); table ``grown``: change of the other keys of each head
when that one is masked, see `grown_table`. Each of these of controls too, with the name of
the control behind it (curve-permuted), as table ``twins`` says.

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
