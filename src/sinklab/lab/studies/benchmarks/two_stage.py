"""GSM8K as in the sink-token paper: first the steps, then the answer to question and steps, 256
tokens in all.

No task of lm-eval; inside a benchmark run it has the same cache and the same tables.
"""

# B batch rows, S canvas positions
from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from decimal import Decimal, InvalidOperation
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, cast

import torch

from sinklab.core.errors import Checked, limited
from sinklab.core.probing.dose import Dose
from sinklab.core.sampling import Canvas, DecodingSettings
from sinklab.lab.checkpoints.loading import Loaded
from sinklab.lab.data.pairs import Pair
from sinklab.lab.scoring.answers import SinkFacts, Totals, followed, needs_own_batch
from sinklab.lab.scoring.writing import Writing, ended, ending, sample_seed, seeded
from sinklab.lab.studies.benchmarks.offline import tasks
from sinklab.lab.studies.benchmarks.requests import Asked, Part, Unit, parts_of, stepper
from sinklab.lab.studies.benchmarks.study import TWO_STAGE
from sinklab.lab.studies.processes import nothing
from sinklab.lab.studies.request_cache import request_key

if TYPE_CHECKING:
    from sinklab.lab.studies.benchmarks.harness_model import SinklabLM


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
    own = DecodingSettings(
        rule="low_confidence",
        temperature=0.1 * published,
        stop_at_eos=not published,
        seed=SEED,
        schedule="timed",
        eps=1e-5,
        steps=LENGTH,
        pooled=published,
    )
    if given is None:
        return own
    asked = {}
    for name in (one.name for one in fields(DecodingSettings)):
        value = getattr(given, name)
        if value != getattr(type(given), name):
            asked[name] = value
    if asked.get("schedule", "timed") != "timed" or "rule" in asked:
        # numbers of the clock belong to nothing else; other schedules find their own steps
        own = replace(own, schedule=None, eps=None, pooled=False, steps=None)
    return replace(own, **asked)


@dataclass(frozen=True)
class TwoStageAnswer:
    """The text written for one question."""

    number: int
    text: str
    """Text written, without special tokens; with the question if as published."""
    answer: str | None
    """Text behind the last ####; None if there is none."""
    fits: bool = True
    """False for a question that leaves no room for an answer."""
    steps: int = 0
    """Model evaluations of both stages."""
    sinks: tuple[dict[str, Any], ...] = ()
    """Facts of the first stage, a row for each layer, if it was watched."""
    dose: Totals = field(default_factory=dict)
    """Dose of both stages, as `Answer.dose`."""


