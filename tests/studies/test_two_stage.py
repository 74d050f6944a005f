"""The sink-token paper's GSM8K protocol: steps first, then the answer, as published and row by
row.
"""

import json
from dataclasses import replace

import pytest
import torch

from refusals import refused
from sinklab.core.instrument import BlockKeys, TopKeys
from sinklab.core.subject import DecodingSettings
from sinklab.lab.measures import MaskSinks, Random
from sinklab.lab.samplers import Timed
from sinklab.lab.studies.benchmarks.study import NO_ANSWER, TWO_STAGE, EvalSettings
from sinklab.lab.studies.benchmarks.two_stage import (
    Question,
    TwoStage,
    marked_answer,
    same_answer,
    task,
    two_stage_settings,
)
from tiny_diffusion import tiny_loaded
from tiny_llama import tiny_llama
from tiny_tasks import write_gsm8k

# B batch rows, S positions, M wanted positions, V vocabulary

QUESTIONS = (
    "Ann has 3 pens and buys 2.",
    "Bo has 10 pens.",
    "Cy has 7 pens and sells 4 of them. How many?",
)
LENGTH = 96
QUICK = replace(two_stage_settings(), steps=6)


@pytest.fixture(scope="module")
def loaded():
    return tiny_loaded(context=128)


def two_stage(loaded, questions=QUESTIONS, *, first=0, batch=64, watched=(), **protocol):
    """The answers, in the order of the questions, and how many were answered together."""
    asked = [
        Question(key=text, question=text, document=("", number), watched=number in watched)
        for number, text in enumerate(questions, first)
    ]
    stages = TwoStage(loaded, **{"settings": QUICK, "length": LENGTH, **protocol})
    parts = stages.parts(asked, batch)
    answers = {key: answer for part in parts for key, answer in stages.answers(part).items()}
    return [answers[text] for text in questions], [len(part) for part in parts]


def texts(loaded, *given, **protocol):
    return [answer["text"] for answer in two_stage(loaded, *given, **protocol)[0]]


class Oracle:
    """Writes steps behind a question and the answer behind steps; what follows are ends of text."""

    def __init__(self, loaded, thought, answer):
        tokenizer = loaded.tokenizer
        self.canvases = []
        self._tokenizer, self._parts = tokenizer, (thought, answer)
        self._mask, self._end = tokenizer.mask_token_id, tokenizer.eos_token_id

    def __call__(self, ids_BS, wanted_BS):
        self.canvases.append(ids_BS.clone())
        logits_BSV = torch.zeros(*ids_BS.shape, len(self._tokenizer))
        for row, ids_S in enumerate(ids_BS):
            begun = int((ids_S != self._mask).sum())
            stage = "Answer:" in self._tokenizer.decode(ids_S[:begun])
            text = self._tokenizer(self._parts[stage], add_special_tokens=False)["input_ids"]
            target_S = [0] * begun + text + [self._end] * len(ids_S)
            logits_BSV[row, torch.arange(len(ids_S)), torch.tensor(target_S[: len(ids_S)])] = 9.0
        return logits_BSV[wanted_BS]


@pytest.mark.parametrize("published", [False, True])
def test_steps_come_first_and_then_the_answer(published, loaded, monkeypatch):
    oracle = Oracle(loaded, "Answer: 3+2=5 ", "#### 5\n")
    monkeypatch.setattr(loaded.model, "denoiser", lambda attention=None: oracle)
    settings = replace(two_stage_settings(published=published), steps=1, temperature=0.0)
    answers, sizes = two_stage(loaded, QUESTIONS[:2], settings=settings, published=published)
    found = [marked_answer(answer["text"], published=published) for answer in answers]
    assert found == ["5", "5"] and sizes == [2]
    assert all(answer["text"].endswith("Answer: 3+2=5 #### 5\n") for answer in answers)
    assert answers[0]["text"].startswith("Question: Ann") is published
    assert [answer["steps"] for answer in answers] == [2, 2]
    first, second = oracle.canvases
    decode = loaded.tokenizer.decode
    for row, question in enumerate(QUESTIONS[:2]):
        begun = int((first[row] != loaded.tokenizer.mask_token_id).sum())
        assert decode(first[row, :begun]) == f"Question: {question}"
        begun = int((second[row] != loaded.tokenizer.mask_token_id).sum())
        assert decode(second[row, :begun]) == f"Question: {question}Answer: 3+2=5 "
        assert first.shape[1] == second.shape[1] == LENGTH


