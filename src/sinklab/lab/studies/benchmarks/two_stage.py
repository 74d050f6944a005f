"""GSM8K as in the sink-token paper: first the steps, then the answer to question and steps, 256
tokens in all.

A task of lm-eval on GSM8K's questions, which the model answers by a way of its own: that of the
released code, in which 64 rows are ranked together and answers are compared as text.
"""

# B batch rows, S canvas positions
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import groupby
from typing import Any

import torch

from sinklab.core.instrument import Dose
from sinklab.core.subject import Canvas, DecodingSettings
from sinklab.lab.checkpoints import Loaded
from sinklab.lab.data import Pair
from sinklab.lab.scoring import Writing, sample_seed, seeded
from sinklab.lab.studies import Row, Tick, nothing
from sinklab.lab.studies.benchmarks.offline import SOURCES, packaged
from sinklab.lab.studies.benchmarks.requests import followed
from sinklab.lab.studies.benchmarks.study import NO_ANSWER, TWO_STAGE

LENGTH = 256
"""Tokens of question, steps and answer together."""
BATCH = 64
PROTOCOL = DecodingSettings(
    rule="low_confidence",
    temperature=0.1,
    stop_at_eos=False,
    seed=1234,
    schedule="timed:eps=1e-5,pooled=true",
    steps=LENGTH,
)
"""Each stage as the released code decodes it: 256 evaluations on SMDM's clock, at temperature 0.1
the most confident tokens of 64 rows together, so that answers depend on their batch.

Source: One Token Is Enough (2601.19657), ``evaluate_gsm8k`` and SMDM's ``diff_sample``.
"""


def two_stage_settings(given: DecodingSettings) -> DecodingSettings:
    """`PROTOCOL` with the fields that were given: those that differ from the defaults of their
    class.
    """
    names = [one.name for one in fields(DecodingSettings)]
    asked = {name: getattr(given, name) for name in names}
    return replace(
        PROTOCOL, **{name: one for name, one in asked.items() if one != getattr(type(given), name)}
    )


def two_stages(
    loaded: Loaded,
    questions: Sequence[str],
    settings: DecodingSettings = PROTOCOL,
    *,
    batch: int = 0,
    length: int = LENGTH,
    edits: Sequence[Any] = (),
    tick: Tick = nothing,
) -> list[Row]:
    """Answers to questions in two stages, written together.

    The first denoises the tokens after ``Question: …`` up to the length: the steps. The row is
    stripped of special tokens and read again as text (the start token between the pieces, on which
    the model was trained, gets lost), and the second denoises what is left of the length: the
    answer, ``#### …``. All of the row counts as its text; that to a question which leaves no room
    is empty.

    Args:
        loaded: a diffusion model with a tokenizer.
        questions: those of one batch.
        settings: of each stage.
        batch: its number, from which seeds follow.
        length: tokens of question, steps and answer, no more than the model's context.
        edits: interventions, chosen anew in each stage.
        tick: called after every step.

    Returns:
        text; steps, evaluations of both stages; sinks, none; dose, of both.

    Raises:
        ValueError: for an autoregressive model, a length beyond the context, and anything that the
            decoder refuses.
    """
    if not loaded.is_diffusion or loaded.config.mask_token_id is None:
        raise ValueError(
            f"the two stages denoise, but {loaded.name} has no mask token; score it on the "
            "task gsm8k instead"
        )
    context = loaded.config.text_positions or length
    if not 2 <= length <= context:
        raise ValueError(
            f"two stages take 2 to {context} tokens, the context of {loaded.name}, but length "
            f"is {length}; give another"
        )
    tokenizer = loaded.needed_tokenizer()
    fill = partial(_filled, loaded, settings, length, edits, tick)
    first, told = fill([_prompt(tokenizer, question)[:length] for question in questions], 2 * batch)
    texts = [tokenizer.decode(row, skip_special_tokens=True) for row in first]
    second, more = fill([tokenizer(text)["input_ids"][:length] for text in texts], 2 * batch + 1)
    return [
        {
            "text": str(tokenizer.decode(row, skip_special_tokens=True)),
            "steps": one["steps"] + other["steps"],
            "sinks": [],
            "dose": Dose.pooled(Dose(some["dose"]) for some in (one, other)).totals,
        }
        for row, one, other in zip(second, told, more, strict=True)
    ]


