"""Strength of a model's sinks, as a study: its settings and its command."""

import math
from dataclasses import dataclass

from sinklab.core.errors import Checked, limited
from sinklab.core.registry import studies
from sinklab.lab.studies import Block, Design, ScoredStudy, deferred

INPUTS = ("natural", "random", "repeat")
STARTS = ("raw", "start")


@dataclass(frozen=True)
class StrengthSettings(Checked):
    """Sequences that the model reads, and the weight from which on a token counts as a sink.

    Raises ValueError for names and numbers that make no sense with any model.
    """

    texts: str | None = None
    """Corpus of natural text; None uses the excerpt in the package. Rows do not reach over the end
    of a document.
    """
    document: int = limited(0, at_least=0)
    """Number of the document that natural text begins with, from 0; the next ones follow if it is
    too short.
    """
    inputs: tuple[str, ...] = limited(INPUTS, one_of=INPUTS, needed=True)
    """natural (consecutive rows of the texts), random (tokens drawn evenly from those of text) or
    repeat (one such token all along a row, another one in each)."""
    starts: tuple[str, ...] = limited(STARTS, one_of=STARTS, needed=True)
    """raw (nothing in front), or start (the model's start token in place of the last token; left
    out for a model that has none)."""
    ratios: tuple[float, ...] = limited((0.0, 0.15, 0.5, 0.9), at_least=0, at_most=1, needed=True)
    """Shares of masked tokens for diffusion models; an autoregressive model reads clean text
    alone.
    """
    epsilon: float = limited(0.3, at_least=0, below=1)
    """Mean weight that a token must exceed to be called strong."""
    rows: int = limited(100, at_least=1)
    """Sequences of each kind."""
    length: int = limited(64, at_least=2)
    """Tokens in a sequence."""
    batch: int = limited(25, at_least=1)
    """Sequences per forward pass."""
    seed: int = 0
    """Seed of random and repeated tokens and of masks."""
    twin: bool | None = limited(None, free=True)
    """Measure two controls on natural text too, of the model freshly initialised and with
    its weights permuted. When left out, if both take less than a minute.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "ratios", tuple(dict.fromkeys(map(float, self.ratios))))


@studies.register("strength")
class Strength(ScoredStudy):
    """How strong a model's sinks are, by the protocol of Gu et al.

    The share of heads that give the first token more than 0.3 of the attention. The protocol
    (arXiv 2410.10781): 100 sequences of 64 tokens each of natural text,
    of random tokens and of one repeated token, with and without the model's start token; for
    diffusion models at several shares of masked tokens. The weight of a token is the mean over the
    queries that may see it. Read in two ways: weights averaged over the texts first, as published,
    and each text by itself, with the interval over texts. Beside it the strongest key wherever it
    stands, its kind of token, the ratio of massive activations, and published numbers of other
    models. Writes a run folder, the page strength.html, strength.md, strength.csv and the picture,
    layer × head.

    Try
        sinklab strength --model tiny-causal --rows 20
        sinklab strength --model smollm2 --texts books.jsonl.gz
        sinklab strength runs/laptop/model --ratios 0 0.5 --inputs natural
    """

    Settings = StrengthSettings
    model = "tiny-causal"
    positional = True
    parts = "strength"
    row_tables = ("strength", "activations")
    read_samples = deferred("sinklab.lab.studies.strength.run:read_samples")
    arms = deferred("sinklab.lab.studies.strength.run:arms")
    blocks = deferred("sinklab.lab.studies.strength.run:blocks")
    measure = deferred("sinklab.lab.studies.strength.run:measure")
    contrasts = deferred("sinklab.lab.studies.strength.run:contrasts")
    sentences = deferred("sinklab.lab.studies.strength.figures:strength_sentences")
    draw = deferred("sinklab.lab.studies.strength.figures:draw_strength")

    @dataclass(frozen=True)
    class Options:
        """Look of the picture."""

        figures: tuple[str, ...] = ("png",)
        """Formats of the picture: png, svg, pdf; a bare --figures draws none."""

    def steps(self, settings: StrengthSettings, block: Block) -> int:
        """A pass for each batch of sequences."""
        return math.ceil(len(block.rows) / settings.batch)

    def control_blocks(self, design: Design) -> list[Block]:
        """Natural text without a start token and masks."""
        return [block for block in design.blocks if block.arms[0] == ("natural", False, 0.0)]
