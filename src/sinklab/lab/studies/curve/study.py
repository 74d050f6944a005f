"""The cost of blocking keys as a study: arms made of settings, over rows of held-out text."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from sinklab.core.errors import Checked, limited
from sinklab.core.registry import interventions, registered, rules
from sinklab.lab.measures.names import CONTROLS
from sinklab.lab.records import Contents, of_twin, open_run
from sinklab.lab.registry import studies
from sinklab.lab.studies import (
    Study,
    Work,
    ascending,
    heldout_text,
    write_twins,
)

if TYPE_CHECKING:
    from sinklab.lab.checkpoints import Loaded
    from sinklab.lab.records import Run

UNITS = ("model", "layer", "head")


@dataclass(frozen=True)
class CurveSettings(Checked):
    """Keys to block, and where, and the text.

    Raises ValueError for unknown names and for numbers that make no sense with any model.
    """

    by: str = limited("model", one_of=UNITS)
    """Block keys in the whole model, or map the cost of blocking them in one layer, or in one head,
    at a time.
    """
    ks: tuple[int, ...] = limited((), at_least=0, read=ascending)
    """Numbers of keys to block per row, layer and query head; when left out 1 2 5 10 20, and 1 by
    layer or head. 0 is always scored.
    """
    beta: tuple[float, ...] = limited((), at_least=0, at_most=1, read=ascending)
    """Parts of their weight before the softmax that the keys keep, in place of several numbers of
    keys: 0 blocks them; 1, which changes nothing, is always scored. Then --ks is one number, 1 when
    left out.
    """
    screen: bool = False
    """By head: rank all heads by the first-order cost of blocking their most attended key, from one
    forward and one backward pass, and block keys in the first ten alone. It can miss a head whose
    key holds much.
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
    layers: tuple[int, ...] = limited((), read=ascending)
    """Layers to block keys in; all when left out."""
    edits: tuple[Any, ...] = registered(interventions, ())
    """Further edits to score, each by itself: NAME:field=value."""
    heldout: str | None = None
    """Corpus to score; None uses the excerpt in the package."""
    rows: int = limited(48, at_least=1)
    """Rows of text."""
    length: int = limited(256, at_least=2)
    """Tokens in a row that is read."""
    samples: int = limited(1, at_least=1)
    """Random masks of a row for a diffusion model; the mean counts."""
    batch: int = limited(16, at_least=1)
    """Rows per forward pass."""
    seed: int = 0
    """Seed of the masks and of random controls."""
    twin: bool | None = limited(None, free=True)
    """Score two controls on the same rows too, the model with shuffled weights and with fresh ones;
    their numbers stand beside its own. When left out, if that is little work for this model.
    """
    figures: tuple[str, ...] = limited(("png",), one_of=("png", "svg", "pdf"), free=True)
    """Formats of the figure: png, svg, pdf; a bare --figures draws none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ks and not any(self.ks):
            raise ValueError(
                "ks says how many keys are blocked, and 0 is always scored, got ks=0 alone: give a "
                "number above 0, or leave ks out"
            )
        few = len({*self.ks} - {0}) <= 1
        if self.beta and not (few and self.by == "model" and min(self.beta) < 1):
            raise ValueError(
                "beta scores one number of keys at several parts of their weight, some below 1, in "
                f"the whole model, got beta={self.beta} with ks={self.ks} and by={self.by!r}: "
                "leave out the others"
            )
        if self.screen and self.by != "head":
            raise ValueError(
                f"screen ranks heads, but by is {self.by!r}: choose by='head', or leave it out"
            )

    def chosen(self) -> CurveSettings:
        """The settings with keys and controls where they are left out."""
        ks: tuple[int, ...] = (1, 2, 5, 10, 20)
        controls: tuple[str, ...] = CONTROLS
        if self.by != "model":
            ks, controls = (1,), ("sinks",)
        if self.beta:
            ks = (1,)
        ks, controls = self.ks or ks, self.controls or controls
        beta = tuple(one for one in self.beta if one < 1)
        how: dict[str, Any] = {"ks": tuple(sorted({0, *ks})), "controls": controls, "beta": beta}
        return dataclasses.replace(self, **how)


@dataclass(frozen=True)
class Plan:
    """Rows of text, and the arms that read them."""

    text: Any
    """`HeldoutRows`"""
    arms: dict[tuple[Any, ...], list[Any]]
    batch: int
    screened: Any = None
    """Table of the screen."""


@studies.register("curve")
class Curve(Study):
    """The loss with keys blocked, in all heads or in one, and controls.

    Held-out loss with 0, 1, 2, 5, … keys blocked per head: for diffusion models the masked-token
    loss, each row under masks of its own, for autoregressive ones the next-token loss. A clean
    pass over the same text chooses the most attended keys (with --sink-rule those among them that
    it calls sinks); controls are as many random ones, and others of equal mass. Beside every loss
    stand the keys blocked, how many of them are sinks, the attention they held and the share really
    removed. Models are compared at equal count and at equal removed attention, if they have heavy
    sinks at all. Results of controls stand beside it. Each model gets a run folder OUT/<name>;
    masking_curve.md, .csv and pictures are written to OUT. What is complete is not scored again.

    With --beta the same keys keep a part of their weight instead, over the attention that this
    removes. With --by head (or layer) it maps the cost of blocking them in one head, or in all
    heads of one layer, beside the share of attention that they hold there.

    Try
        sinklab curve
        sinklab curve --beta 0 0.25 0.5 0.75 1
        sinklab curve --by head --screen --model smollm2-diffusion --rows 8 --length 64
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
    shards = True
    together = 10**9

    def __call__(self, loaded: Any, out: str | Path, settings: Any = None, **how: Any) -> Path:
        """Write a run folder, of the settings with everything chosen."""
        return super().__call__(loaded, out, (settings or CurveSettings()).chosen(), **how)

    def prepare(self, loaded: Loaded, settings: CurveSettings) -> Plan:
        """The text to score and the arms, once the model is known to score it.

        Raises:
            ValueError: for a model without a mask token or a tokenizer, rows that do not fit its
                context, a k that leaves no keys, and layers that are not there.
        """
        from sinklab.lab.scoring.arms import heldout_rows
        from sinklab.lab.scoring.requests import limit_of
        from sinklab.lab.studies.curve.arms import arms_of, screened

        limit = limit_of(loaded)
        if settings.length > limit:
            raise ValueError(
                f"texts of 'curve' must fit the context of {loaded.name}, {limit} positions, got "
                f"{settings.length}; choose a smaller length"
            )
        source = heldout_text(settings.heldout)
        text = heldout_rows(loaded, source, rows=settings.rows, length=settings.length)
        arms, table = arms_of(loaded, settings), None
        if settings.screen:
            table, arms = screened(loaded, settings, text, arms)
        return Plan(text, arms, settings.batch, table)

    def samples(self, plan: Plan) -> int:
        """Rows of text."""
        return len(plan.text.ids_RS)

    def part_size(self, plan: Plan) -> int:
        """Rows of a batch."""
        return plan.batch

    def make(self, work: Work, samples: Sequence[int]) -> dict[int, Contents]:
        """Loss and dose of these rows under every arm."""
        from sinklab.lab.studies.curve.arms import rows_of

        plan: Plan = work.plan
        first, last, of = samples[0] + 1, samples[-1] + 1, self.samples(plan)
        work.progress.stage(f"rows {first} to {last} of {of} under {len(plan.arms)} arms")
        tick = work.progress.counter(len(plan.arms) * work.settings.samples)
        rows = rows_of(work.loaded, work.settings, plan, samples, tick)
        return {int(row): Contents({"curve_rows": some}) for row, some in rows.groupby("row")}

    def finish(self, work: Work) -> None:
        """Write the costs that follow from all rows, and those of controls."""
        import pandas as pd

        from sinklab.lab.studies.curve.arms import cost_table, rows_of

        plan: Plan = work.plan
        parts = [work.run.info.part(part) for part in work.run.info.parts]
        if work.run.info.status != "complete":
            rows = open_run(work.run.path).table("curve_rows")
            work.run.table("curve", cost_table(rows, work.settings, plan.text))
            if plan.screened is not None:
                work.run.table("screen", plan.screened)

        def write(control: Loaded, kind: str) -> None:
            tick = work.progress.counter(len(parts) * len(plan.arms) * work.settings.samples)
            found = [rows_of(control, work.settings, plan, part, tick) for part in parts]
            rows = pd.concat(found, ignore_index=True)
            work.run.table(of_twin("curve_rows", kind), rows)
            table = cost_table(rows, work.settings, plan.text)
            work.run.table(of_twin("curve", kind), table)

        tokens = plan.text.ids_RS.numel() * len(plan.arms) * work.settings.samples
        write_twins(work, write, tokens)

    def results(self, runs: list[Run], out: Path, settings: CurveSettings) -> list[str]:
        """Costs in words, and the paths of their tables and figures."""
        from sinklab.lab.studies.curve.figures import write_costs
        from sinklab.lab.studies.curve.verdicts import cost_sentences

        drawn = write_costs(runs, out, settings.figures)
        return [*cost_sentences(runs), f"drawn: {', '.join(map(str, drawn))}"]


masking_curve = Curve()
"""Score held-out text with 0, 1, 2, … keys blocked, and write a run folder of kind "curve".

Table ``curve_rows``: loss and dose of every row of text under every arm, from which all else
follows (`arm_losses`); table ``curve``: a line for each arm (`cost_table`). Each of these of
controls too, with the name of the control behind it (curve-permuted), as table ``twins`` says.
Table ``screen``: the cost of every head to first order.

Args:
    loaded: a diffusion model or an autoregressive one, with its tokenizer.
    out: folder to write: empty, absent, or with this very curve, which is not scored again.
    settings: the keys to block, and the text.
    progress: shows the progress.

Raises:
    ValueError: for a model without a mask token, rows that do not fit its context, a k that does
        not fit a row.
"""
