"""GSM8K as in the sink-token paper: first the steps, then the answer to question and steps, 256
tokens in all.

A task of lm-eval on GSM8K's questions, which the model answers by a way of its own.
"""

# B batch rows, S canvas positions
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from decimal import Decimal, InvalidOperation
from functools import cached_property, partial
from typing import Any

import torch

from sinklab.core.instrument import Dose
from sinklab.core.subject import Canvas, DecodingSettings
from sinklab.lab.checkpoints import Loaded
from sinklab.lab.data import Pair
from sinklab.lab.scoring.answers import SinkFacts, Totals, followed, needs_own_batch
from sinklab.lab.scoring.writing import Writing, ended, ending, sample_seed, seeded
from sinklab.lab.studies import Row, Tick, nothing
from sinklab.lab.studies.benchmarks.offline import SOURCES, packaged
from sinklab.lab.studies.benchmarks.requests import (
    Asked,
    Part,
    Unit,
    about,
    parts_of,
    request_key,
    stepper,
)
from sinklab.lab.studies.benchmarks.study import NO_ANSWER, TWO_STAGE

LENGTH = 256
"""Tokens of question, steps and answer together."""
BATCH = 64
SEED = 1234


def two_stage_settings(
    given: DecodingSettings | None = None, *, published: bool = False
) -> DecodingSettings:
    """Decoding of each stage: the settings of the released code, but for those that were given.

    256 evaluations on SMDM's clock (eps 1e-5), the most confident tokens first. ``published`` draws
    at temperature 0.1 and ranks the candidates of 64 rows together, so that answers depend on their
    batch; else nothing is drawn, each row is decoded by itself and ends at its end of text.

    Args:
        given: settings; fields that differ from the defaults of their class replace the protocol's.
        published: as released.

    Source: One Token Is Enough (2601.19657), ``evaluate_gsm8k`` and SMDM's ``diff_sample``.
    """
    clock = "timed:eps=1e-5"
    if published:
        clock += ",pooled=true"
    own = DecodingSettings(
        rule="low_confidence",
        temperature=0.1 * published,
        stop_at_eos=not published,
        seed=SEED,
        schedule=clock,
        steps=LENGTH,
    )
    if given is None:
        return own
    asked = {}
    for name in (one.name for one in fields(DecodingSettings)):
        value = getattr(given, name)
        if value != getattr(type(given), name):
            asked[name] = value
    if "rule" in asked or not asked.get("schedule", "timed").startswith("timed"):
        # the clock belongs to nothing else; other schedules find their own steps
        own = replace(own, schedule=None, steps=None)
    return replace(own, **asked)


@dataclass(frozen=True, kw_only=True)
class Question(Asked):
    """A question of the protocol."""

    question: str
    """Its text, without ``Question:``."""

    @property
    def place(self) -> int:
        """Number of its document: seeds follow from it."""
        return self.document[1]


