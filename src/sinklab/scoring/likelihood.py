"""How likely a model finds a continuation: Monte Carlo or chain rule for diffusion models, exact for autoregressive
ones; with interventions and guidance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from sinklab.checkpoints.loading import Loaded
from sinklab.probing.intervention import Intervention
from sinklab.scoring.requests import Ids, Plan, Request, chain_rule, digest, every_mask, limit_of, monte_carlo, whole
from sinklab.scoring.scorer import Job, Scorer, is_greedy, scoring_edits
from sinklab.scoring.settings import LikelihoodSettings, Scored
from sinklab.scoring.writing import is_random

__all__ = ["LikelihoodSettings", "Scored", "exact", "rolling", "score", "scoring_edits"]

MOST_EXACT = 12
"""Tokens whose masks :func:`exact` goes through."""


def score(
    loaded: Loaded,
    requests: Sequence[tuple[Ids, Ids]],
    settings: LikelihoodSettings | None = None,
    *,
    groups: Sequence[int] | None = None,
    edits: Sequence[Intervention] = (),
    greedy: bool = False,
    progress: Callable[[], object] | None = None,
) -> list[Scored]:
    """log p(continuation | context) of each request, in nats.

    Rows of different requests and samples ride in the same forward, longest first. A result depends on its own request,
    the settings and its group, and on nothing else that is scored with it (up to rounding).

    Rows that run, per request of L tokens: Monte Carlo `samples`, fewer where masks repeat (one for L = 1); chain rule
    L; autoregressive 1; `greedy` up to L more for diffusion models. Guidance doubles them, and so do edits that choose
    in a clean pass. These edits see the continuation, so that the scores of a model under them are no longer
    logarithms of one distribution over texts.

    Args:
        loaded: the model.
        requests: (context ids, continuation ids). A context that is too long loses its left end (`Scored.dropped`). An
            empty one is fine for diffusion models; for others the beginning (or else end) of text takes its place.
        settings: Monte Carlo as LLaDA does it when left out.
        groups: requests of the same number share their random masks, so that choices of one question are compared
            under the same noise. Left out: requests of the same context do.
        edits: interventions, as :func:`scoring_edits` makes them fit for texts that are read once.
        greedy: also find out whether greedy decoding writes the continuation.
        progress: called when a request is done.

    Raises:
        ValueError: for an empty continuation, one longer than the model's context, ids that the model does not have, a
            diffusion model without mask token, guidance of an autoregressive model, and edits that do not fit.
    """
    settings = settings or LikelihoodSettings()
    is_diffusion = loaded.family == "diffusion"
    scorer = Scorer(loaded, settings, edits)
    todo = sorted(scorer.read(requests, groups), key=lambda each: -each.length)
    written = is_greedy(scorer, todo) if greedy and is_diffusion else {}
    # under a random control equal masks meet different columns
    plan = partial(_plan, settings if is_diffusion else None, merge=not is_random(edits))
    results: dict[int, Scored] = {}
    for job in scorer.run(Job.of(request, plan(request)) for request in todo):
        request, (logprob, stderr) = job.request, job.plan.result(job.sums_N)
        is_written = written.get(request.number, False) if is_diffusion else greedy and bool(job.likeliest_N.all())
        results[request.number] = Scored(logprob, stderr, is_written, len(request.continuation), request.dropped)
        if progress is not None:
            progress()
    return [results[number] for number in range(len(todo))]


def _plan(settings: LikelihoodSettings | None, request: Request, *, merge: bool) -> Plan:
    """The rows that a request asks for; of an autoregressive model, without settings, the text as it is."""
    tokens = len(request.continuation)
    if settings is None:
        return whole(tokens)
    if settings.estimator == "chain_rule":
        return chain_rule(tokens)
    return monte_carlo(tokens, request.group, settings, merge=merge)


def rolling(
    loaded: Loaded,
    ids: Ids,
    settings: LikelihoodSettings | None = None,
    *,
    edits: Sequence[Intervention] = (),
    progress: Callable[[], object] | None = None,
) -> Scored:
    """The score of a text of any length: the sum over chunks of the model's context.

    A diffusion model reads each chunk given nothing (with Monte Carlo a bound of each chunk). An autoregressive model
    reads it given the token before it, the first one given the beginning (or else end) of text.

    Raises:
        ValueError: for an empty text, and as :func:`score` does.
    """
    if not len(ids):
        raise ValueError("a text to score must have at least one token, but has none; leave it out")
    limit, is_diffusion = limit_of(loaded), loaded.family == "diffusion"
    starts = range(0, len(ids), limit)
    chunks = [(() if is_diffusion else ids[max(start - 1, 0) : start], ids[start : start + limit]) for start in starts]
    # chunks of one text must not share their noise: their errors would add up
    groups = [digest(ids, (number,)) for number in range(len(chunks))]
    parts = score(loaded, chunks, settings, groups=groups, edits=edits, progress=progress)
    stderr = math.sqrt(sum(part.stderr**2 for part in parts))
    return Scored(sum(part.logprob for part in parts), stderr, tokens=len(ids))


def exact(
    loaded: Loaded, context: Ids, continuation: Ids, *, cfg_scale: float = 0.0, edits: Sequence[Intervention] = ()
) -> float:
    """The number that the Monte Carlo estimates of a diffusion model mean: all 2^L - 1 masks of the continuation.

    Σ_M log p(x_M | rest) (l-1)! (L-l)! / L! over masks M of l tokens, the slow twin of :func:`score`.

    Raises:
        ValueError: for more than 12 tokens, an autoregressive model, a random control, and as :func:`score` does.
    """
    if loaded.family != "diffusion":
        raise ValueError(
            f"only scores of diffusion models are estimates, but {loaded.name} is {loaded.family}: its score is exact"
        )
    if is_random(edits):
        raise ValueError("a random control has no exact score; score it with many samples")
    if len(continuation) > MOST_EXACT:
        raise ValueError(
            f"exact goes through all masks of at most {MOST_EXACT} tokens, got {len(continuation)}; score them"
        )
    scorer = Scorer(loaded, LikelihoodSettings(cfg_scale=cfg_scale), edits)
    (request,) = scorer.read([(context, continuation)])
    (job,) = scorer.run([Job.of(request, every_mask(len(continuation)))])
    return job.plan.result(job.sums_N)[0]
