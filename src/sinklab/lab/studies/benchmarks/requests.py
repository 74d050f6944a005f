"""Answers to requests of lm-eval by a `SinklabLM`, with the dose of its edits: how long texts are,
which are written together, and which share noise.
"""

# B batch rows, N numbers of a dose
import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sinklab.core.subject import DecodingSettings
from sinklab.lab.checkpoints import Loaded
from sinklab.lab.scoring import (
    LikelihoodSettings,
    Writing,
    WritingRequest,
    ended,
    limit_of,
    score,
    seeded,
)
from sinklab.lab.scoring.requests import start_token
from sinklab.lab.scoring.writing import Writer, is_random, taken, totals
from sinklab.lab.studies import Row, Tick, nothing
from sinklab.lab.studies.benchmarks.study import EvalSettings

DEFAULT_TOKENS = 256
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens")
Place = tuple[str, int, int]
"""Task, document, and number of the request in it."""
Part = dict[Place, Row]
"""Some answers."""
PLACE = ("task", "doc_id", "request")
"""Columns that say which request an answer is to."""


def place_of(request: Any) -> Place:
    """The place of a request of lm-eval."""
    return request.task_name or "", request.doc_id or 0, request.idx


def request_number(seed: int, *parts: Any) -> int:
    """The seed of one request: it depends on the run's seed and on what the request is, not on its
    neighbours.
    """
    text = json.dumps(parts, sort_keys=True, ensure_ascii=True, default=str)
    key = hashlib.sha256(text.encode()).hexdigest()
    return int(hashlib.sha256(f"{seed}:{key}".encode()).hexdigest()[:15], 16)


def needs_own_batch(settings: DecodingSettings, edits: Sequence[Any]) -> bool:
    """Whether an answer would depend on the other rows of its batch, so that it is written alone.

    True if random numbers are drawn (for the tokens, the positions or a random control), and if
    rows wait for one another under something that counts forwards.
    """
    chosen = settings.values()
    rule, schedule = chosen["rule"], chosen["schedule"]
    draws = settings.temperature > 0 or rule.draws or schedule.pooled or is_random(edits)
    return draws or (not schedule.fixed and (bool(edits) or chosen["cache"] is not None))


def followed(writer: Writer, tick: Tick = nothing) -> list[Row]:
    """Write everything, and return what is known of each row: ``steps``, evaluations that it took
    part in; ``dose``, the totals of a `Dose`.
    """
    steps_B = torch.zeros(len(writer.over_B), dtype=torch.int64)
    taken_BN2: Any = 0
    for step in writer.steps():
        steps_B += step.active_B
        taken_BN2 = taken_BN2 + taken(writer.log, step.active_B)
        # unread entries would fill the memory of a long run
        writer.log.removals.clear()
        tick()
    if not isinstance(taken_BN2, Tensor):
        taken_BN2 = [0] * len(steps_B)
    return [
        {"steps": steps, "dose": totals(taken_N2)}
        for steps, taken_N2 in zip(steps_B.tolist(), taken_BN2, strict=True)
    ]


def write_batch(
    loaded: Loaded,
    requests: Sequence[WritingRequest],
    settings: DecodingSettings,
    new_tokens: int,
    edits: Sequence[Any] = (),
    tick: Tick = nothing,
) -> list[Row]:
    """Write the answers to several prompts of any lengths: ``text``, ``tokens`` up to the end of
    text (those after an `until` text included), and what `followed` knows.

    A row is what it would be alone, up to rounding; see `needs_own_batch` for answers that must be
    written alone (the seed of the first request is used). Writing ends when every row has met its
    end.

    Args:
        loaded: the model.
        requests: the prompts.
        settings: of decoding.
        new_tokens: to write, for each.
        edits: interventions they are written under.
        tick: called after every step.

    Raises:
        ValueError: for settings that the decoder, the model or the interventions refuse, and NaN
            logits.
    """
    seed = requests[0].seed
    texts = Writing(loaded, requests, replace(settings, seed=seed), new_tokens, seeded(edits, seed))
    with texts.begin() as writer:
        rows = followed(writer, tick)
    answers = []
    for row, (request, found) in enumerate(zip(requests, rows, strict=True)):
        ids, text = ended(loaded, writer.row(row), request.until, request.ids[-1:])
        answers.append({"text": text, "tokens": len(ids), **found})
    return answers


def writing_request(model: Any, request: Any) -> tuple[WritingRequest, int, int]:
    """A request for a text, fitted to the model; the tokens to write; and the tokens of the prompt
    that were cut.

    The answer has no more than half of the context, and the prompt loses its left end, as in
    lm-eval. Raises ValueError for a task that wants several answers to a request.
    """
    text, given = request.args
    if (request.repeats or 1) > 1:
        raise ValueError(
            f"{request.task_name} asks for {request.repeats} answers to each request, and one is "
            "written; set its repeats to 1"
        )
    lengths = [model.settings.new_tokens, *map(given.get, _LENGTHS), DEFAULT_TOKENS]
    context = limit_of(model.loaded)
    new_tokens = min(next(int(length) for length in lengths if length), context // 2)
    until = given.get("until") or ()
    if isinstance(until, str):
        until = (until,)
    prompt = model.tok_encode(text)
    if not prompt and not model.is_diffusion:
        where = "the context of this request"
        prompt = [start_token(model.loaded, where, "choose another task")]
    cut = max(len(prompt) - (context - new_tokens), 0)
    seed = request_number(model.settings.seed or 0, "generate_until", text, given)
    return WritingRequest(tuple(prompt[cut:]), tuple(until), seed), new_tokens, cut


def written(model: Any, asked: Mapping[Place, Any], tick: Any = nothing) -> Part:
    """Texts; those of one length that can be written together are, longest prompt first.

    Args:
        model: a `SinklabLM`.
        asked: requests of lm-eval.
        tick: called with the answers, or the part of one, that were written since.
    """
    settings = model.settings
    fitted = {place: writing_request(model, request) for place, request in asked.items()}
    groups = defaultdict(list)
    for place, (_, new_tokens, _) in fitted.items():
        groups[new_tokens].append(place)
    size = settings.batch
    if needs_own_batch(settings, model.edits):
        size = 1
    found = {}
    for new_tokens, places in groups.items():
        places.sort(key=lambda place: -len(fitted[place][0].ids))
        for start in range(0, len(places), size):
            some = places[start : start + size]
            texts = write_batch(
                model.loaded,
                [fitted[place][0] for place in some],
                settings,
                new_tokens,
                model.edits,
                partial(tick, len(some) / (settings.steps or new_tokens)),
            )
            for place, text in zip(some, texts, strict=True):
                found[place] = text | {"cut": fitted[place][2], "new_tokens": new_tokens}
    return found


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
        groups[choices[place[:2]] == 1].append(place)
    found = {}
    for greedy, places in groups.items():
        results = score(
            model.loaded,
            [pairs[place] for place in places],
            likelihood_settings(model.settings),
            groups=[request_number(0, *place[:2]) for place in places],
            greedy=greedy,
            edits=model.scored_edits,
            progress=partial(tick, 1),
        )
        for place, result in zip(places, results, strict=True):
            names = ("logprob", "stderr", "greedy", "tokens")
            answer = {name: getattr(result, name) for name in names}
            dose = result.dose.totals if result.dose else {}
            found[place] = answer | {"cut": result.dropped, "dose": dose}
    return found


ANSWERS = {"generate_until": written, "loglikelihood": scored}
"""Function that answers each kind of request."""