@dataclass(frozen=True)
class TwoStage:
    """Answers to worked problems in two stages.

    The first stage denoises the tokens after ``Question: …`` up to `length`: the steps. The second
    denoises the tokens after question and steps, again up to `length`: the answer, ``#### …``. As
    published, rows of a batch are filled with masks on the right, ranked together, decoded,
    stripped of special tokens and read again as text (the start token between the pieces, on which
    the model was trained, gets lost); all of the row counts as its text. Else each row is decoded
    by itself, its steps end at the end of text, and the second stage reads the very tokens written.

    Raises ValueError for an autoregressive model, one without tokenizer, a length beyond the
    context.
    """

    loaded: Loaded
    """A diffusion model with a tokenizer."""
    settings: DecodingSettings
    """Decoding of each stage, as of `two_stage_settings`."""
    length: int = LENGTH
    """Tokens of question, steps and answer together; no more than the model's context."""
    published: bool = False
    """Whether to answer as the released code does."""
    edits: Sequence[Any] = ()
    """Interventions, chosen anew in each stage."""

    def __post_init__(self) -> None:
        loaded = self.loaded
        config = self.loaded.config
        if not loaded.is_diffusion or config.mask_token_id is None:
            raise ValueError(
                f"the two stages denoise, but {loaded.name} has no mask token; score it on the "
                "task gsm8k instead"
            )
        context = config.text_positions or self.length
        if not 2 <= self.length <= context:
            raise ValueError(
                f"two stages take 2 to {context} tokens, the context of {loaded.name}, but length "
                f"is {self.length}; give another"
            )

    @cached_property
    def decoding(self) -> DecodingSettings:
        """The settings of each stage for this model."""
        # to end is part of the protocol, but some models name no end of text
        return ending(self.settings, self.loaded.config)

    def parts(self, asked: Iterable[Question], batch: int) -> list[list[Question]]:
        """Questions that are answered together: as published those of a batch of 64; else so many
        at most, and alone those that are watched, and all if noise or other rows would decide.
        """
        questions = sorted(asked, key=lambda each: each.place)
        if self.published:
            batches = itertools.groupby(questions, lambda each: each.place // BATCH)
            return [[*some] for _, some in batches]
        if needs_own_batch(self.decoding, self.edits) or self.decoding.block_length is not None:
            batch = 1
        watched = [each for each in questions if each.watched]
        others = [each for each in questions if not each.watched]
        return parts_of(watched, 1) + parts_of(others, batch)

    def answers(self, some: Sequence[Question], progress: Tick = nothing) -> Part:
        """The answers to a part of the questions. That to a question which leaves no room for one
        is empty.

        text: all that was written, without special tokens; with the question if as published;
        steps: model evaluations of both stages; sinks: facts of the first stage, a row for each
        layer, if the question was watched; dose: of both stages, as `Answer.dose`.

        Args:
            some: one of the `parts`.
            progress: called after every step.

        Raises:
            ValueError: for anything that the decoder refuses.
        """
        tokenizer = self.loaded.needed_tokenizer()
        whole = {each.key: self._prompt(each.question) for each in some}
        found: Part = {key: {"text": "", "steps": 0, "sinks": [], "dose": {}} for key in whole}
        prompts = {key: ids for key, ids in whole.items() if len(ids) < self.length}
        if not prompts:
            return found
        number = min(each.place for each in some if each.key in prompts)
        if self.published:
            number //= BATCH
        stage = 2 * number
        watch = some[0].watched and not self.published
        first, evaluations, facts, doses = self._filled(prompts, stage, progress, watch=watch)
        if self.published:
            texts = {
                key: tokenizer.decode(row, skip_special_tokens=True) for key, row in first.items()
            }
            again = room = {
                key: tokenizer(text)["input_ids"][: self.length] for key, text in texts.items()
            }
        else:
            again = {key: [*ids, *self._up_to_end(first[key], ids)] for key, ids in prompts.items()}
            room = {key: ids for key, ids in again.items() if len(ids) < self.length}
        second, more, _, later = self._filled(room, stage + 1, progress)
        sinks: list[Row] = []
        if facts is not None:
            sinks = facts.row(0)
        for key, ids in again.items():
            row = second.get(key, ids)
            if not self.published:
                row = [*ids, *self._up_to_end(row, ids)][len(prompts[key]) :]
            dose = Dose.pooled(Dose(part[key]) for part in (doses, later) if key in part)
            found[key] = {
                "text": str(tokenizer.decode(row, skip_special_tokens=True)),
                "steps": evaluations + more * (key in second),
                "sinks": sinks,
                "dose": dose.totals,
            }
        return found

    def _prompt(self, question: str) -> list[int]:
        """Ids of a question, as in training: a start token if the tokenizer puts one, then the
        question.
        """
        tokenizer = self.loaded.needed_tokenizer()
        first = tokenizer("a")["input_ids"]
        begins = tokenizer.bos_token_id is not None and first[0] == tokenizer.bos_token_id
        # split: if a question spells out a special token, it is text
        text = Pair(question.strip(), "", "").texts()[0]
        ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        if begins:
            return [first[0], *ids]
        return list(ids)

    def _up_to_end(self, row: list[int], before: list[int]) -> list[int]:
        """Ids written behind these ids."""
        return ended(self.loaded, row[len(before) :], ())[0]

    def _filled(
        self, prompts: dict[str, list[int]], stage: int, progress: Tick, *, watch: bool = False
    ) -> tuple[dict[str, list[int]], int, SinkFacts | None, dict[str, Totals]]:
        """All rows up to the full length, masks on the right of each; the evaluations that took;
        facts; doses.
        """
        mask_id = self.loaded.config.mask_token_id
        if all(len(ids) == self.length for ids in prompts.values()):
            return prompts, 0, None, {}
        ids_BS = torch.tensor(
            [ids + [mask_id] * (self.length - len(ids)) for ids in prompts.values()]
        )
        open_BS = torch.arange(self.length) >= torch.tensor(
            [[len(ids)] for ids in prompts.values()]
        )
        canvas = Canvas(ids_BS, torch.ones_like(open_BS), open_BS, mask_id)
        seed = sample_seed(self.decoding.seed or 0, stage)
        settings = replace(self.decoding, seed=seed)
        edits = seeded(self.edits, seed)
        texts = Writing(self.loaded, (), settings, 0, edits, ends=False, canvas=canvas)
        with torch.inference_mode(), texts.begin(measure=watch) as writer:
            _, facts, doses = followed(writer, watch=watch, progress=progress)
        rows = dict(zip(prompts, writer.ids_BS.tolist(), strict=True))
        return rows, writer.evaluations, facts, dict(zip(prompts, doses, strict=True))


def marked_answer(text: str, *, published: bool = False) -> str | None:
    """Text behind the last ``####`` of a worked problem, to the end of its line; None if there is
    none.

    Args:
        text: all that was written.
        published: the released code's expression, ``#### (.*)$``, which knows the text's last line
            alone and takes all behind the first mark in it. Source: One Token Is Enough
            (2601.19657), ``evaluate_gsm8k``.
    """
    if published:
        found = re.findall("#### (.*)$", text)
        return found[-1] if found else None
    _, mark, rest = text.rpartition("####")
    if not mark:
        return None
    return rest.strip(" \t").split("\n")[0].strip() or None


def same_answer(one: str, other: str, *, published: bool = False) -> bool:
    """Whether two answers to a worked problem are the same number; the same text, if one is no
    number.

    Args:
        one: an answer, as written: "$1,080.00", "18 eggs." is read as 18.
        other: another.
        published: as the released code compares without antlr4: as text, without dollars and
            thousands' commas, so that "18.0" is not "18".
    """
    if published:
        return _plain(one) == _plain(other)
    first = number_of(one)
    second = number_of(other)
    if first is None or second is None:
        return one.strip() == other.strip()
    return first == second


def number_of(answer: str) -> Decimal | None:
    """The number that an answer begins with, after a currency sign; None if it begins with none."""
    found = re.match(r"\s*[$€£]?\s*([-+]?)\s*[$€£]?((?:\d[\d,]*)?\.?\d+|\d[\d,]*\.?)", answer)
    if found is None:
        return None
    try:
        return Decimal(found[1] + found[2].replace(",", "").rstrip("."))
    except InvalidOperation:
        return None


def _plain(answer: str) -> str:
    text = answer.strip().replace("$", "")
    without_commas = text.replace(",", "")
    if without_commas.isdigit():
        return without_commas
    return text


def task(data: str | None, *, published: bool = False) -> Any:
    """The protocol as a task of lm-eval, on GSM8K's test questions.

    Args:
        data: folder of benchmark files; None for the Hub.
        published: find and compare answers as the released code does without antlr4.

    Raises:
        ValueError: for files that are not there or cannot be read, and a data set that cannot be
            had from the Hub.
    """

    def marked(texts: Sequence[Sequence[str]], documents: Any) -> list[list[str]]:
        found = [[marked_answer(text, published=published) for text in some] for some in texts]
        return [[NO_ANSWER if one is None else one for one in some] for some in found]

    def compared(document: dict[str, Any], answers: Sequence[str]) -> dict[str, float]:
        target = marked_answer(document["answer"]) or document["answer"]
        return {"exact_match": float(same_answer(answers[0], target, published=published))}

    steps = [{"function": "custom", "filter_fn": marked}, {"function": "take_first"}]
    metric = {"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}
    return packaged(
        SOURCES["gsm8k"],
        data,
        task=TWO_STAGE,
        num_fewshot=0,
        doc_to_text="{{question}}",
        generation_kwargs={"until": []},
        filter_list=[{"name": "none", "filter": steps}],
        process_results=compared,
        metric_list=[metric],
    )


def questions(model: Any, requests: Sequence[Any]) -> list[Question]:
    """Every request of lm-eval for this task; a chat format is left out."""
    found = []
    for request in requests:
        text = request.doc["question"]
        key = request_key(TWO_STAGE, request.doc_id, text)
        found.append(Question(key=key, question=text, **about(model, request)))
    return found


def answered(model: Any, asked: Sequence[Question]) -> Iterator[Unit]:
    """Units that answer questions. Raises ValueError as `TwoStage` does."""
    settings = model.settings
    decoding = two_stage_settings(settings, published=settings.published)
    protocol = TwoStage(model.loaded, decoding, published=settings.published, edits=model.edits)
    most = 2 * (protocol.decoding.steps or LENGTH)
    for some in protocol.parts(asked, settings.batch):
        tick = stepper(model, len(some), most)
        yield [each.key for each in some], partial(protocol.answers, some, tick)
