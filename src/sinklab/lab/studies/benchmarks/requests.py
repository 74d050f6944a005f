"""Requests of lm-eval to the model, a `SinklabLM`: which share noise, which are watched, how they
are answered; and the answers that are kept.
"""

# B rows of a forward, L layers, H heads, K keys, S positions
import dataclasses
import hashlib
import itertools
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sinklab.core.instrument import trace
from sinklab.core.sinks import MASKED, PROMPT
from sinklab.lab.files import from_json
from sinklab.lab.scoring import (
    LikelihoodSettings,
    Scored,
    SinkFacts,
    WritingRequest,
    limit_of,
    needs_own_batch,
    rolling,
    score,
    write_batch,
)
from sinklab.lab.scoring.requests import start_token
from sinklab.lab.studies import Row
from sinklab.lab.studies.benchmarks.study import EvalSettings

DEFAULT_TOKENS = 256
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens")
Part = dict[str, Row]
"""Some answers by the keys of their requests."""
Unit = tuple[list[str], Callable[[], Part]]
"""The keys of requests that are answered together, whichever of them are answered already, and the
function that answers them.
"""


def request_key(*parts: Any) -> str:
    """A name for a request: equal for equal parts, in every process and on every machine."""
    text = json.dumps(parts, sort_keys=True, ensure_ascii=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def request_number(seed: int, key: str) -> int:
    """The seed of one request: it depends on the run's seed and on the request, not on its
    neighbours.
    """
    return int(hashlib.sha256(f"{seed}:{key}".encode()).hexdigest()[:15], 16)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One request."""

    key: str
    """Requests of one key have one answer."""
    document: tuple[str, int]
    """Task and number of the document."""
    number: int = 0
    """Number of the request within its document."""
    ids: tuple[int, ...] = ()
    """The prompt, the context, or the whole text."""
    watched: bool = False
    """Whether the attention is recorded."""


def about(model: Any, request: Any) -> dict[str, Any]:
    """Facts of an lm-eval request, as fields of `Asked`."""
    document = request.doc_id or 0
    return {
        "document": (request.task_name or "", document),
        "number": request.idx,
        "watched": model.settings.watches(document),
    }


@dataclass(frozen=True, kw_only=True)
class Job(Asked):
    """A request for a text."""

    until: tuple[str, ...]
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


def parts_of(asked: list[Any], size: int) -> list[list[Any]]:
    """Parts of this size, in order."""
    return [asked[start : start + size] for start in range(0, len(asked), size)]


def stepper(model: Any, answers: int, most: int) -> Callable[[], None]:
    """A function that tells a model after every step how far some answers are that are written
    together; `most`: steps that they take, if none ends before.
    """
    done = itertools.count(1)
    return lambda: model.moved(answers * min(next(done) / most, 1))


def writing_jobs(model: Any, requests: Iterable[Any]) -> list[Job]:
    """Every request as a job. A repeated one has a name, and so noise, of its own only if noise
    decides.
    """
    context = limit_of(model.loaded)
    seen = Counter[str]()
    jobs = []
    for request in requests:
        text, given = request.args
        settings = sampled(model.settings, given)
        lengths = [model.settings.new_tokens, *map(given.get, _LENGTHS), DEFAULT_TOKENS]
        asked = next(int(length) for length in lengths if length)
        until = given.get("until") or ()
        if isinstance(until, str):
            until = (until,)
        name = request_key("generate_until", text, given)
        nth = 0
        # beyond its repeats a request only fills up a distributed batch
        if seen[name] < (request.repeats or 1) and needs_own_batch(settings, model.edits):
            nth = seen[name]
        seen[name] += 1
        prompt = model.tok_encode(text)
        if not prompt and not model.is_diffusion:
            where = "the context of this request"
            prompt = [start_token(model.loaded, where, "choose another task")]
        ids, new_tokens, cut = fitted(prompt, asked, context)
        job = Job(
            key=request_key(name, nth),
            ids=ids,
            until=tuple(until),
            new_tokens=new_tokens,
            settings=paced(settings, new_tokens, asked),
            cut=cut,
            **about(model, request),
        )
        jobs.append(job)
    return jobs


def written(model: Any, jobs: Iterable[Job]) -> Iterator[Unit]:
    """Units that write jobs: those that can be written together, of like lengths, longest first."""
    groups: dict[Any, list[Job]] = {}
    for job in jobs:
        groups.setdefault((job.watched, job.new_tokens, job.settings), []).append(job)
    for (*_, settings), group in groups.items():
        group.sort(key=lambda job: (-len(job.ids), job.key))
        size = model.settings.batch
        if needs_own_batch(settings, model.edits):
            size = 1
        for batch in parts_of(group, size):
            yield [job.key for job in batch], partial(_write, model, batch)


def _write(model: Any, batch: list[Job]) -> Part:
    # all that the jobs of a batch have in common
    first = batch[0]
    seed = model.settings.seed or 0
    asked = [WritingRequest(job.ids, job.until, request_number(seed, job.key)) for job in batch]
    texts = write_batch(
        model.loaded,
        asked,
        first.settings,
        first.new_tokens,
        model.edits,
        watch=first.watched,
        progress=stepper(model, len(batch), first.settings.steps or first.new_tokens),
    )
    return {
        job.key: {
            "text": one.text,
            "tokens": len(one.ids),
            "steps": one.steps,
            "prompt_tokens": len(job.ids),
            "cut": job.cut,
            "new_tokens": job.new_tokens,
            "sinks": list(one.sinks),
            "dose": one.dose,
        }
        for job, one in zip(batch, texts, strict=True)
    }


FORWARDS = 4
"""Number of forwards of a request that are watched; more noisy copies of the same text say little
that is new.
"""


@dataclass(frozen=True, kw_only=True)
class Continuation(Asked):
    """A request for the likelihood of a continuation of `ids`."""

    continuation: tuple[int, ...]
    group: int
    """Requests of one group share their noise."""
    greedy: bool
    """Whether it is compared with greedy decoding."""


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


def continuations(model: Any, requests: Sequence[Any]) -> list[Continuation]:
    """Every (context, continuation) request; those of one document share their noise."""
    facts = [about(model, request) for request in requests]
    asked_of = {(each["document"], each["number"]) for each in facts}
    choices = Counter(document for document, _ in asked_of)
    found = []
    for request, each in zip(requests, facts, strict=True):
        context, continuation = request.args
        # if a model cannot start from nothing, `score` puts its beginning of text
        before = after = ()
        if context:
            before, after = model._encode_pair(context, continuation)
        # the two parts may have met in one token: it counts as the continuation
        after = after or model.tok_encode(continuation, add_special_tokens=False)
        greedy = choices[each["document"]] == 1
        one = Continuation(
            key=request_key("loglikelihood", request.args, each["document"], greedy),
            ids=tuple(before),
            continuation=tuple(after),
            group=request_number(0, request_key(*each["document"])),
            greedy=greedy,
            **each,
        )
        found.append(one)
    return found


def scored(model: Any, asked: Sequence[Continuation]) -> Iterator[Unit]:
    """Units that score continuations, some at a time, so that an interruption costs little."""
    ordered = sorted(asked, key=lambda each: -len(each.ids) - len(each.continuation))
    for greedy, watched in itertools.product((False, True), repeat=2):
        some = [each for each in ordered if (each.greedy, each.watched) == (greedy, watched)]
        size = 4 * model.settings.likelihood_batch
        if watched:
            size = 1
        for part in parts_of(some, size):
            yield [each.key for each in part], partial(_score, model, part)


def _score(model: Any, part: list[Continuation]) -> Part:
    # a watched one is alone
    first = part[0]
    run = partial(
        score,
        model.loaded,
        [(each.ids, each.continuation) for each in part],
        likelihood_settings(model.settings),
        groups=[each.group for each in part],
        greedy=first.greedy,
        edits=model.scored_edits,
        measure=first.watched,
        progress=stepper(model, len(part), len(part)),
    )
    if first.watched:
        found, sinks = _watched(model, max(len(first.ids), not model.is_diffusion), run)
    else:
        found = run()
        sinks = []
    return {each.key: _answer(result, sinks) for each, result in zip(part, found, strict=True)}


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
    facts = SinkFacts(torch.zeros(1, dtype=torch.int64), prefix)
    for received_BLHK, visible_BK in zip(recording.received, recording.visible, strict=True):
        state_1S = torch.full((1, received_BLHK.shape[-1] - prefix), MASKED)
        state_1S[:, : context - found[0].dropped] = PROMPT
        for row in range(len(received_BLHK)):
            one = slice(row, row + 1)
            facts.count(received_BLHK[one], visible_BK[one], state_1S, torch.ones(1) > 0)
    # which tokens of the continuation are hidden differs from copy to copy, and is not kept
    return found, [{**row, "in_masked": None, "in_committed": None} for row in facts.row(0)]


def whole_texts(model: Any, requests: Sequence[Any]) -> list[Asked]:
    """Every request for the likelihood of a whole text."""
    found = []
    for request in requests:
        (text,) = request.args
        ids = model.tok_encode(text, add_special_tokens=False)
        key = request_key("loglikelihood_rolling", text)
        found.append(Asked(key=key, ids=tuple(ids), **about(model, request)))
    return found


def rolled(model: Any, asked: Sequence[Asked]) -> Iterator[Unit]:
    """Units that score whole texts, one at a time."""
    for each in asked:
        yield [each.key], partial(_roll, model, each)


def _roll(model: Any, each: Asked) -> Part:
    result = rolling(
        model.loaded,
        each.ids,
        likelihood_settings(model.settings),
        edits=model.scored_edits,
        measure=each.watched,
    )
    return {each.key: _answer(result, [])}


class RequestCache:
    """Answers by request key, in memory and, if a folder is given, in its files
    requests-<number>.jsonl.

    Every shard writes a file of its own, and reads all of them, so that a run can be resumed with
    any number of shards. A line that was cut short by a kill is left out; so is one of another
    fingerprint.
    """

    def __init__(self, folder: Path | None, fingerprint: str, number: int = 0) -> None:
        self._folder = folder
        self._fingerprint = fingerprint
        self._answers: Part = {}
        self._read: dict[Path, int] = {}
        self._path = None
        if folder is not None:
            self._path = folder / f"requests-{number}.jsonl"
        self.refresh()

    def refresh(self) -> None:
        """Read the answers that all shards have added since."""
        if self._folder is None:
            return
        for path in sorted(self._folder.glob("requests-*.jsonl")):
            read = self._read.get(path, 0)
            with open(path, "rb") as file:
                file.seek(read)
                # another shard may be writing the last line
                whole, end, _ = file.read().rpartition(b"\n")
            self._read[path] = read + len(whole + end)
            for line in whole.split(b"\n"):
                # the last line of a process that was killed is none
                with suppress(ValueError):
                    entry = from_json(line, dict)
                    if entry.get("run") == self._fingerprint and "key" in entry:
                        self._answers.setdefault(entry["key"], entry.get("answer", {}))

    def get(self, key: str) -> Row | None:
        """The answer to a request, None if there is none."""
        return self._answers.get(key)

    def has(self, keys: Iterable[str]) -> bool:
        """Whether all of these requests are answered."""
        return all(key in self._answers for key in keys)

    def add(self, answers: Part) -> None:
        """Keep answers to requests without one; they are on the disk when this returns."""
        new = {key: answer for key, answer in answers.items() if key not in self._answers}
        self._answers.update(new)
        if self._path is None or not new:
            return
        with open(self._path, "ab+") as handle:
            if handle.tell():
                handle.seek(-1, os.SEEK_END)
                if handle.read(1) != b"\n":
                    # behind a line that was cut short
                    handle.write(b"\n")
            for key, answer in new.items():
                entry = {"run": self._fingerprint, "key": key, "answer": answer}
                handle.write(json.dumps(entry).encode() + b"\n")
            handle.flush()
            os.fsync(handle.fileno())
