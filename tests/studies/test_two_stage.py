"""The sink-token paper's GSM8K protocol: steps first, then the answer, as its code does."""

from dataclasses import replace

import pytest
import torch

from refusals import refused
from sinklab.core.subject import DecodingSettings
from sinklab.lab.measures import MaskSinks
from sinklab.lab.samplers import Timed
from sinklab.lab.studies.benchmarks.study import NO_ANSWER, TWO_STAGE, EvalSettings, Evaluation
from sinklab.lab.studies.benchmarks.two_stage import (
    PROTOCOL,
    marked_answer,
    plain_answer,
    task,
    two_stage_settings,
    two_stages,
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


@pytest.fixture(scope="module")
def loaded():
    return tiny_loaded(context=128)


def answers(loaded, questions=QUESTIONS, **protocol):
    settings = replace(PROTOCOL, steps=6, temperature=0.0)
    return two_stages(loaded, questions, **{"settings": settings, "length": LENGTH, **protocol})


def texts(*given, **protocol):
    return [answer["text"] for answer in answers(*given, **protocol)]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Answer: 3 #### 18", "18"),
        ("#### 18\n", "18"),
        ("#### 1 and #### 2", "1 and #### 2"),
        ("#### 18\nI hope this helps", None),
        ("####18", None),
        ("no mark 18", None),
    ],
)
def test_the_answer_behind_the_mark(text, answer):
    assert marked_answer(text) == answer


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("18", "18", True),
        ("18.0", "18", False),
        ("$1,080", "1080", True),
        ("18 eggs", "18", False),
        ("eggs", "eggs", True),
    ],
)
def test_answers_are_compared_as_published(one, other, same):
    assert (plain_answer(one) == plain_answer(other)) is same


def test_answers_are_found_and_compared_by_the_task():
    pytest.importorskip("lm_eval")
    write_gsm8k(3)
    made = task("data")
    made.build_all_requests()
    assert made.instances[1].args[0] == "What is 1 and 1?"
    for request, text in zip(made.instances, ("so #### 0", "so #### 6", "so"), strict=True):
        request.resps.append(text)
    made.apply_filters()
    left = [request.filtered_resps["none"] for request in made.instances]
    assert left == ["0", "6", NO_ANSWER]
    right = [made.process_results(made.eval_docs[0], [one])["exact_match"] for one in left]
    assert right == [1.0, 0.0, 0.0]


def test_it_equals_the_loop_written_out(loaded):
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
    written = tokenizer.batch_decode(second, skip_special_tokens=True)
    assert texts(loaded, settings=replace(PROTOCOL, steps=steps, temperature=0.0)) == written


@pytest.mark.slow
def test_edits_change_what_is_written(loaded):
    masked = texts(loaded, edits=(MaskSinks(k=5),))
    assert texts(loaded) not in (masked, texts(loaded, edits=(MaskSinks(k=5, when="clean"),)))
    found = answers(loaded, edits=(MaskSinks(k=5),))
    assert [answer["text"] for answer in found] == masked and all(one["dose"] for one in found)


def test_questions_may_leave_no_room_or_spell_special_tokens(loaded):
    odd, long = f"Ann {loaded.tokenizer.mask_token} has", "So " * 60
    found = answers(loaded, [odd, long])
    assert found[0]["steps"] > 0 and found[1]["text"].startswith("Question: So So")
    (alone,) = answers(loaded, [long])
    assert (alone["text"], alone["steps"]) == (found[1]["text"], 0)


def test_the_protocols_numbers():
    assert (PROTOCOL.steps, PROTOCOL.temperature) == (256, 0.1)
    assert PROTOCOL.values()["schedule"] == Timed(1e-5, pooled=True)
    assert (PROTOCOL.rule, PROTOCOL.seed) == ("low_confidence", 1234)
    # the default of the class that was given is nobody's wish
    assert two_stage_settings(EvalSettings()) == PROTOCOL
    asked = two_stage_settings(EvalSettings(steps=32, temperature=0.5, seed=3))
    assert asked == replace(PROTOCOL, steps=32, temperature=0.5, seed=3)
    clock = two_stage_settings(DecodingSettings(schedule="timed:eps=0.1"))
    assert (clock.schedule, clock.steps) == ("timed:eps=0.1", 256)


def test_what_cannot_be_done_is_refused(loaded):
    for length in (1, 129):
        refused(f"2 to 128 tokens, .* length is {length}", answers, loaded, length=length)
    refused(r"two stages .*no mask token", answers, tiny_llama())


def test_a_run_has_the_tables_of_other_tasks_and_goes_on():
    pytest.importorskip("lm_eval")
    from sinklab.lab.records import open_run

    write_gsm8k(3)
    settings = EvalSettings(tasks=(TWO_STAGE,), data="data", limit=2, steps=2)
    said = []
    for _ in range(2):
        Evaluation()(tiny_loaded(context=256), "run", settings, progress=said.append)
    run = open_run("run")
    (score,) = run.table("scores").to_dict("records")
    assert (score["task"], score["metric"], score["samples"]) == (TWO_STAGE, "exact_match", 2)
    samples = run.table("samples")
    assert samples["doc_id"].tolist() == [0, 1] and samples["steps"].isin((2, 4)).all()
    assert score["no_answer"] == (samples["answer"] == NO_ANSWER).mean()
    assert said[0] == TWO_STAGE and "at this rate" in said[1] and "is there" in said[2]
