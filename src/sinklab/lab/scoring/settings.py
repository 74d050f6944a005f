"""Settings of the score of a continuation, and its result: plain values, no models."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sinklab.core.errors import Checked, limited

if TYPE_CHECKING:
    from sinklab.core.instrument import Dose

ESTIMATORS = ("auto", "monte_carlo", "chain_rule")
NOISES = ("llada", "smdm")


@dataclass(frozen=True)
class LikelihoodSettings(Checked):
    """How :func:`~sinklab.lab.scoring.likelihood.score` works. Raises ValueError for values outside
    those listed.
    """

    estimator: str = limited("auto", one_of=ESTIMATORS)
    """For diffusion models. "monte_carlo" (also "auto"): mean over random masks of the
    continuation; its expectation is a lower bound of the log-likelihood. "chain_rule": left to
    right, all later tokens masked; no noise, one row per token. Autoregressive models are scored
    exactly, whatever is chosen here.
    """
    noise: str = limited("llada", one_of=NOISES)
    """Noise of the masks. "llada": how many of the L tokens are masked is uniform over 1 … L,
    weight L / number. "smdm": a time t, each token masked with probability t, weight 1 / t. The
    expectation is the same; the first has less variance. Counts and times are spread evenly over
    the samples.
    """
    samples: int = limited(128, at_least=1)
    """Masks per request (LLaDA's evaluation draws 128, that of SMDM and «One Token» 1024)."""
    batch: int = limited(32, at_least=1)
    """Rows in a forward, of any requests; fewer if their logits would not fit 2²⁸ numbers."""
    cfg_scale: float = limited(0.0, at_least=0, below=math.inf)
    """Classifier-free guidance w: the score of log-softmax(un + (1 + w)(cond − un)), un with the
    context masked.
    """
    seed: int = limited(0, at_least=0)
    """Random seed of the masks, together with the group of a request."""


@dataclass(frozen=True)
class Scored:
    """The score of one continuation."""

    logprob: float
    """log p(continuation | context) in nats; with the Monte Carlo estimator an estimate of its
    lower bound.
    """
    stderr: float = 0.0
    """Standard error of the Monte Carlo mean as if its samples were independent (their even spread
    makes the true one smaller as a rule); NaN for one sample, 0 for the chain rule and
    autoregressive models.
    """
    greedy: bool = False
    """Whether greedy decoding writes exactly this continuation; False if that was not requested."""
    tokens: int = 0
    """Tokens of the continuation."""
    dropped: int = 0
    """Tokens cut from the left of the context, so that both fit the model's context."""
    dose: Dose | None = None
    """Dose of the edits while it was scored; None without edits. The share really removed is known
    if it was measured.
    """
