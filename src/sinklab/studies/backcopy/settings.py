"""What a study of Bigram-Backcopy trains: one frozen dataclass, kept in its run folder."""

from __future__ import annotations

from dataclasses import dataclass

from sinklab.errors import Checked, limited

OBJECTIVES = ("causal", "diffusion", "converted")
VARIANTS = ("plain", "sink", "zero", "gate", "logit")


@dataclass(frozen=True)
class BackcopySettings(Checked):
    """The twins: of each seed one a objective and variant, that differ in these alone."""

    seeds: tuple[int, ...] = limited((0, 1, 2, 3, 4, 5), at_least=0, needed=True)
    """A seed is a source (its transition matrix), its rows, the initial weights and the noise."""
    objectives: tuple[str, ...] = limited(("causal", "diffusion"), one_of=OBJECTIVES, needed=True)
    """causal (next token), diffusion (masked tokens), converted (causal first, then as many steps of diffusion)."""
    variants: tuple[str, ...] = limited(("plain",), one_of=VARIANTS, needed=True)
    """plain, sink (an added token), zero (its values are zero), gate, logit (a learned logit per head)."""
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
    """Of the Dirichlet distribution that the rows of the transition matrix are drawn from."""
    rows: int = limited(512, at_least=2)
    """Rows that every model of a seed is measured on, the same for all; with the same noise."""
