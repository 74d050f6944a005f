"""Requests of lm-eval as what a model is asked: ids that fit its context, ends, lengths, seeds and names."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sinklab.evaluation.benchmark_settings import EvalSettings
from sinklab.evaluation.likelihood_requests import limit_of
from sinklab.evaluation.request_cache import request_key
from sinklab.models import Loaded

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


def writing_jobs(
    loaded: Loaded,
    requests: Iterable[Any],
    settings: EvalSettings,
    encode: Callable[[str], list[int]],
    is_drawn: Callable[[EvalSettings], bool],
) -> list[Job]:
    """Every request as a job. A repeated one has a name, and so noise, of its own only where noise decides."""
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
        nth = seen[named] if seen[named] < (request.repeats or 1) and is_drawn(own) else 0
        seen[named] += 1
        ids, new_tokens, cut = fitted(started(loaded, encode(text)), asked, context)
        jobs.append(
            Job(
                request_key(named, nth),
                request.task_name or "",
                request.doc_id or 0,
                ids,
                until,
                new_tokens,
                paced(own, new_tokens, asked),
                cut,
                is_watched(settings, request.doc_id),
            )
        )
    return jobs


def started(loaded: Loaded, ids: list[int]) -> list[int]:
    """The ids that a model can start from: an autoregressive one needs one at least.

    Raises:
        ValueError: where there is none, and the model names no beginning or end of text.
    """
    if ids or loaded.family == "diffusion":
        return ids
    bos = loaded.special.bos if loaded.special.bos is not None else loaded.special.eos
    if bos is None:
        raise ValueError(
            f"{loaded.name} is autoregressive and needs a token to start from, but this request has an empty context "
            "and the model names no beginning of text; choose another task"
        )
    return [bos]


def is_watched(settings: EvalSettings, document: int | None) -> bool:
    """Whether the attention of this document's runs is recorded: by its number, in whichever process it is."""
    return settings.record_sinks is None or (document or 0) < settings.record_sinks


def batches(jobs: Iterable[Job], size: Callable[[Job], int]) -> list[list[Job]]:
    """Jobs that can be written together, of like lengths, longest first; every name once."""
    groups: dict[Any, list[Job]] = {}
    for job in {job.key: job for job in jobs}.values():
        groups.setdefault((job.watched, job.new_tokens, job.settings), []).append(job)
    found = []
    for group in groups.values():
        group.sort(key=lambda job: (-len(job.ids), job.key))
        rows = size(group[0])
        found += [group[start : start + rows] for start in range(0, len(group), rows)]
    return found
