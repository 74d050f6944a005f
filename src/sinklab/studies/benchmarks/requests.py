"""Requests of lm-eval to the model, a `SinklabLM`: which share noise, which are watched, what is kept of each."""

# B rows of a forward, S positions
from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sinklab.checkpoints.loading import Loaded
from sinklab.probing.tracing import trace
from sinklab.scoring.answers import needs_own_batch
from sinklab.scoring.likelihood import rolling, score
from sinklab.scoring.requests import limit_of, start_token
from sinklab.scoring.settings import LikelihoodSettings, Scored
from sinklab.scoring.sink_facts import SinkFacts
from sinklab.sinks.states import MASKED, PROMPT
from sinklab.studies.benchmarks.settings import EvalSettings
from sinklab.studies.request_cache import request_key, request_number

DEFAULT_TOKENS = 256
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens")


@dataclass(frozen=True)
class Job:
    """One request for a text."""

    key: str
    task: str
    document: int
    ids: tuple[int, ...]
    until: tuple[str, ...]
    new_tokens: int
    settings: EvalSettings
    """With the temperature that the task asks for."""
    cut: int
    """Tokens of the prompt that did not fit and were left out, from the left."""
    watched: bool


def fitted(ids: Sequence[int], asked: int, context: int) -> tuple[tuple[int, ...], int, int]:
    """A prompt and a length that fit the context together, and how many tokens were left out.

    An answer longer than what the prompt leaves is shortened, down to half of the context; then the prompt loses its
    left end, as in lm-eval.
    """
    new_tokens = min(asked, max(context - len(ids), context // 2, 1))
    room = context - new_tokens
    kept = tuple(ids[len(ids) - room :] if len(ids) > room else ids)
    return kept, new_tokens, len(ids) - len(kept)


def paced(settings: EvalSettings, new_tokens: int, asked: int) -> EvalSettings:
    """The settings for an answer that had to be shortened: fewer steps in proportion."""
    if settings.steps is None or new_tokens == asked:
        return settings
    blocks = math.ceil(new_tokens / (settings.block_length or new_tokens))
    steps = min(max(math.ceil(settings.steps * new_tokens / asked), blocks), new_tokens)
    return dataclasses.replace(settings, steps=steps)


def sampled(settings: EvalSettings, asked: dict[str, Any]) -> EvalSettings:
    """The settings with the temperature of a task that wants its answers drawn, where none was given."""
    if not asked.get("do_sample") or settings.temperature > 0 or not asked.get("temperature"):
        return settings
    cuts = {name: asked[name] for name in ("top_p", "top_k") if asked.get(name) and getattr(settings, name) is None}
    return dataclasses.replace(settings, temperature=float(asked["temperature"]), **cuts)


def writing_jobs(model: Any, requests: Iterable[Any]) -> list[Job]:
    """Every request as a job. A repeated one has a name, and so noise, of its own only where noise decides."""
    loaded, settings = model.loaded, model.settings
    context, seen = limit_of(loaded), Counter[str]()
    jobs = []
    for request in requests:
        text, given = request.args
        own = sampled(settings, given)
        until = given.get("until") or ()
        until = (until,) if isinstance(until, str) else tuple(until)
        asked = settings.new_tokens or next((int(given[name]) for name in _LENGTHS if given.get(name)), DEFAULT_TOKENS)
        named = request_key("generate_until", text, given)
        # beyond its repeats a request only fills up a distributed batch
        nth = seen[named] if seen[named] < (request.repeats or 1) and needs_own_batch(own, model.edits) else 0
        seen[named] += 1
        ids, new_tokens, cut = fitted(_begun(loaded, model.tok_encode(text)), asked, context)
        of = (request_key(named, nth), request.task_name or "", request.doc_id or 0)
        how = (paced(own, new_tokens, asked), cut, is_watched(settings, request.doc_id))
        jobs.append(Job(*of, ids, until, new_tokens, *how))
    return jobs


def _begun(loaded: Loaded, ids: list[int]) -> list[int]:
    """The ids that a model can start from: an autoregressive one needs one at least."""
    if ids or loaded.family == "diffusion":
        return ids
    return [start_token(loaded, "the context of this request", "choose another task")]


def is_watched(settings: EvalSettings, document: int | None) -> bool:
    """Whether the attention of this document's runs is recorded: by its number, in whichever process it is."""
    return settings.record_sinks is None or (document or 0) < settings.record_sinks


def batches(model: Any, jobs: Iterable[Job]) -> Iterator[list[Job]]:
    """Jobs that can be written together, of like lengths, longest first; every name once."""
    groups: dict[Any, list[Job]] = {}
    for job in {job.key: job for job in jobs}.values():
        groups.setdefault((job.watched, job.new_tokens, job.settings), []).append(job)
    for group in groups.values():
        group.sort(key=lambda job: (-len(job.ids), job.key))
        rows = 1 if needs_own_batch(group[0].settings, model.edits) else model.settings.batch
        yield from (group[start : start + rows] for start in range(0, len(group), rows))


FORWARDS = 4
"""So many forwards of a request are watched; more noisy copies of the same text say little that is new."""


@dataclass(frozen=True)
class _Scoring:
    key: str
    context: tuple[int, ...]
    continuation: tuple[int, ...]
    group: int
    greedy: bool
    watched: bool


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


def scored(model: Any, requests: Sequence[Any]) -> list[dict[str, Any]]:
    """The answers to (context, continuation) requests, in their order."""
    documents = [(request.task_name or "", request.doc_id or 0) for request in requests]
    different = [(document, request.idx) for document, request in zip(documents, requests, strict=True)]
    choices = Counter(document for document, _ in set(different))
    asked = []
    for request, document in zip(requests, documents, strict=True):
        context, continuation = _encoded(model, *request.args)
        group = request_number(0, request_key(*document))
        greedy = choices[document] == 1
        key = request_key("loglikelihood", request.args, document, greedy)
        watched = is_watched(model.settings, request.doc_id)
        asked.append(_Scoring(key, context, continuation, group, greedy, watched))
    _ask(model, asked)
    answers = [model.cache.get(each.key) or {} for each in asked]
    for request, document, answer in zip(requests, documents, answers, strict=True):
        model.tell(document, request.idx, answer)
    return answers


def _encoded(model: Any, context: str, continuation: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if not context:
        # where a model cannot start from nothing, `score` puts its beginning of text
        return (), tuple(model.tok_encode(continuation, add_special_tokens=False))
    before, after = model._encode_pair(context, continuation)
    if not after:
        # the two parts met in one token: it counts as the continuation
        after = model.tok_encode(continuation, add_special_tokens=False)
    return tuple(before), tuple(after)


def _ask(model: Any, asked: Sequence[_Scoring]) -> None:
    """Score what the cache does not hold, some at a time, so that an interruption costs little."""
    names = {each.key: each for each in asked}
    todo = [each for key, each in names.items() if model.cache.get(key) is None]
    done = len(names) - len(todo)
    counted = model.counted("scoring", "continuations", len(names), done)
    todo.sort(key=lambda each: -len(each.context) - len(each.continuation))
    for greedy in (False, True):
        plain = [each for each in todo if each.greedy == greedy and not each.watched]
        together = 4 * model.settings.likelihood_batch
        parts = [plain[start : start + together] for start in range(0, len(plain), together)]
        for part in [*parts, *([each] for each in todo if each.greedy == greedy and each.watched)]:
            model.cache.add(_scores(model, part, greedy=greedy))
            counted(len(part))


def _scores(model: Any, asked: Sequence[_Scoring], *, greedy: bool) -> dict[str, dict[str, Any]]:
    def run() -> list[Scored]:
        return score(
            model.loaded,
            [(each.context, each.continuation) for each in asked],
            likelihood_settings(model.settings),
            groups=[each.group for each in asked],
            edits=model.scored_edits,
            greedy=greedy,
        )

    if asked[0].watched:
        found, sinks = _watched(model.loaded, max(len(asked[0].context), not model.is_diffusion), run)
    else:
        found, sinks = run(), []
    return {each.key: _answer(result, sinks) for each, result in zip(asked, found, strict=True)}


def _answer(result: Scored, sinks: list[dict[str, Any]]) -> dict[str, Any]:
    about = {"logprob": result.logprob, "stderr": result.stderr, "greedy": result.greedy, "tokens": result.tokens}
    return about | {"cut": result.dropped, "sinks": sinks}


def _watched(loaded: Loaded, context: int, run: Any) -> tuple[Any, list[dict[str, Any]]]:
    """What `run` gives, and the facts of its first forwards: every noisy copy counts as a step.

    Args:
        context: tokens of the context, of which scoring may drop some.
    """
    with trace(loaded.model, ("received",), steps=range(FORWARDS)) as recording:
        found = run()
    context -= found[0].dropped
    prefix = getattr(loaded.model.config, "sink_count", 0)
    facts = SinkFacts(torch.zeros(1, dtype=torch.int64), prefix)
    for received_BLHK, visible_BK in zip(recording.received, recording.visible, strict=True):
        state_1S = torch.full((1, received_BLHK.shape[-1] - prefix), MASKED)
        state_1S[:, :context] = PROMPT
        for row in range(len(received_BLHK)):
            facts.count(received_BLHK[row : row + 1], visible_BK[row : row + 1], state_1S, torch.ones(1) > 0)
    # which tokens of the continuation are hidden differs from copy to copy, and is not kept
    return found, [{**row, "in_masked": None, "in_committed": None} for row in facts.row(0)]


def rolled(model: Any, requests: Sequence[Any]) -> list[dict[str, Any]]:
    """The answers to requests for the likelihood of a whole text, in their order."""
    counted = model.counted("scoring", "texts", len(requests), 0)
    answers = []
    for request in requests:
        (text,) = request.args
        key = request_key("loglikelihood_rolling", text)
        answer = model.cache.get(key)
        if answer is None:
            ids = model.tok_encode(text, add_special_tokens=False)
            result = rolling(model.loaded, ids, likelihood_settings(model.settings), edits=model.scored_edits)
            answer = _answer(result, [])
            model.cache.add({key: answer})
        counted(1)
        model.tell((request.task_name or "", request.doc_id or 0), 0, answer)
        answers.append(answer)
    return answers
