"""Answers to requests of lm-eval by a `SinklabLM`: how long texts are, which share noise, which are
watched.
"""

# S positions
import dataclasses
import hashlib
import json
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from sinklab.core.instrument import trace
from sinklab.core.sinks import MASKED, PROMPT
from sinklab.lab.scoring import (
    LikelihoodSettings,
    Scored,
    WritingRequest,
    limit_of,
    rolling,
    score,
)
from sinklab.lab.scoring.requests import start_token
from sinklab.lab.studies import Row, nothing
from sinklab.lab.studies.benchmarks.answers import (
    columns_of,
    needs_own_batch,
    sink_rows,
    write_batch,
)
from sinklab.lab.studies.benchmarks.study import EvalSettings

DEFAULT_TOKENS = 256
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens")
Place = tuple[str, int, int, int]
"""Task, document, number of the request in it, and number of its repeat."""
Part = dict[Place, Row]
"""Some answers."""


def request_key(*parts: Any) -> str:
    """A name for a request: equal for equal parts, in every process and on every machine."""
    text = json.dumps(parts, sort_keys=True, ensure_ascii=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def request_number(seed: int, key: str) -> int:
    """The seed of one request: it depends on the run's seed and on the request, not on its
    neighbours.
    """
    return int(hashlib.sha256(f"{seed}:{key}".encode()).hexdigest()[:15], 16)


def places_of(requests: Sequence[Any]) -> list[Place]:
    """Places of requests of lm-eval. One that is to be answered several times comes as often; what
    comes more often only fills up a distributed batch.
    """
    seen = Counter[tuple[str, int, int]]()
    places = []
    for request in requests:
        place = (request.task_name or "", request.doc_id or 0, request.idx)
        places.append((*place, seen[place] % (request.repeats or 1)))
        seen[place] += 1
    return places


class Job(NamedTuple):
    """A request for a text, fitted to the model."""

    request: WritingRequest
    new_tokens: int
    settings: EvalSettings
    """Settings with the temperature that the task asks for."""
    cut: int
    """Tokens of the prompt that did not fit and were left out, from the left."""


def fitted(ids: Sequence[int], asked: int, context: int) -> tuple[tuple[int, ...], int, int]:
    """A prompt and a length that fit the context together, and how many tokens were left out.

    An answer longer than the room beside the prompt is shortened, down to half of the context; then
    the prompt loses its left end, as in lm-eval.
    """
    new_tokens = min(asked, max(context - len(ids), context // 2, 1))
    cut = max(len(ids) - (context - new_tokens), 0)
    return tuple(ids[cut:]), new_tokens, cut


def paced(settings: EvalSettings, new_tokens: int, asked: int) -> EvalSettings:
    """The settings for an answer that had to be shortened: fewer steps in proportion."""
    if settings.steps is None or new_tokens == asked:
        return settings
    blocks = math.ceil(new_tokens / (settings.block_length or new_tokens))
    steps = min(max(math.ceil(settings.steps * new_tokens / asked), blocks), new_tokens)
    return dataclasses.replace(settings, steps=steps)


def sampled(settings: EvalSettings, asked: dict[str, Any]) -> EvalSettings:
    """The settings with the temperature of a task that wants its answers drawn, unless one was
    given.
    """
    if not asked.get("do_sample") or settings.temperature > 0 or not asked.get("temperature"):
        return settings
    cuts = {
        name: asked[name]
        for name in ("top_p", "top_k")
        if asked.get(name) and getattr(settings, name) is None
    }
    return dataclasses.replace(settings, temperature=float(asked["temperature"]), **cuts)


def job_of(model: Any, request: Any, repeat: int) -> Job:
    """A request as a job. A repeated one has noise of its own only if noise decides."""
    text, given = request.args
    settings = sampled(model.settings, given)
    lengths = [model.settings.new_tokens, *map(given.get, _LENGTHS), DEFAULT_TOKENS]
    asked = next(int(length) for length in lengths if length)
    until = given.get("until") or ()
    if isinstance(until, str):
        until = (until,)
    if not needs_own_batch(settings, model.edits):
        repeat = 0
    prompt = model.tok_encode(text)
    if not prompt and not model.is_diffusion:
        where = "the context of this request"
        prompt = [start_token(model.loaded, where, "choose another task")]
    ids, new_tokens, cut = fitted(prompt, asked, limit_of(model.loaded))
    key = request_key(request_key("generate_until", text, given), repeat)
    seed = request_number(model.settings.seed or 0, key)
    settings = paced(settings, new_tokens, asked)
    return Job(WritingRequest(ids, tuple(until), seed), new_tokens, settings, cut)


def written(model: Any, asked: Mapping[Place, Any], tick: Any = nothing) -> Part:
    """Texts; those of like lengths that can be written together are, longest first.

    Args:
        model: a `SinklabLM`.
        asked: requests of lm-eval.
        tick: called with the answers, or the part of one, that were written since.
    """
    jobs = {place: job_of(model, request, place[3]) for place, request in asked.items()}
    groups = defaultdict(list)
    for place, job in jobs.items():
        watch = model.settings.watches(place[1])
        groups[watch, job.new_tokens, job.settings].append(place)
    found = {}
    for (watch, new_tokens, settings), places in groups.items():
        places.sort(key=lambda place: -len(jobs[place].request.ids))
        size = model.settings.batch
        if needs_own_batch(settings, model.edits):
            size = 1
        for start in range(0, len(places), size):
            some = places[start : start + size]
            texts = write_batch(
                model.loaded,
                [jobs[place].request for place in some],
                settings,
                new_tokens,
                model.edits,
                watch=watch,
                tick=partial(tick, len(some) / (settings.steps or new_tokens)),
            )
            for place, text in zip(some, texts, strict=True):
                found[place] = text | {"cut": jobs[place].cut, "new_tokens": new_tokens}
    return found


FORWARDS = 4
"""Number of forwards of a request that are watched; more noisy copies of the same text say little
that is new.
"""


def likelihood_settings(settings: EvalSettings) -> LikelihoodSettings:
    """The part of the settings that says how likelihoods are estimated."""
    return LikelihoodSettings(
        estimator=settings.estimator,
        noise=settings.noise,
        samples=settings.mc_samples,
        batch=settings.likelihood_batch,
        cfg_scale=settings.likelihood_cfg_scale,
        seed=settings.seed or 0,
    )


def _pair(model: Any, request: Any) -> tuple[list[int], list[int]]:
    """Ids of a context and its continuation."""
    context, continuation = request.args
    # if a model cannot start from nothing, `score` puts its beginning of text
    before, after = [], []
    if context:
        before, after = model._encode_pair(context, continuation)
    # the two parts may have met in one token: it counts as the continuation
    return before, after or model.tok_encode(continuation, add_special_tokens=False)


def scored(model: Any, asked: Mapping[Place, Any], tick: Any = nothing) -> Part:
    """Likelihoods of continuations; those of one document share their noise, and one that is alone
    in it is compared with greedy decoding. `asked`, `tick`: as of `written`.
    """
    pairs = {place: _pair(model, request) for place, request in asked.items()}
    choices = Counter(place[:2] for place in asked)
    groups = defaultdict(list)
    for place in asked:
        own = place if model.settings.watches(place[1]) else None
        groups[choices[place[:2]] == 1, own].append(place)
    found = {}
    for (greedy, watched), places in groups.items():
        run = partial(
            score,
            model.loaded,
            [pairs[place] for place in places],
            likelihood_settings(model.settings),
            groups=[request_number(0, request_key(*place[:2])) for place in places],
            greedy=greedy,
            edits=model.scored_edits,
            measure=watched is not None,
            progress=partial(tick, 1),
        )
        sinks: list[Row] = []
        if watched is None:
            results = run()
        else:
            context = len(pairs[watched][0])
            results, sinks = _watched(model, max(context, not model.is_diffusion), run)
        for place, result in zip(places, results, strict=True):
            found[place] = _answer(result, sinks)
    return found


def _answer(result: Scored, sinks: list[Row]) -> Row:
    dose: Mapping[str, tuple[float, float]] = {}
    if result.dose:
        dose = result.dose.totals
    return {
        "logprob": result.logprob,
        "stderr": result.stderr,
        "greedy": result.greedy,
        "tokens": result.tokens,
        "cut": result.dropped,
        "sinks": sinks,
        "dose": dose,
    }


def _watched(model: Any, context: int, run: Any) -> tuple[Any, list[Row]]:
    """The result of `run`, and the facts of its first forwards: every noisy copy counts as a step.

    Args:
        model: that is run.
        context: tokens of the context, of which scoring may drop some.
        run: scores.
    """
    with trace(model.loaded.model, ("received",), steps=range(FORWARDS)) as recording:
        found = run()
    prefix = model.loaded.added_sinks
    steps = []
    for forward, received_BLHK in enumerate(recording.received):
        state_S = torch.full((received_BLHK.shape[-1] - prefix,), MASKED)
        state_S[: context - found[0].dropped] = PROMPT
        steps += [
            columns_of(recording, "received", forward, row, state_S, prefix)
            for row in range(len(received_BLHK))
        ]
    # which tokens of the continuation are hidden differs from copy to copy, and is not kept
    return found, [
        {**row, "in_masked": math.nan, "in_committed": math.nan} for row in sink_rows(steps)
    ]


def rolled(model: Any, asked: Mapping[Place, Any], tick: Any = nothing) -> Part:
    """Likelihoods of whole texts. `asked`, `tick`: as of `written`."""
    found = {}
    for place, request in asked.items():
        result = rolling(
            model.loaded,
            model.tok_encode(request.args[0], add_special_tokens=False),
            likelihood_settings(model.settings),
            edits=model.scored_edits,
            measure=model.settings.watches(place[1]),
        )
        found[place] = _answer(result, [])
        tick(1)
    return found


ANSWERS = {"generate_until": written, "loglikelihood": scored, "loglikelihood_rolling": rolled}
"""Function that answers each kind of request."""
