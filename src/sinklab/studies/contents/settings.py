"""What `sinklab probe` does: one frozen dataclass, written into its run folder. torch stays out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sinklab.errors import Checked, limited
from sinklab.sampling.settings import DecodingSettings

TARGETS = ("token", "progress", "position", "block", "committed", "next")
"""What a probe is asked for: the token finally written at the position; the share of the completion that is masked; the
position; the block that is written now; the mean embedding of the tokens written so far; that of the tokens finally
written in the next block."""


@dataclass(frozen=True)
class ContentsSettings(DecodingSettings, Checked):
    """Which texts are written, which states are sampled from them, and how they are read.

    Raises ValueError for numbers that make no sense with any model.
    """

    full_forward: ClassVar[bool] = False
    """Texts are denoised (see `sinklab.scoring.task.Task`)."""
    prompts: tuple[str, ...] = ()
    """Beginnings that the model continues, one text each; taken from a corpus when left out."""
    corpus: str | None = None
    """Corpus the beginnings are taken from; None takes the excerpt inside the package."""
    texts: int = limited(48, at_least=1)
    """Beginnings to take from the corpus, spread over it."""
    prompt_tokens: int = limited(32, at_least=0)
    """Tokens of each of them."""
    chat: bool = False
    """Put each prompt into the model's chat format."""
    new_tokens: int = limited(96, at_least=1)
    """Tokens to write after each prompt."""
    block_length: int | None = 32
    """Write block after block of this many tokens; None writes everything as one block, which leaves no future."""
    temperature: float = 1.0
    """0 takes the most probable token; small models then write alike texts, from which a probe learns little."""
    seed: int | None = 0
    """Seed of all noise; each text has its own, which follows from this one and its number."""
    choose: str = "excess"
    """Which keys are sinks: those that a rule names in some head (excess, with epsilon; or another one as text, such as
    gu:weight=0.3), or strongest (in each head the key of each place that receives most, however little)."""
    epsilon: float = 3.0
    """With choose=excess: sinks receive more than 1 + epsilon (S - 1) / S times an even share."""
    every: int = limited(4, at_least=1)
    """Sample states at every n-th step, beginning with the first."""
    pairs: int = limited(2, at_least=1)
    """Sinks to sample of each place, step and layer at most, each with a matched position."""
    layers: tuple[int, ...] = ()
    """States to read: 0 enters the first layer, and the number of layers leaves the last; all when left out."""
    folds: int = limited(5, at_least=3)
    """Parts that the texts are dealt to; each is predicted from the others."""
    classes: int = limited(16, at_least=2)
    """Probes for the token tell so many tokens apart, the most frequent ones, and all others as one."""
    components: int = limited(256, at_least=1)
    """States wider than this are turned onto their leading principal directions before a probe is fitted."""
    draws: int = limited(1000, at_least=1)
    """Resamples of the texts behind an interval."""

    def __post_init__(self) -> None:
        DecodingSettings.__post_init__(self)
        Checked.__post_init__(self)
        if self.prompts and self.corpus is not None:
            raise ValueError("beginnings come as prompts or from a corpus, but there are both; leave one of them out.")
