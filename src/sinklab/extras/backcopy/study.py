"""Bigram-Backcopy as a study: its settings, and its command."""

from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar

from sinklab.core.errors import Checked, limited
from sinklab.core.registry import studies
from sinklab.lab.studies.base import Study, deferred

BLOCKS = {"block4": 4, "block16": 16}
"""Objectives that denoise in blocks behind clean ones, and the tokens of a block."""
OBJECTIVES = ("causal", "diffusion", "converted", *BLOCKS)
VARIANTS = ("plain", "sink", "zero", "gate", "logit")


@dataclass(frozen=True)
class BackcopySettings(Checked):
    """The twins: of each seed one a objective and variant, that differ in these alone."""

    seeds: tuple[int, ...] = limited((0, 1, 2, 3, 4, 5), at_least=0, needed=True)
    """A seed is a source (its transition matrix), its rows, the initial weights and the noise."""
    objectives: tuple[str, ...] = limited(("causal", "diffusion"), one_of=OBJECTIVES, needed=True)
    """causal (next token), diffusion (masked tokens), converted (causal first, then as many steps
    of diffusion), block4 and block16 (diffusion in blocks of as many tokens, each behind the clean
    ones before it).
    """
    variants: tuple[str, ...] = limited(("plain",), one_of=VARIANTS, needed=True)
    """plain, sink (an added token), zero (its values are zero), gate, logit (a learned logit per
    head).
    """
    layers: int = limited(1, at_least=1)
    """Layers of the models."""
    heads: int = limited(2, at_least=1)
    """Attention heads."""
    width: int = limited(64, at_least=1)
    """Width of the residual stream; a multiple of twice the heads."""
    mlp_size: int = limited(64, at_least=1)
    """Width of the SwiGLU layer. A wide one makes the sink smaller."""
    steps: int = limited(400, at_least=1)
    """Optimizer steps (5 % warm-up, cosine to a tenth)."""
    batch: int = limited(32, at_least=1)
    """New rows of 48 tokens in each."""
    lr: float = limited(7e-3, above=0)
    """Peak learning rate of AdamW: embedding, head, norms, gates and added sinks."""
    muon_lr: float = limited(0.02, above=0)
    """Peak learning rate of Muon: the matrices of the layers."""
    concentration: float = limited(0.3, above=0)
    """Concentration of the Dirichlet distribution that the rows of the transition matrix are drawn
    from.
    """
    rows: int = limited(512, at_least=2)
    """Rows that every model of a seed is measured on, the same for all; with the same noise."""
    masking: bool = False
    """Measure the cost of blocking keys, at equal count and at equal removed attention, of whole
    rows and under every protocol: 40 seconds a model.
    """
    models: str | None = limited(None, free=True)
    """Folder that trained models are kept in, and taken from if they are there."""


@studies.register("backcopy")
class Backcopy(Study):
    """Train causal and diffusion twins and see which grow a sink.

    On Bigram-Backcopy, seconds a model: 32 tokens and a start token; after one of 4 triggers comes
    the token before it, after any other a draw from its row of a transition matrix (arXiv
    2410.13835). The best possible loss is computed, and no contrast is drawn unless every twin
    comes within 5 % of it; each is measured untrained as well. Writes a run folder, backcopy.md and
    a figure.

    Try
        sinklab backcopy --seeds 0 --objectives causal
        sinklab backcopy --objectives causal --variants plain sink zero gate logit
        sinklab backcopy --layers 2 --steps 2500 --objectives causal diffusion converted \\
            --masking --resume
    """

    Settings = BackcopySettings
    listed: ClassVar[dict[str, Any]] = {
        "group": "train",
        "seldom": True,
    }
    rare = ("concentration",)
    model = ""
    parts = "heads"
    shards = True

    run = deferred("sinklab.extras.backcopy.run:train_and_measure")
    sentences = deferred("sinklab.extras.backcopy.figures:backcopy_sentences")
    draw = deferred("sinklab.extras.backcopy.figures:draw_backcopy")

    def prepare(self, loaded: Any, settings: BackcopySettings, progress: Any) -> Any:
        """Seed, objective and variant of every model."""
        if settings.width % (2 * settings.heads):
            raise ValueError(
                f"a head's width must be whole and even, but width is {settings.width} for "
                f"{settings.heads} heads; make it a multiple of {2 * settings.heads}"
            )
        return list(product(settings.seeds, settings.objectives, settings.variants))

    def samples(self, plan: Any) -> int:
        """Number of samples: one a model."""
        return len(plan)

    def about(self, loaded: Any, plan: Any) -> dict[str, Any]:
        """The models are made here."""
        return {"name": "backcopy", "family": "diffusion"}