def _prompt(tokenizer: Any, question: str) -> list[int]:
    """Ids of a question, as in training: a start token if the tokenizer puts one, then the
    question.
    """
    first = tokenizer("a")["input_ids"]
    begins = tokenizer.bos_token_id is not None and first[0] == tokenizer.bos_token_id
    # split: if a question spells out a special token, it is text
    text = Pair(question.strip(), "", "").texts()[0]
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    return [*first[: int(begins)], *ids]


def _filled(
    loaded: Loaded,
    settings: DecodingSettings,
    length: int,
    edits: Sequence[Any],
    tick: Tick,
    prompts: list[list[int]],
    stage: int,
) -> tuple[list[list[int]], list[Row]]:
    """Rows up to the full length, masks on the right of each, and what is known of each."""
    if all(len(ids) == length for ids in prompts):
        return prompts, [{"steps": 0, "dose": {}} for _ in prompts]
    mask_id = loaded.config.mask_token_id
    ids_BS = torch.tensor([ids + [mask_id] * (length - len(ids)) for ids in prompts])
    open_BS = torch.arange(length) >= torch.tensor([[len(ids)] for ids in prompts])
    canvas = Canvas(ids_BS, torch.ones_like(open_BS), open_BS, mask_id)
    seed = sample_seed(settings.seed or 0, stage)
    settings = replace(settings, seed=seed)
    texts = Writing(loaded, (), settings, 0, seeded(edits, seed), ends=False, canvas=canvas)
    with torch.inference_mode(), texts.begin(measure=False) as writer:
        rows = followed(writer, tick=tick)
    # a step is of all rows
    return writer.ids_BS.tolist(), [row | {"steps": writer.evaluations} for row in rows]


def marked_answer(text: str) -> str | None:
    """Text behind ``####`` in the last line of a worked problem; None if there is none.

    The released code's expression takes all behind the first mark in that line. Source: One Token
    Is Enough (2601.19657), ``evaluate_gsm8k``.
    """
    found = re.findall("#### (.*)$", text)
    return found[-1] if found else None


def plain_answer(answer: str) -> str:
    """An answer as the released code compares it without antlr4: as text, without dollars and
    thousands' commas, so that "18.0" is not "18".
    """
    text = answer.strip().replace("$", "")
    without_commas = text.replace(",", "")
    if without_commas.isdigit():
        return without_commas
    return text


def task(data: str | None) -> Any:
    """The protocol as a task of lm-eval, on GSM8K's test questions in a folder of benchmark files;
    None for the Hub. Raises ValueError for files or a data set that cannot be had.
    """

    def marked(texts: Sequence[Sequence[str]], documents: Any) -> list[list[str]]:
        return [[marked_answer(text) or NO_ANSWER for text in some] for some in texts]

    def compared(document: dict[str, Any], answers: Sequence[str]) -> dict[str, float]:
        target = document["answer"].rpartition("####")[2]
        return {"exact_match": float(plain_answer(answers[0]) == plain_answer(target))}

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


def answered(model: Any, asked: Mapping[Any, Any], tick: Any = nothing) -> dict[Any, Row]:
    """Answers to requests for this task, 64 documents together; a chat format is left out. Raises
    ValueError as `two_stages` does.
    """
    settings = two_stage_settings(model.settings)
    found: dict[Any, Row] = {}
    for batch, some in groupby(sorted(asked, key=lambda one: one[1]), lambda one: one[1] // BATCH):
        places = [*some]
        rows = two_stages(
            model.loaded,
            [asked[place].doc["question"] for place in places],
            settings,
            batch=batch,
            edits=model.edits,
            tick=partial(tick, len(places) / (2 * (settings.steps or LENGTH))),
        )
        found |= zip(places, rows, strict=True)
    return found
