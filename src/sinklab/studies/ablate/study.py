"""The ablation map as a study: its settings and its command."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinklab.errors import Checked, limited
from sinklab.registry import of, rules, studies
from sinklab.studies.base import Study, deferred

if TYPE_CHECKING:
    from sinklab.records.reading import Run

UNITS = ("head", "layer")
REMOVALS = ("mask", "zero_value")


@dataclass(frozen=True)
class AblateSettings(Checked):
    """What is hidden where, and from what text.

    Raises ValueError for names and numbers that make no sense with any model.
    """

    by: str = limited("head", one_of=UNITS)
    """Hide keys in one head at a time, or in all heads of one layer."""
    k: int = limited(1, at_least=1)
    """Keys to hide per row and head: those that receive most; with a rule at most so many."""
    sink_rule: Any = of(rules, None)  # noqa: RUF009
    """What counts as a sink, NAME:field=value: only such keys are hidden, at most k. When left out the most attended
    keys are, sinks or not."""
    removal: str = limited("mask", one_of=REMOVALS)
    """mask (before the softmax, the weight goes to other keys) or zero_value (the weight stays and adds nothing)."""
    layers: tuple[int, ...] = ()
    """Layers to go through; all when left out."""
    heldout: str | None = None
    """Corpus to score; None uses the excerpt in the package."""
    rows: int = limited(48, at_least=1)
    """Rows of text."""
    length: int = limited(256, at_least=2)
    """Tokens in a row."""
    batch: int = limited(16, at_least=1)
    """Rows per forward pass; the noise of a row depends on its batch."""
    seed: int = 0
    """Seed of the noise."""

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = None if self.sink_rule is None else rules.parse(self.sink_rule)
        object.__setattr__(self, "sink_rule", rule)
        object.__setattr__(self, "layers", tuple(sorted(set(self.layers))))


@studies.register("ablate")
class Ablate(Study):
    """Map what the most attended keys are worth: the change of the held-out loss with them hidden in one head alone.

    For every layer and head, beside the share of attention that these keys hold there; with --by layer in all heads of
    a layer at once. For diffusion models the masked-token loss, for autoregressive ones the next-token loss; a clean
    pass over the same text chooses the keys. Costs a forward pass a head and batch of rows. Writes a run folder,
    ablation.md, ablation.csv and the two maps.

    Try
        sinklab ablate tiny --rows 12 --length 128
        sinklab ablate tiny --sink-rule excess:epsilon=3 --out runs/ablate-rule
        sinklab ablate runs/laptop-causal/model --by layer --k 5
    """

    Settings = AblateSettings
    positional = True
    parts = "ablation"
    shards = True
    prepare = deferred("sinklab.studies.ablate.run:prepare")
    run = deferred("sinklab.studies.ablate.run:score")
    finish = deferred("sinklab.studies.ablate.run:summarize")
    sentences = deferred("sinklab.studies.ablate.figures:ablation_sentences")

    @dataclass(frozen=True)
    class Options:
        """How the maps are drawn."""

        figures: tuple[str, ...] = ("png",)
        """Formats of the figure: png, svg, pdf; a bare --figures draws none."""

    def samples(self, plan: Any) -> int:
        """One a batch of rows."""
        return len(plan.batches)

    def draw(self, runs: list[Run], out: Path, options: Any) -> list[Path]:
        """ablation.md, ablation.csv and the maps, in each run folder."""
        from sinklab.studies.ablate.figures import write_ablation

        return [path for run in runs for path in write_ablation(run, options.figures)]