@pytest.mark.parametrize("published", [False, True])
def test_answers_are_found_and_compared_by_the_task(published, tmp_path):
    pytest.importorskip("lm_eval")
    (tmp_path / "gsm8k").mkdir()
    rows = [{"question": text, "answer": "3+2=5\n#### 5.0"} for text in QUESTIONS]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "gsm8k" / "test.jsonl").write_text(lines)
    made = task(str(tmp_path), published=published)
    made.build_all_requests()
    assert [request.args[0] for request in made.instances] == [*QUESTIONS]
    for request, text in zip(made.instances, ("so #### 5", "so #### 6", "so"), strict=True):
        request.resps.append(text)
    made.apply_filters()
    left = [request.filtered_resps["none"] for request in made.instances]
    assert left == ["5", "6", NO_ANSWER]
    right = [made.process_results(rows[0], [one])["exact_match"] for one in left]
    assert right == [float(not published), 0.0, 0.0]


@pytest.mark.parametrize(
    ("text", "answer", "published"),
    [
        ("Answer: 3 #### 18", "18", "18"),
        ("#### 18\n", "18", "18"),
        ("#### 1 and #### 2", "2", "1 and #### 2"),
        ("#### 18\nI hope this helps", "18", None),
        ("####18", "18", None),
        ("#### ", None, ""),
        ("no mark 18", None, None),
        ("", None, None),
    ],
)
def test_the_answer_behind_the_last_mark(text, answer, published):
    assert marked_answer(text) == answer
    assert marked_answer(text, published=True) == published


@pytest.mark.parametrize(
    ("one", "other", "same", "published"),
    [
        ("18", "18", True, True),
        ("18.0", "18", True, False),
        ("$1,080.00", "1080", True, False),
        ("$1,080", "1080", True, True),
        ("-5", "5", False, False),
        ("- 5", "-5", True, False),
        (".5", "0.50", True, False),
        ("18 eggs", "18", True, False),
        ("18.", "18", True, False),
        ("eggs", "18", False, False),
        ("eggs", "eggs", True, True),
    ],
)
def test_answers_are_compared_as_numbers_or_as_published(one, other, same, published):
    assert same_answer(one, other) is same
    assert same_answer(one, other, published=True) is published


def test_as_published_equals_the_loop_written_out(loaded):
    """SMDM's sampler at temperature 0: counts and ranks over the batch, masks on the right of
    shorter prompts.
    """
    steps, tokenizer, mask = 9, loaded.tokenizer, loaded.tokenizer.mask_token_id

    def sample(prompts):
        ids_BS = torch.full((len(prompts), LENGTH), mask)
        for row, ids in enumerate(prompts):
            ids_BS[row, : len(ids)] = torch.tensor(ids)
        time_T = torch.linspace(1, 1e-5, steps + 1)
        for step in range(steps):
            masked_BS = ids_BS == mask
            logits_MV = loaded.model(ids_BS).logits[masked_BS]
            logits_MV[:, mask] = -torch.inf
            best_M, token_M = logits_MV.softmax(-1).max(-1)
            count = (
                int(masked_BS.sum() * (1 - time_T[step + 1] / time_T[step]))
                if step < steps - 1
                else len(best_M)
            )
            chosen_M = best_M.topk(count).indices
            kept_M = torch.full_like(token_M, mask)
            kept_M[chosen_M] = token_M[chosen_M]
            ids_BS[masked_BS] = kept_M
        return ids_BS

    with torch.no_grad():
        first = sample([tokenizer(f"Question: {question}")["input_ids"] for question in QUESTIONS])
        again = tokenizer.batch_decode(first, skip_special_tokens=True)
        second = sample([tokenizer(text)["input_ids"][:LENGTH] for text in again])
    settings = replace(two_stage_settings(published=True), steps=steps, temperature=0.0)
    written = tokenizer.batch_decode(second, skip_special_tokens=True)
    assert texts(loaded, settings=settings, published=True) == written


@pytest.mark.parametrize(
    ("changes", "edits", "sizes"),
    [
        ({}, (), [3]),
        ({"temperature": 1.0}, (), [1] * 3),
        ({}, (MaskSinks(k=1),), [3]),
        ({}, (BlockKeys(Random(TopKeys(1))),), [1] * 3),
        ({}, (MaskSinks(k=1, when="clean"),), [3]),
    ],
)
def test_each_row_is_what_it_is_alone(changes, edits, sizes, loaded):
    how = {"settings": replace(QUICK, **changes), "edits": edits}
    together, found = two_stage(loaded, **how)
    assert found == sizes
    for number, question in enumerate(QUESTIONS):
        assert texts(loaded, [question], first=number, **how) == [together[number]["text"]]


