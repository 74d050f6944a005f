"""The comparison of block caches as a study: its settings, its command, and the function that
Python calls.
"""

from dataclasses import dataclass

from sinklab.core.errors import Checked, limited
from sinklab.core.registry import studies
from sinklab.core.sampling import DecodingSettings
from sinklab.lab.studies import ScoredStudy, deferred


@dataclass(frozen=True)
class CacheSettings(Checked):
    """Caches to compare, the text, and the measurements. Raises ValueError for numbers that make no
    sense.
    """

    cache_keep: tuple[float, ...] = (0.5, 0.25)
    """Budgets of the evicting caches: shares of the columns outside the block."""
    cache_sinks: int = limited(4, at_least=1)
    """Protected sinks per layer and key head in the protected variant of each cache."""
    protect: tuple[str, ...] = ("now",)
    """Choices of protected sinks: now, first, earlier; one protected variant for each."""
    scores: tuple[str, ...] = ("nearest", "aligned", "received", "random")
    """Scores that rank the columns of the evicting caches: nearest, aligned (Sparse-dLLM),
    received, random.
    """
    refreshed: tuple[int, ...] = (4, 16)
    """Sinks that the refreshing dual cache computes anew with the block; one variant for each."""
    sparse: bool = False
    """Also full recomputation under sparse attention: every query sees its nearest keys, with and
    without sinks.
    """
    heldout: str | None = None
    """Corpus of text the model has not seen; None takes the excerpt inside the package."""
    rows: int = limited(8, at_least=2)
    """Rows of text, revealed step by step."""
    batch: int = limited(8, at_least=1)
    """Rows that run together."""
    prompt_tokens: int = limited(64, at_least=1)
    """Tokens of each row that stand from the start."""
    new_tokens: int = limited(32, at_least=1)
    """Tokens of each row that are masked at first, and tokens to write."""
    block_length: int = limited(16, at_least=1)
    """Tokens in a block."""
    tokens_per_step: int = limited(2, at_least=1)
    """Tokens revealed at each evaluation, in random order."""
    texts: int = limited(4, at_least=0)
    """Texts written under each cache and without one; 0 skips this."""
    lengths: tuple[int, ...] = ()
    """Canvas lengths at which time is measured; the length of the rows when left out."""
    repeats: int = limited(2, at_least=0)
    """Turns of the time measurement; 0 skips it."""
    seed: int = 0
    """Seed of the order in which tokens are revealed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.block_length, self.new_tokens) <= 2 * self.tokens_per_step:
            raise ValueError(
                "the first two evaluations of a block compute everything and are not compared, so "
                "a block needs more than 2 · tokens_per_step tokens, got "
                f"block_length={self.block_length} and tokens_per_step={self.tokens_per_step} for "
                f"new_tokens={self.new_tokens}; make blocks longer."
            )
        short = [length for length in self.lengths if length <= self.new_tokens]
        if short:
            raise ValueError(
                "lengths are those of the whole canvas, longer than "
                f"new_tokens={self.new_tokens}, got {short[0]}."
            )

    @property
    def length(self) -> int:
        """Columns of a row."""
        return self.prompt_tokens + self.new_tokens

    def decoding(self) -> DecodingSettings:
        """Decoding of the texts: one token a step, most confident first."""
        return DecodingSettings(block_length=self.block_length, seed=self.seed)


@studies.register("caches")
class Caches(ScoredStudy):
    """Block caches with and without protected sinks, at equal budgets.

    Text the model has not seen is revealed block by block, and every cache is asked for the tokens
    still masked: how far are its probabilities from those computed without a cache? Also written:
    whole texts, time and memory. Prints a line per cache and a verdict per budget; writes a run
    folder and a figure.

    Try
        sinklab caches
        sinklab caches --model tiny-sink --cache-keep 0.25 0.1 --cache-sinks 8 --out \\
            runs/caches-sink
        sinklab caches --rows 32 --batch 16 --prompt-tokens 160 --new-tokens 64 --sparse --out \\
            runs/caches-long
    """

    Settings = CacheSettings
    parts = "rows"
    row_tables = ("rows", "texts")
    shards = False
    read_samples = deferred("sinklab.lab.studies.caches.run:read_samples")
    arms = deferred("sinklab.lab.studies.caches.run:arms")
    steps = deferred("sinklab.lab.studies.caches.run:evaluations")
    measure = deferred("sinklab.lab.studies.caches.run:measure")
    write_more = deferred("sinklab.lab.studies.caches.run:write_more")
    contrasts = deferred("sinklab.lab.studies.caches.run:contrasts")
    sentences = deferred("sinklab.lab.studies.caches.figures:caches_sentences")
    draw = deferred("sinklab.lab.studies.caches.figures:draw_caches")


cache_fidelity = Caches()
"""Write a run folder of kind "caches".

Tables: ``rows`` (a line per policy and row: loss, divergence from uncached, same first token),
``texts`` (share of written tokens that uncached decoding writes too), ``policies`` (means of both
with 95 % intervals over rows), ``protection`` (protected less unprotected at equal budget, paired
over rows), ``costs`` (time, memory).

Args:
    loaded: a diffusion model.
    out: folder to write; it must be empty or absent, or hold this very run to resume.
    settings: of the comparison.
    progress: shows how far it is; a function is called with a short text at each stage.
    resume: continue an interrupted run, batch by batch and policy by policy.

Raises:
    ValueError: for a model that does not denoise, rows that do not fit it, and settings that make
        no sense.
"""
