"""Settings and commands of two studies: the ablation map, and the distance of texts written with
keys blocked.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from sinklab.core.errors import Checked, limited
from sinklab.core.probing.scope import CONTROLS, PROTOCOLS
from sinklab.core.registry import of, rules, studies
from sinklab.lab.studies.base import Study, deferred
from sinklab.lab.studies.processes import Amount

UNITS = ("head", "layer")
REMOVALS = ("mask", "zero_value")


@dataclass(frozen=True)
class AblateSettings(Checked):
    """Keys to block, the place, and the text to score.

    Raises ValueError for names and numbers that make no sense with any model.
    """

    by: str = limited("head", one_of=UNITS)
    """Hide keys in one head at a time, or in all heads of one layer."""
    k: int = limited(1, at_least=1)
    """Keys to hide per row and head: those that receive most; with a rule at most so many."""
    sink_rule: Any = of(rules, None)  # noqa: RUF009
    """Rule for sinks, NAME:field=value: only such keys are hidden, at most k. When left out the
    most attended keys are, sinks or not.
    """
    removal: str = limited("mask", one_of=REMOVALS)
    """mask (before the softmax, the weight goes to other keys) or zero_value (the weight stays and
    adds nothing).
    """
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
    twin: bool | None = limited(None, free=True)
    """Map two controls on the same rows too, the model with shuffled weights and with fresh ones;
    their numbers stand beside its own. When left out, if both take less than a minute.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "layers", tuple(sorted(set(self.layers))))


@studies.register("ablate")
class Ablate(Study):
    """Map the cost of hiding the most attended keys: the change of the held-out loss with them
    hidden in one head alone.

    For every layer and head, beside the share of attention that these keys hold there; with --by
    layer in all heads of a layer at once. For diffusion models the masked-token loss, for
    autoregressive ones the next-token loss; a clean pass over the same text chooses the keys. Costs
    a forward pass a head and batch of rows. Results of controls stand beside it. Writes a run
    folder, ablation.md, ablation.csv and the two maps.

    Try
        sinklab ablate --model tiny --rows 12 --length 128
        sinklab ablate --model tiny --sink-rule excess:epsilon=3 --out runs/ablate-rule
        sinklab ablate --model runs/laptop-causal/model --by layer --k 5
    """

    Settings = AblateSettings
    positional = True
    parts = "ablation"
    shards = True
    prepare = deferred("sinklab.lab.studies.ablate.run:prepare")
    run = deferred("sinklab.lab.studies.ablate.run:score")
    finish = deferred("sinklab.lab.studies.ablate.run:summarize")
    sentences = deferred("sinklab.lab.studies.ablate.figures:ablation_sentences")
    draw = deferred("sinklab.lab.studies.ablate.figures:draw_ablation")

    @dataclass(frozen=True)
    class Options:
        """Look of the maps."""

        figures: tuple[str, ...] = ("png",)
        """Formats of the figure: png, svg, pdf; a bare --figures draws none."""

    def amount(self, settings: AblateSettings, info: Any) -> Amount:
        """A pass over all rows clean, and one with every head or layer edited."""
        cells = (len(settings.layers) or info.layers) * (info.heads if settings.by == "head" else 1)
        evaluations = math.ceil(settings.rows / settings.batch) * (1 + cells)
        positions = min(settings.rows, settings.batch) * settings.length
        words = f"{settings.rows} rows × {cells} {settings.by}s"
        return Amount(words, evaluations, positions, twins=settings.twin)

    def samples(self, plan: Any) -> int:
        """Number of samples: one per batch of rows."""
        return len(plan.batches)


@dataclass(frozen=True)
class DistanceSettings(Checked):
    """Keys to block while texts are written, and the texts.

    Raises ValueError for names and numbers that make no sense with any model.
    """

    protocols: tuple[str, ...] = limited(("paper", "held", "clean"), one_of=PROTOCOLS, needed=True)
    """Choice of keys, and for how long: paper (the top k of the step before, arXiv 2510.15731),
    held (the first top k stay hidden), rule (those of them that are sinks stay hidden), clean (the
    top k of a clean pass at the same step).
    """
    ks: tuple[int, ...] = limited((1, 5), at_least=1, needed=True)
    """Numbers of keys to hide per layer and head."""
    removals: tuple[str, ...] = limited(REMOVALS, one_of=REMOVALS, needed=True)
    """Path of removal: mask (before the softmax) or zero_value (the weight stays and adds
    nothing).
    """
    controls: tuple[str, ...] = limited(("sinks",), one_of=CONTROLS, needed=True)
    """Keys to hide: those that the protocol names (sinks), or others in their place."""
    sink_rule: Any = of(rules, None)  # noqa: RUF009
    """Rule for sinks, NAME:field=value, in the protocol rule and in the printed tables;
    excess:epsilon=3 when left out.
    """
    heldout: str | None = None
    """Corpus for the beginnings of the texts, one a row; None uses the excerpt in the package."""
    rows: int = limited(12, at_least=1)
    """Texts."""
    prompt_tokens: int = limited(32, at_least=1)
    """Tokens that are given of each."""
    new_tokens: int = limited(32, at_least=1)
    """Tokens to write, the most probable ones; a diffusion model writes one a step."""
    block_length: int | None = limited(None, at_least=1)
    """Tokens per block of a diffusion model; one block when left out."""
    batch: int = limited(12, at_least=1)
    """Texts that are written together."""
    seed: int = 0
    """Seed of random controls."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("protocols", "ks", "removals", "controls"):
            object.__setattr__(self, name, tuple(dict.fromkeys(getattr(self, name))))


@studies.register("distance")
class DistanceStudy(Study):
    """Write texts with and without keys hidden: how far apart they are, by dose, path of removal
    and protocol.

    Agreement of the tokens in free runs; at the order and on the canvases of the clean run, the KL
    divergence of each token when it was committed; and beside these the loss of the text by the
    unedited model, in nats per token, since another text may be as good. All paired by text. Writes
    a run folder with distance.md.

    Try
        sinklab distance --model tiny --rows 6 --ks 1 5
        sinklab distance --model tiny --protocols paper held rule clean --controls sinks equal_mass
    """

    Settings = DistanceSettings
    positional = True
    parts = "distances"
    shards = True
    prepare = deferred("sinklab.lab.studies.ablate.distance:prepare")
    run = deferred("sinklab.lab.studies.ablate.distance:write_texts")
    finish = deferred("sinklab.lab.studies.ablate.distance:summarize")
    sentences = deferred("sinklab.lab.studies.ablate.distance:distance_sentences")
    draw = deferred("sinklab.lab.studies.ablate.distance:draw_tables")

    def amount(self, settings: DistanceSettings, info: Any) -> Amount:
        """Every step of every text, written clean and every other way, once freely and once in the
        clean order.
        """
        ways = (
            len(settings.protocols)
            * len(settings.ks)
            * len(settings.removals)
            * len(settings.controls)
        )
        evaluations = (
            math.ceil(settings.rows / settings.batch) * settings.new_tokens * (1 + 2 * ways)
        )
        positions = min(settings.rows, settings.batch) * (
            settings.prompt_tokens + settings.new_tokens
        )
        return Amount(
            f"{settings.rows} texts × {settings.new_tokens} steps × {1 + ways} ways",
            evaluations,
            positions,
        )

    def samples(self, plan: Any) -> int:
        """Number of samples: one per batch of texts."""
        return len(plan)