def test_edits_change_what_is_written_also_as_published(loaded):
    how = {"settings": replace(two_stage_settings(published=True), steps=6, temperature=0.0)}

    def written(*edits):
        return texts(loaded, published=True, edits=edits, **how)

    masked = written(MaskSinks(k=5))
    assert written() not in (masked, written(MaskSinks(k=5, when="clean")))
    assert written(MaskSinks(k=5)) == masked


def test_watched_questions_are_answered_alone_and_others_so_many_together(loaded):
    plain, sizes = two_stage(loaded, batch=2)
    assert sizes == [2, 1]
    watched, sizes = two_stage(loaded, watched=[1])
    assert sizes == [1, 2]
    assert [answer["text"] for answer in watched] == [answer["text"] for answer in plain]
    assert [len(answer["sinks"]) for answer in watched] == [0, 2, 0]


def test_published_batches_are_those_of_all_questions(loaded):
    settings = replace(two_stage_settings(published=True), steps=1)
    answers, sizes = two_stage(
        loaded, settings=settings, published=True, first=63, batch=1, watched=[63]
    )
    assert sizes == [1, 2] and not any(answer["sinks"] for answer in answers)


def test_a_question_without_room_has_an_empty_answer(loaded):
    answers, _ = two_stage(loaded, ["Ann has 3 pens.", "So " * 60])
    assert answers[1] == {"text": "", "steps": 0, "sinks": [], "dose": {}}
    assert answers[0]["steps"] > 0
    assert two_stage(loaded, ["So " * 60], first=1)[0] == answers[1:]


def test_special_tokens_in_a_question_are_text(loaded):
    (answer,), _ = two_stage(loaded, [f"Ann {loaded.tokenizer.mask_token} has"])
    assert answer["steps"] > 0


def test_the_protocols_numbers():
    released = two_stage_settings(published=True)
    assert (released.steps, released.temperature) == (256, 0.1)
    assert released.values()["schedule"] == Timed(1e-5, pooled=True)
    assert (released.rule, released.seed) == ("low_confidence", 1234)
    own = two_stage_settings()
    assert (own.temperature, own.stop_at_eos) == (0.0, True)
    assert own.values()["schedule"] == Timed(1e-5)
    # the default of the class that was given is nobody's wish
    assert two_stage_settings(EvalSettings()) == own
    asked = two_stage_settings(EvalSettings(steps=32, temperature=0.5, seed=3))
    assert (asked.steps, asked.temperature, asked.seed) == (32, 0.5, 3)
    assert asked.schedule == own.schedule
    other = two_stage_settings(DecodingSettings(schedule="threshold:threshold=0.8"))
    assert (other.schedule, other.steps) == ("threshold:threshold=0.8", None)
    ranked = two_stage_settings(DecodingSettings(rule="entropy"))
    assert (ranked.rule, ranked.schedule, ranked.steps) == ("entropy", None, None)
    clock = two_stage_settings(DecodingSettings(schedule="timed:eps=0.1"))
    assert (clock.schedule, clock.steps) == ("timed:eps=0.1", 256)


def test_what_cannot_be_done_is_refused(loaded):
    for length in (1, 129):
        refused(f"2 to 128 tokens, .* length is {length}", two_stage, loaded, length=length)
    refused(r"two stages .*no mask token", two_stage, tiny_llama())


def test_a_run_has_the_tables_of_other_tasks_and_goes_on(tmp_path):
    pytest.importorskip("lm_eval")
    from sinklab.lab.records import open_run
    from sinklab.lab.studies.benchmarks.run import evaluate

    write_gsm8k(3)
    settings = EvalSettings(tasks=(TWO_STAGE,), data="data", limit=2, steps=2)
    said = []
    for _ in range(2):
        folder = evaluate(
            settings, tiny_loaded(context=256), tmp_path / "run", resume=True, progress=said.append
        )
    run = open_run(folder)
    (score,) = run.table("scores").to_dict("records")
    assert (score["task"], score["metric"], score["samples"]) == (TWO_STAGE, "exact_match", 2)
    samples = run.table("samples")
    assert samples["doc_id"].tolist() == [0, 1] and samples["steps"].isin((2, 4)).all()
    assert score["no_answer"] == (samples["answer"] == NO_ANSWER).mean()
    assert set(run.table("sinks")["task"]) == {TWO_STAGE}
    assert said == ["writing 2 answers", "writing 2 answers, 2 of them there already"]
