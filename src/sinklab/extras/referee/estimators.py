"""Estimators of one log-likelihood side by side, on continuations short enough to go through all
masks.

A masked diffusion model has a conditional for every token under every mask, and a likelihood only
together with a sampler. For samplers that write one token at a time: the mean over all orders of
the product of conditionals is the exact likelihood of the sampler with uniformly random order; a
fixed order that of the sampler with this order, and nobody else's. The NELBO, which Monte Carlo
estimates, is the mean of the *logarithms*, so it never lies above the first (Jensen). Against a
fixed order neither has a side.
"""

# L tokens of a continuation, N masks of a forward, M all 2^L masks: bit i is set if token i is
# masked; V vocabulary
import itertools
import math
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import scipy  # its modules load where they are first used
import torch

from sinklab.core.sampling.schedules import commit_counts
from sinklab.lab.checkpoints.loading import Loaded
from sinklab.lab.scoring.likelihood import MOST_EXACT, Scorer, at_least_float32
from sinklab.lab.scoring.requests import Ids, every_mask
from sinklab.lab.scoring.settings import LikelihoodSettings

OVER_ORDERS: dict[str, Callable[[list[float]], float]] = {
    "exact": lambda values: float(scipy.special.logsumexp(values)) - math.log(len(values)),
    "nelbo": lambda values: float(np.mean(values)),
    "best": max,
    "worst": min,
}
"""Reductions over the orders: the likelihood of the sampler that draws one, its bound, the best
order, the worst.
"""


def conditionals(
    loaded: Loaded, context: Ids, continuation: Ids, *, never_mask: bool = True
) -> np.ndarray:
    """log p (M, L), in nats, of every token under every mask of the continuation; NaN if it is not
    masked.

    Args:
        loaded: a diffusion model.
        context: ids before it, never masked.
        continuation: ids, at most 12.
        never_mask: leave out [MASK] and ids that are no text, as a sampler does; likelihoods as
            they are published keep it.

    Raises:
        ValueError: for more than 12 tokens, an autoregressive model, and ids that the model does
            not have.
    """
    if loaded.family != "diffusion" or len(continuation) > MOST_EXACT:
        raise ValueError(
            f"all masks are gone through of at most {MOST_EXACT} tokens and of a diffusion model, "
            f"got {len(continuation)} tokens and {loaded.name}, which is {loaded.family}; score "
            "them instead"
        )
    scorer, config = Scorer(loaded, LikelihoodSettings()), loaded.model.config
    (request,) = scorer.read([(context, continuation)])
    masked_NL = every_mask(len(continuation)).masked_NL
    table_ML = np.full((len(masked_NL) + 1, len(continuation)), np.nan)
    for numbers, part_NL in zip(
        torch.arange(1, len(table_ML)).split(scorer.rows), masked_NL.split(scorer.rows), strict=True
    ):
        rows = [*part_NL]
        places = [(0, 0, number) for number in numbers.tolist()]
        logits_MV, labels_M, _ = scorer.logits([request] * len(rows), rows, rows, places)
        logits_MV = at_least_float32(logits_MV).cpu()
        if never_mask:
            logits_MV = logits_MV[:, : config.text_vocab_size].clone()
            logits_MV[:, config.mask_token_id : config.mask_token_id + 1] = -torch.inf
        logp_M = logits_MV.log_softmax(-1).gather(1, labels_M[:, None])[:, 0]
        table_ML[
            numbers[:, None].expand_as(part_NL)[part_NL].numpy(), part_NL.nonzero()[:, 1].numpy()
        ] = logp_M
    return table_ML


def over_orders(table_ML: np.ndarray, of: str = "exact", steps: int | None = None) -> float:
    """Log-likelihood of the whole continuation from the conditionals, in nats.

    Args:
        table_ML: of `conditionals`.
        of: a key of `OVER_ORDERS`.
        steps: in so many steps, the tokens of a step drawn independently of one another: "exact" is
            the sampler with the schedule `even`, this number of steps and positions at random, and
            "nelbo" its bound. One token a step when left out.

    Raises:
        ValueError: for more steps than tokens.
    """
    tokens, reduced = table_ML.shape[1], OVER_ORDERS[of]
    if not 1 <= (steps or tokens) <= tokens:
        raise ValueError(
            f"steps must be 1 to {tokens}, the tokens of the continuation, got {steps}; take fewer"
        )
    counts = commit_counts(tokens, steps or tokens).tolist()

    @cache
    def value(mask: int, step: int) -> float:
        if not mask:
            return 0.0
        places = [place for place in range(tokens) if mask >> place & 1]
        ways = [[*way] for way in itertools.combinations(places, counts[step])]
        left = [value(mask - sum(1 << place for place in way), step + 1) for way in ways]
        return reduced(
            [float(table_ML[mask, way].sum()) + rest for way, rest in zip(ways, left, strict=True)]
        )

    return value(2**tokens - 1, 0)


def in_order(table_ML: np.ndarray, order: Sequence[int]) -> float:
    """The log-likelihood of the sampler that writes the tokens in this order, in nats; ``range(L)``
    is the chain rule.

    Raises:
        ValueError: for a sequence that is no order of the tokens.
    """
    tokens = table_ML.shape[1]
    if sorted(order) != [*range(tokens)]:
        raise ValueError(
            f"an order names each of {tokens} tokens once, got {[*order]}; take a permutation"
        )
    done = itertools.accumulate((1 << place for place in order), initial=0)
    return float(
        sum(
            table_ML[2**tokens - 1 - before, place]
            for before, place in zip(done, order, strict=False)
        )
    )
