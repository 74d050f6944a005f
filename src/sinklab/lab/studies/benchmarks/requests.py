"""Answers to requests of lm-eval by a `SinklabLM`, with the dose of its edits and facts of its
sinks: how long texts are, which are written together, share noise, and are watched.
"""

# B batch rows, L layers, H heads, K keys (added sinks first), N numbers of a dose, S positions
import hashlib
import json
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sinklab.core.instrument import Recording, trace
from sinklab.core.sinks import MASKED, PROMPT
from sinklab.core.subject import DecodingSettings
from sinklab.lab.analysis.facts import PLACES, sink_columns
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
Columns = dict[str, np.ndarray]
"""Facts of a step, each (L,); see `sink_columns`."""


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


def columns_of(
    recording: Recording, statistic: str, forward: int, row: int, state_S: Tensor, prefix: int
) -> Columns:
    """Facts of one row in one forward of a recording.

    Args:
        recording: of the forward.
        statistic: "received" or "last_row".
        forward: its number in the recording.
        row: of the batch.
        state_S: state of each position, a number in `PLACES`.
        prefix: added sinks, in front of the keys.
    """
    received_LHK = recording.values(statistic)[forward][row].float().cpu().numpy()
    seen_K = recording.visible[forward][row].cpu().numpy() > 0
    added_N = np.full(prefix, PLACES.index("sink"))
    return sink_columns(received_LHK, seen_K, np.concatenate([added_N, state_S.cpu().numpy()]))


def sink_rows(steps: Sequence[Columns]) -> list[Row]:
    """Means over the steps of an answer, a row a layer; none without steps."""
    if not steps:
        return []
    means = {name: np.mean([step[name] for step in steps], axis=0) for name in steps[0]}
    layers = range(len(means["share"]))
    return [
        {"layer": layer, "steps": len(steps)}
        | {name: float(mean_L[layer]) for name, mean_L in means.items()}
        for layer in layers
    ]


def needs_own_batch(settings: DecodingSettings, edits: Sequence[Any]) -> bool:
    """Whether an answer would depend on the other rows of its batch, so that it is written alone.

    True if random numbers are drawn (for the tokens, the positions or a random control), and if
    rows wait for one another under something that counts forwards.
    """
    chosen = settings.values()
    rule, schedule = chosen["rule"], chosen["schedule"]
    draws = settings.temperature > 0 or rule.draws or schedule.pooled or is_random(edits)
    return draws or (not schedule.fixed and (bool(edits) or chosen["cache"] is not None))


def followed(writer: Writer, *, watch: bool = False, tick: Tick = nothing) -> list[Row]:
    """Write everything, and return what is known of each row: ``steps``, evaluations that it took
    part in; ``sinks``, rows of facts if they are watched; ``dose``, the totals of a `Dose`.
    """
    model: Any = writer.loaded.model
    watched: list[list[Columns]] = [[] for _ in writer.over_B]
    steps_B = torch.zeros(len(watched), dtype=torch.int64)
    taken_BN2: Any = 0
    watching = None
    if watch:

        def watching(_: int) -> Any:
            return trace(model, (writer.statistic,), steps=(0,))

    for step in writer.steps(watching):
        steps_B += step.active_B
        taken_BN2 = taken_BN2 + taken(writer.log, step.active_B)
        # unread entries would fill the memory of a long run
        writer.log.removals.clear()
        if watch:
            for row in step.active_B.nonzero()[:, 0].tolist():
                how = (row, step.state_BS[row], writer.loaded.added_sinks)
                watched[row].append(columns_of(step.seen, writer.statistic, 0, *how))
        tick()
    if not isinstance(taken_BN2, Tensor):
        taken_BN2 = [0] * len(watched)
    return [
        {"steps": steps, "sinks": sink_rows(some), "dose": totals(taken_N2)}
        for steps, some, taken_N2 in zip(steps_B.tolist(), watched, taken_BN2, strict=True)
    ]


def write_batch(
    loaded: Loaded,
    requests: Sequence[WritingRequest],
    settings: DecodingSettings,
    new_tokens: int,
    edits: Sequence[Any] = (),
    *,
    watch: bool = False,
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
        watch: trace every step, and give facts about sinks.
        tick: called after every step.

    Raises:
        ValueError: for settings that the decoder, the model or the interventions refuse, and NaN
            logits.
    """
    seed = requests[0].seed
    texts = Writing(loaded, requests, replace(settings, seed=seed), new_tokens, seeded(edits, seed))
    with texts.begin(measure=watch) as writer:
        rows = followed(writer, watch=watch, tick=tick)
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
        groups[settings.watches(place[1]), new_tokens].append(place)
    size = settings.batch
    if needs_own_batch(settings, model.edits):
        size = 1
    found = {}
    for (watch, new_tokens), places in groups.items():
        places.sort(key=lambda place: -len(fitted[place][0].ids))
        for start in range(0, len(places), size):
            some = places[start : start + size]
            texts = write_batch(
                model.loaded,
                [fitted[place][0] for place in some],
                settings,
                new_tokens,
                model.edits,
                watch=watch,
                tick=partial(tick, len(some) / (settings.steps or new_tokens)),
            )
            for place, text in zip(some, texts, strict=True):
                found[place] = text | {"cut": fitted[place][2], "new_tokens": new_tokens}
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
            groups=[request_number(0, *place[:2]) for place in places],
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
            told = vars(result)
            found[place] = {name: told[name] for name in ("logprob", "stderr", "greedy", "tokens")}
            found[place] |= {"cut": result.dropped, "sinks": sinks, "dose": {}}
            if result.dose:
                found[place]["dose"] = result.dose.totals
    return found


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
    # which tokens of the continuation are masked differs from copy to copy, and is not kept
    unknown = {"in_masked": math.nan, "in_committed": math.nan}
    return found, [row | unknown for row in sink_rows(steps)]


ANSWERS = {"generate_until": written, "loglikelihood": scored}
"""Function that answers each kind of request."""
