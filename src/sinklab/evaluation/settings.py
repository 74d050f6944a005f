"""What a study does: one frozen dataclass, written into its run folder."""

from __future__ import annotations

from dataclasses import dataclass

from sinklab.sampling.settings import DecodingSettings

PROMPTS = (
    "It was a dark and stormy night, and",
    '"My dear sir," said the old man,',
    "The house stood at the end of a",
)


@dataclass(frozen=True)
class StudySettings(DecodingSettings):
    """What a study writes, how, and what it watches and scores."""

    prompts: tuple[str, ...] = PROMPTS
    """Beginnings that the model continues, one sample each."""
    new_tokens: int = 64
    """Tokens to write per sample."""
    block_length: int | None = 32
    """Semi-autoregressive blocks of this many tokens; None writes everything as one block."""
    seed: int | None = 0
    """Seed of all noise."""
    mask_sinks: tuple[int, ...] = (5,)
    """Also write each sample with this many sinks of the previous step hidden (per layer and head), and keep the
    text.
    """
    ks: tuple[int, ...] = (0, 1, 5, 10)
    """Numbers of hidden sinks for the held-out loss."""
    heldout: str | None = None
    """Corpus for the held-out loss; None takes the excerpt inside the package, "" skips the loss."""
    heldout_rows: int = 48
    """Rows of held-out text."""
    heldout_length: int = 256
    """Tokens in a row of held-out text."""
