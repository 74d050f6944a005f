"""Scores the slow way: one row at a time, in float64, logits everywhere, no padding."""

import math

import numpy as np
import torch

from sinklab.lab.scoring.likelihood import Job, LikelihoodSettings, run, score
from sinklab.lab.scoring.requests import Plan, read_requests, scoring_edits


def every_mask(tokens):
    """All 2^L − 1 masks with the weights they have in the expectation of both Monte Carlo
    estimators.
    """
    numbers_N = torch.arange(1, 2**tokens)
    masked_NL = (numbers_N[:, None] >> torch.arange(tokens)) % 2 == 1
    weights_N = [1 / (count * math.comb(tokens, count)) for count in masked_NL.sum(1).tolist()]
    return Plan(masked_NL, masked_NL, weights_n=np.array(weights_N))


def exact(loaded, context, continuation, cfg_scale=0.0, edits=()):
    """The number that the Monte Carlo estimates mean, over all masks of the continuation:
    Σ_M log p(x_M | rest) (l-1)! (L-l)! / L! over masks M of l tokens.
    """
    (request,) = read_requests(loaded, [(context, continuation)], None)
    jobs = [Job(request, every_mask(len(continuation)))]
    edits = scoring_edits(edits, is_diffusion=True)
    (job,) = run(loaded, jobs, LikelihoodSettings(cfg_scale=cfg_scale), edits)
    return job.plan.result(job.sums_N)[0]


def log_probabilities(loaded, context, continuation, masked, cfg_scale=0.0):
    """log p (L,) of every token of the continuation where those of `masked` (L,) are hidden."""
    mask_id = loaded.model.config.mask_token_id
    noisy = [mask_id if hide else token for token, hide in zip(continuation, masked, strict=True)]
    with torch.no_grad():
        logits_LV = (
            loaded.model(torch.tensor([[*context, *noisy]])).logits[0, len(context) :].double()
        )
        if cfg_scale:
            bare_LV = (
                loaded.model(torch.tensor([[mask_id] * len(context) + noisy]))
                .logits[0, len(context) :]
                .double()
            )
            logits_LV = bare_LV + (1 + cfg_scale) * (logits_LV - bare_LV)
    return logits_LV.log_softmax(-1)[torch.arange(len(continuation)), torch.tensor(continuation)]


def plain_score(loaded, context, continuation, plan, cfg_scale=0.0):
    """A plan carried out sample by sample."""
    values = []
    for row, weight in zip(plan.rows_n.tolist(), plan.weights_n.tolist(), strict=True):
        if row < 0:
            values.append(0.0)
            continue
        logp_L = log_probabilities(
            loaded, context, continuation, plan.masked_NL[row].tolist(), cfg_scale
        )
        values.append(weight * logp_L[plan.wanted_NL[row]].sum().item())
    return math.fsum(values) / len(values)


def plain_chain(loaded, context, continuation, cfg_scale=0.0):
    """Left to right, by a loop."""
    total = 0.0
    for place in range(len(continuation)):
        masked = [other >= place for other in range(len(continuation))]
        total += log_probabilities(loaded, context, continuation, masked, cfg_scale)[place].item()
    return total


def plain_causal(loaded, context, continuation):
    """Token after token, each in a forward of its own."""
    total, greedy, ids = 0.0, True, list(context)
    for token in continuation:
        with torch.no_grad():
            logits_V = loaded.model(torch.tensor([ids])).logits[0, -1].double()
        total += logits_V.log_softmax(-1)[token].item()
        greedy &= int(logits_V.argmax()) == token
        ids.append(token)
    return total, greedy


def logprobs(*args, **options):
    """Those of scores."""
    return [one.logprob for one in score(*args, **options)]


def ids(count, seed=0):
    """Random ids of the tiny vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 270, (count,), generator=generator).tolist()
