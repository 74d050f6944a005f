"""GSM8K as in the sink-token paper: first the steps, then the answer to question and steps, 256 tokens in all."""

# B batch rows, S canvas positions
from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from sinklab.checkpoints.loading import Loaded
from sinklab.data.pairs import Pair
from sinklab.sampling.canvas import Canvas
from sinklab.sampling.settings import DecodingSettings
from sinklab.scoring.answers import needs_own_batch, write_batch
from sinklab.scoring.text_ends import ended
from sinklab.scoring.writing import Writing, WritingRequest, sample_seed, seeded
from sinklab.studies.benchmarks.code import marked_answer
from sinklab.studies.benchmarks.settings import BATCH, LENGTH, two_stage_settings


@dataclass(frozen=True)
class TwoStageAnswer:
    """What was written for one question."""

    number: int
    text: str
    """All that was written, without special tokens; with the question where it is as published."""
    answer: str | None
    """What stands behind the last ####; None where nothing does."""
    fits: bool = True
    """False for a question that leaves no room for an answer."""
    steps: int = 0
    """Model evaluations of both stages."""
    sinks: tuple[dict[str, Any], ...] = ()
    """Facts of the first stage, a row for each layer, where it was watched."""


@dataclass(frozen=True)
class _Protocol:
    loaded: Loaded
    settings: DecodingSettings
    length: int
    batch: int
    edits: tuple[Any, ...]
    watch: Callable[[int], bool]


def two_stage(
    loaded: Loaded,
    questions: Sequence[str],
    *,
    settings: DecodingSettings | None = None,
    length: int = LENGTH,
    published: bool = False,
    edits: Sequence[Any] = (),
    numbers: Sequence[int] | None = None,
    batch: int = BATCH,
    watch: Callable[[int], bool] = lambda number: False,
) -> Iterator[TwoStageAnswer]:
    """Answer worked problems in two stages, in no particular order.

    The first stage denoises what follows ``Question: …`` up to `length` tokens: the steps. The second denoises what
    follows question and steps, again up to `length`: the answer, ``#### …``. As published, rows of a batch are filled
    with masks on the right, ranked together, decoded, stripped of special tokens and read again as text (the start
    token between the pieces, on which the model was trained, gets lost); all of the row counts as its text. Else each
    row is decoded by itself, its steps end at the end of text, and the second stage reads the very tokens written.

    Args:
        loaded: a diffusion model with a tokenizer.
        questions: without ``Question:``.
        settings: of each stage, all of them; those of
            :func:`~sinklab.studies.benchmarks.settings.two_stage_settings` when left out.
        length: of question, steps and answer together; no more than the model's context.
        published: as the released code does it.
        edits: interventions, chosen anew in each stage.
        numbers: of the questions, for seeds and, as published, batches of 64 by number; 0, 1, … when left out.
        batch: questions that are answered together where their answers do not depend on it; as published always 64.
        watch: whether the sinks of a question are traced, by its number; never as published.

    Raises:
        ValueError: for an autoregressive model, one without tokenizer, a length beyond the context, numbers that are
            not one for each question, no question that leaves room (without `numbers`), and what the decoder refuses.
    """
    if loaded.family != "diffusion" or loaded.model.config.mask_token_id is None:
        raise ValueError(
            f"the two stages denoise, but {loaded.name} has no mask token; score it on the task gsm8k instead"
        )
    config: Any = loaded.model.config
    context = config.text_positions or length
    if not 2 <= length <= context:
        raise ValueError(
            f"two stages take 2 to {context} tokens, the context of {loaded.name}, but length is {length}; give another"
        )
    if batch < 1:
        raise ValueError(f"batch must be at least 1, got {batch}; leave it out for {BATCH}")
    given = range(len(questions)) if numbers is None else numbers
    if len(given) != len(questions):
        raise ValueError(f"{len(questions)} questions need a number each, but there are {len(given)} numbers")
    chosen = two_stage_settings(published=published) if settings is None else settings
    if chosen.stop_at_eos and not (config.eos_ids or config.eot_token_id is not None or chosen.stop_ids):
        # part of the protocol, and this model names no end of text
        chosen = replace(chosen, stop_at_eos=False)
    protocol = _Protocol(loaded, chosen, length, batch, tuple(edits), watch)
    prompts = {number: _prompt(loaded, question) for number, question in zip(given, questions, strict=True)}
    room = {number: ids for number, ids in prompts.items() if len(ids) < length}
    # a share of the questions may be all too long: that is counted, not refused
    if questions and not room and numbers is None:
        raise ValueError(
            f"no question leaves room for an answer in {length} tokens: the shortest of {len(prompts)} takes "
            f"{min(map(len, prompts.values()))}; give a longer length, or a model with a larger vocabulary"
        )
    return _answers(protocol, prompts, room, published)


