"""Which token is proposed at a masked position, and which proposals are committed first."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

# M candidate positions, V vocabulary


class Rule(Protocol):
    """Scores the candidates of a step; in every row the highest scores are committed."""

    def __call__(self, logits_MV: Tensor, proposal_M: Tensor, generator: torch.Generator | None) -> Tensor:
        """Return one score per candidate, float (M,).

        Args:
            logits_MV: the denoiser's logits at the candidates, without temperature and with [MASK] left in.
            proposal_M: int64, the token that would be committed at each.
            generator: the one source of randomness, None when the caller gave none.
        """
        ...


@dataclass(frozen=True)
class LowConfidence:
    """Commit where the softmax probability of the proposed token is highest (LLaDA's `low_confidence` remasking).

    The probability is taken at temperature 1, whatever the sampling temperature, in float32 or better.
    """

    def __call__(self, logits_MV: Tensor, proposal_M: Tensor, generator: torch.Generator | None) -> Tensor:
        # Not exp(logit - logsumexp): near probability 1 its rounding would reorder candidates.
        probability_MV = torch.softmax(_at_least_float32(logits_MV), -1)
        return probability_MV.gather(-1, proposal_M[:, None])[:, 0]


@dataclass(frozen=True)
class RandomOrder:
    """Commit in an order drawn uniformly at random (LLaDA's `random` remasking). Needs a generator."""

    def __call__(self, logits_MV: Tensor, proposal_M: Tensor, generator: torch.Generator | None) -> Tensor:
        source = _required(generator, "random order")
        return torch.rand(len(proposal_M), generator=source, device=source.device).to(logits_MV.device)


RULES: dict[str, type[LowConfidence] | type[RandomOrder]] = {"low_confidence": LowConfidence, "random": RandomOrder}
"""Rules by the names that the command line and run folders use."""


def rule_by_name(name: str) -> Rule:
    """The rule called `name` in `RULES`. Raises ValueError that lists the near names."""
    if name in RULES:
        return RULES[name]()
    near = difflib.get_close_matches(name, RULES, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else "pass one of these, or a rule object."
    raise ValueError(f"unknown unmasking rule {name!r}; known rules are {', '.join(sorted(RULES))}; {hint}")


def sample_tokens(logits_MV: Tensor, temperature: float = 0.0, generator: torch.Generator | None = None) -> Tensor:
    """Draw one token per row from softmax(logits / temperature); temperature 0 takes the argmax.

    Uses the Gumbel-max trick in the form argmax(logits - T log E) with E exponential of rate 1, drawn in float64:
    coarser noise cuts the tail off and so lowers the temperature in effect. LLaDA's exp(logits) / (-log U)^T is the
    same distribution (its logarithm is this score, and -log U is exponential) but overflows for large logits.
    The noise is drawn on the generator's device, so a CPU generator gives the same draw whatever the model runs on.

    Returns int64 (M,). Raises ValueError for a negative or non-finite temperature, and for T > 0 without a generator.
    """
    check_temperature(temperature, generator)
    if temperature == 0:
        return logits_MV.argmax(-1)
    source = _required(generator, "a temperature above 0")
    noise_MV = torch.empty(logits_MV.shape, dtype=torch.float64, device=source.device).exponential_(generator=source)
    return noise_MV.to(logits_MV.device).log_().mul_(-temperature).add_(logits_MV).argmax(-1)


def check_temperature(temperature: float, generator: torch.Generator | None) -> None:
    """Raises ValueError when `sample_tokens` could not work with these."""
    if not math.isfinite(temperature) or temperature < 0:
        raise ValueError(
            f"temperature must be 0 or a positive finite number, got {temperature}; 0 takes the most likely token."
        )
    if temperature > 0:
        _required(generator, "a temperature above 0")


def _required(generator: torch.Generator | None, what: str) -> torch.Generator:
    if generator is None:
        raise ValueError(
            f"{what} needs a source of randomness that can be written down, got generator=None; pass "
            "generator=torch.Generator().manual_seed(seed)."
        )
    return generator


def _at_least_float32(logits_MV: Tensor) -> Tensor:
    return logits_MV if logits_MV.dtype == torch.float64 else logits_MV.float()