@dataclass(frozen=True)
class TwoStage(Checked):
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
    settings: DecodingSettings | None = None
    """Decoding of each stage, with every field given; those of `two_stage_settings` when left out.
    """
    length: int = LENGTH
    """Tokens of question, steps and answer together; no more than the model's context."""
    published: bool = False
    """Whether to answer as the released code does."""
    edits: Sequence[Any] = ()
    """Interventions, chosen anew in each stage."""
    batch: int = limited(BATCH, at_least=1)
    """Questions that are answered together, if their answers do not depend on it; as published
    always 64.
    """
    watch: Callable[[int], bool] = lambda number: False
    """Whether the sinks of a question are traced, by its number; never as published."""
    progress: Callable[[], object] = nothing
    """Called after every step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        loaded = self.loaded
        config = self.loaded.model.config
        if loaded.family != "diffusion" or config.mask_token_id is None:
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
        chosen = self.settings or two_stage_settings(published=self.published)
        # to end is part of the protocol, but some models name no end of text
        return ending(chosen, self.loaded.model.config)

    def answers(
        self, questions: Sequence[str], numbers: Sequence[int] | None = None
    ) -> Iterator[TwoStageAnswer]:
        """The answers, in no particular order.

        Args:
            questions: without ``Question:``.
            numbers: of the questions, for seeds and, as published, batches of 64 by number; 0, 1, …
                when left out.

        Raises:
            ValueError: for numbers that are not one for each question, no question that leaves room
                (without `numbers`), and anything that the decoder refuses.
        """
        given: Sequence[int] = range(len(questions))
        if numbers is not None:
            given = numbers
        if len(given) != len(questions):
            raise ValueError(
                f"{len(questions)} questions need a number each, but there are {len(given)} numbers"
            )
        prompts = {
            number: self._prompt(question)
            for number, question in zip(given, questions, strict=True)
        }
        room = {number: ids for number, ids in sorted(prompts.items()) if len(ids) < self.length}
        # a share of the questions may be all too long: that is counted, not refused
        if questions and not room and numbers is None:
            raise ValueError(
                f"no question leaves room for an answer in {self.length} tokens: the shortest of "
                f"{len(prompts)} takes {min(map(len, prompts.values()))}; give a longer length, or "
                "a model with a larger vocabulary"
            )
        return self._answers(prompts, room)

    def _answers(
        self, prompts: dict[int, list[int]], room: dict[int, list[int]]
    ) -> Iterator[TwoStageAnswer]:
        for number in prompts.keys() - room.keys():
            yield TwoStageAnswer(number, "", None, fits=False)
        watched: list[int] = []
        if not self.published:
            watched = [number for number in room if self.watch(number)]
        for number in watched:
            yield from self._together({number: room[number]}, watch=True)
        # where noise or other rows would decide, a row is decoded alone; as published, they do
        # decide
        alone = needs_own_batch(self.decoding, self.edits) or self.decoding.block_length is not None
        rest = [number for number in room if number not in watched]
        if self.published:
            batches = {number // BATCH for number in rest}
            parts = [[one for one in rest if one // BATCH == batch] for batch in sorted(batches)]
        elif alone:
            parts = [[number] for number in rest]
        else:
            parts = parts_of(rest, self.batch)
        for part in parts:
            yield from self._together({number: room[number] for number in part})

    def _prompt(self, question: str) -> list[int]:
        """Ids of a question, as in training: a start token if the tokenizer puts one, then the
        question.
        """
        tokenizer = self.loaded.needed_tokenizer()
        first: Any = tokenizer("a")["input_ids"]
        begins = tokenizer.bos_token_id is not None and first[0] == tokenizer.bos_token_id
        # split: if a question spells out a special token, it is text
        text = Pair(question.strip(), "", "").texts()[0]
        ids: Any = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        if begins:
            return [first[0], *ids]
        return list(ids)

    def _together(
        self, prompts: dict[int, list[int]], *, watch: bool = False
    ) -> Iterator[TwoStageAnswer]:
        """Both stages of some questions: every row is the same as alone, but as published a batch
        is one.
        """
        tokenizer: Any = self.loaded.needed_tokenizer()
        number_of_batch = min(prompts)
        if self.published:
            number_of_batch //= BATCH
        first, evaluations, facts, doses = self._filled(prompts, 2 * number_of_batch, watch=watch)
        if self.published:
            texts = {
                number: tokenizer.decode(row, skip_special_tokens=True)
                for number, row in first.items()
            }
            again = room = {
                number: tokenizer(text)["input_ids"][: self.length]
                for number, text in texts.items()
            }
        else:
            again = {
                number: [*ids, *self._up_to_end(first[number], ids)]
                for number, ids in prompts.items()
            }
            room = {number: ids for number, ids in again.items() if len(ids) < self.length}
        second, more, _, later = self._filled(room, 2 * number_of_batch + 1)
        sinks: tuple[dict[str, Any], ...] = ()
        if facts is not None:
            sinks = tuple(facts.row(0))
        for number, ids in again.items():
            row = second.get(number, ids)
            if not self.published:
                row = [*ids, *self._up_to_end(row, ids)][len(prompts[number]) :]
            text = str(tokenizer.decode(row, skip_special_tokens=True))
            answer = marked_answer(text, published=self.published)
            steps = evaluations + more * (number in second)
            dose = Dose.pooled(Dose(part[number]) for part in (doses, later) if number in part)
            yield TwoStageAnswer(number, text, answer, True, steps, sinks, dose.totals)

    def _up_to_end(self, row: list[int], before: list[int]) -> list[int]:
        """Ids written behind these ids."""
        return ended(self.loaded, row[len(before) :], ())[0]

    def _filled(
        self, prompts: dict[int, list[int]], stage: int, *, watch: bool = False
    ) -> tuple[dict[int, list[int]], int, SinkFacts | None, dict[int, Totals]]:
        """All rows up to the full length, masks on the right of each; the evaluations that took;
        facts; doses.
        """
        mask_id = cast(Any, self.loaded.model.config).mask_token_id
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
            _, facts, doses = followed(writer, watch=watch, progress=self.progress)
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


def two_stage_documents(data: str | None, limit: int | None = None) -> list[dict[str, Any]]:
    """GSM8K's test questions and answers, the first `limit` of them.

    Args:
        data: folder of benchmark files; None for the Hub.
        limit: how many; all when left out.

    Raises:
        ValueError: for files that are not there or cannot be read, and a data set that cannot be
            had from the Hub.
    """
    (task,) = tasks(["gsm8k"], data, num_fewshot=0)
    return [dict(row) for row in task.eval_docs][:limit]


def rights(
    answers: Sequence[TwoStageAnswer], targets: Sequence[str], *, published: bool = False
) -> list[bool]:
    """Whether each answer is right; one without ``####`` is wrong.

    Args:
        answers: in the order of their targets.
        targets: GSM8K's answers, with their steps, or the numbers alone.
        published: compare as text, as the released code does without antlr4.
    """
    wanted = [marked_answer(target) or target for target in targets]
    return [
        one.answer is not None and same_answer(one.answer, other, published=published)
        for one, other in zip(answers, wanted, strict=True)
    ]


def answer_all(model: SinklabLM, documents: list[dict[str, Any]]) -> None:
    """Answer the questions; answers are kept by the model, as those of lm-eval are.

    As published, answers depend on their batch of 64: such a batch is done as a whole.

    Raises:
        ValueError: as `TwoStage` does.
    """
    settings = model.settings
    asked = []
    for number, document in enumerate(documents):
        key = request_key(TWO_STAGE, number, document["question"])
        asked.append(Asked(key=key, document=(TWO_STAGE, number)))
    protocol = TwoStage(
        model.loaded,
        two_stage_settings(settings, published=settings.published),
        published=settings.published,
        edits=model.edits,
        batch=settings.batch,
        watch=settings.watches,
    )
    most = 2 * (protocol.decoding.steps or LENGTH)

    def answered(some: list[Asked]) -> Part:
        told = replace(protocol, progress=stepper(model, len(some), most))
        keys = {each.document[1]: each.key for each in some}
        questions = [documents[number]["question"] for number in keys]
        found = {answer.number: asdict(answer) for answer in told.answers(questions, [*keys])}
        return {keys[number]: answer for number, answer in found.items()}

    def units(model: SinklabLM, asked: list[Asked]) -> Iterator[Unit]:
        for some in parts_of(asked, BATCH if settings.published else settings.batch):
            yield [each.key for each in some], partial(answered, some)

    model.answers(asked, f"{TWO_STAGE}: answering {{}} questions", units)


def rows(
    documents: list[dict[str, Any]],
    told: Mapping[tuple[str, int, int], Mapping[str, Any]],
    *,
    published: bool,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of the tables ``scores`` and ``samples``."""
    # answers of an older run have no number of their own
    answers = [
        TwoStageAnswer(**{**told[TWO_STAGE, number, 0], "number": number})
        for number in range(len(documents))
    ]
    right = rights(answers, [row["answer"] for row in documents], published=published)
    count = len(documents)
    share = sum(right) / count
    about = {"task": TWO_STAGE, "filter": "none"}
    scores = {
        **about,
        "metric": "exact_match",
        "value": share,
        "samples": count,
        "stderr": math.sqrt(share * (1 - share) / count),
        "higher_is_better": True,
        "no_answer": sum(one.answer is None for one in answers) / count,
    }
    samples = []
    for answer, document, is_right in zip(answers, documents, right, strict=True):
        sample = {
            **about,
            "doc_id": answer.number,
            "prompt": document["question"],
            "response": answer.text,
            "answer": answer.answer or "",
            "target": document["answer"],
            "right": float(is_right),
            "metrics": json.dumps({"exact_match": float(is_right)}),
            "no_answer": answer.answer is None,
            "logprobs": [],
            "stderrs": [],
            "tokens": 0,
            "steps": answer.steps,
            "cut": 0,
        }
        samples.append(sample)
    return [scores], samples