def _answers(
    protocol: _Protocol, prompts: dict[int, list[int]], room: dict[int, list[int]], published: bool
) -> Iterator[TwoStageAnswer]:
    for number in prompts.keys() - room.keys():
        yield TwoStageAnswer(number, "", None, fits=False)
    if not published:
        yield from _by_row(protocol, room)
        return
    batches: dict[int, dict[int, list[int]]] = defaultdict(dict)
    for number, ids in sorted(room.items()):
        batches[number // BATCH][number] = ids
    for batch, rows in batches.items():
        yield from _pooled(protocol, batch, rows)


def _prompt(loaded: Loaded, question: str) -> list[int]:
    """As in training: a start token where the tokenizer puts one, then the question."""
    tokenizer = loaded.needed_tokenizer()
    first: Any = tokenizer("a")["input_ids"]
    begins = tokenizer.bos_token_id is not None and first[0] == tokenizer.bos_token_id
    # split: where a question spells out a special token, it is text
    text = Pair(question.strip(), "", "").texts()[0]
    ids: Any = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    return [*first[:1], *ids] if begins else list(ids)


def _by_row(protocol: _Protocol, prompts: dict[int, list[int]]) -> Iterator[TwoStageAnswer]:
    """Every row is what it is alone; where noise or other rows would decide, it is alone."""
    settings = protocol.settings
    alone = needs_own_batch(settings, protocol.edits) or settings.block_length is not None
    numbers = sorted(prompts)
    for number in filter(protocol.watch, numbers):
        yield _watched(protocol, number, prompts[number])
    rest = [number for number in numbers if not protocol.watch(number)]
    size = 1 if alone else protocol.batch
    for at in range(0, len(rest), size):
        yield from _together(protocol, {number: prompts[number] for number in rest[at : at + size]})


def _together(protocol: _Protocol, prompts: dict[int, list[int]]) -> Iterator[TwoStageAnswer]:
    first, evaluations = _filled(protocol, list(prompts.values()), 2 * min(prompts))
    written = {
        number: ended(protocol.loaded, row[len(ids) :], ())[0]
        for (number, ids), row in zip(prompts.items(), first, strict=True)
    }
    again = {number: [*ids, *written[number]] for number, ids in prompts.items()}
    again = {number: ids for number, ids in again.items() if len(ids) < protocol.length}
    second, more = _filled(protocol, list(again.values()), 2 * min(prompts) + 1)
    for (number, ids), row in zip(again.items(), second, strict=True):
        written[number] += ended(protocol.loaded, row[len(ids) :], ())[0]
    for number, ids in written.items():
        yield _answer(protocol, number, ids, evaluations + more * (number in again))


def _watched(protocol: _Protocol, number: int, prompt: list[int]) -> TwoStageAnswer:
    """One row, its first stage under a trace."""
    loaded, settings, edits = protocol.loaded, protocol.settings, protocol.edits
    asked = WritingRequest(tuple(prompt), (), _seed(protocol, 2 * number))
    (first,) = write_batch(loaded, [asked], settings, protocol.length - len(prompt), edits, watch=True)
    written, evaluations = list(first.ids), first.steps
    if (left := protocol.length - len(prompt) - len(written)) > 0:
        again = WritingRequest((*prompt, *written), (), _seed(protocol, 2 * number + 1))
        (second,) = write_batch(loaded, [again], settings, left, edits)
        written, evaluations = [*written, *second.ids], evaluations + second.steps
    return replace(_answer(protocol, number, written, evaluations), sinks=first.sinks)


def _answer(protocol: _Protocol, number: int, written: list[int], evaluations: int) -> TwoStageAnswer:
    text = str(protocol.loaded.needed_tokenizer().decode(written, skip_special_tokens=True))
    return TwoStageAnswer(number, text, marked_answer(text), True, evaluations)


def _seed(protocol: _Protocol, stage: int) -> int:
    return sample_seed(protocol.settings.seed or 0, stage)


def _pooled(protocol: _Protocol, batch: int, prompts: dict[int, list[int]]) -> Iterator[TwoStageAnswer]:
    """A batch as published."""
    tokenizer: Any = protocol.loaded.needed_tokenizer()
    first, evaluations = _filled(protocol, list(prompts.values()), 2 * batch)
    texts = tokenizer.batch_decode(first, skip_special_tokens=True)
    again = [tokenizer(text)["input_ids"][: protocol.length] for text in texts]
    second, more = _filled(protocol, again, 2 * batch + 1)
    for number, ids in zip(prompts, second, strict=True):
        text = tokenizer.decode(ids, skip_special_tokens=True)
        yield TwoStageAnswer(number, text, marked_answer(text, published=True), True, evaluations + more)


def _filled(protocol: _Protocol, prompts: list[list[int]], stage: int) -> tuple[list[list[int]], int]:
    """All rows up to the full length, masks on the right of each, and the evaluations that took."""
    model: Any = protocol.loaded.model
    config, seed = model.config, _seed(protocol, stage)
    ids_BS = torch.full((len(prompts), protocol.length), config.mask_token_id)
    open_BS = torch.ones_like(ids_BS, dtype=torch.bool)
    for row, ids in enumerate(prompts):
        ids_BS[row, : len(ids)], open_BS[row, : len(ids)] = torch.tensor(ids), False
    if not bool(open_BS.any()):
        return ids_BS.tolist(), 0
    canvas = Canvas(ids_BS, torch.ones_like(open_BS), open_BS, config.mask_token_id).to(model.device)
    settings, edits = replace(protocol.settings, seed=seed), seeded(protocol.edits, seed)
    texts = Writing(protocol.loaded, (), settings, 0, edits, ends=False, canvas=canvas)
    done_BS, count = canvas.ids_BS, 0
    with torch.inference_mode(), texts.begin() as writer:
        for step in writer.steps():
            done_BS, count = step.after_BS, count + 1
            # what is not read would fill the memory of a long run
            writer.log.removals.clear()
    return done_BS.tolist(), count
