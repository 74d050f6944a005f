"""The lm-eval model: requests of every kind, what shares its noise, what is asked once, bad
arguments.
"""

import copy
import math
from dataclasses import replace

import pytest

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model

from refusals import refused
from sinklab.core.instrument import TopKeys
from sinklab.core.registry import interventions
from sinklab.core.sinks import Gu
from sinklab.lab.measures import PROTOCOLS, MaskSinks, Random, by_protocol
from sinklab.lab.scoring import score
from sinklab.lab.studies.benchmarks.harness_model import SinklabLM
from sinklab.lab.studies.benchmarks.requests import likelihood_settings, request_number
from sinklab.lab.studies.benchmarks.study import EvalSettings
from tiny_diffusion import beginning_tokenizer, tiny_loaded
from tiny_llama import tiny_llama

SETTINGS = EvalSettings(block_length=None, mc_samples=8, record_sinks=0)
CONTEXT = "The old man sat by"
ENDS = (" the sea", " the boats", " rain")


def instance(
    kind,
    *arguments,
    task="toy",
    document=0,
    number=0,
    repeats=1,
):
    return Instance(kind, {}, arguments, number, (task, document, repeats))


def an_lm(loaded, **changes):
    return SinklabLM(loaded, settings=replace(SETTINGS, **changes))


def choices(loaded, document=0):
    return [
        instance("loglikelihood", CONTEXT, end, document=document, number=at)
        for at, end in enumerate(ENDS)
    ]


def ids(loaded, text):
    return loaded.tokenizer(text)["input_ids"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "specs", [("block_keys:keys=top:k=2",), ("block_keys:keys=random:like=top:k=2",)]
)
@pytest.mark.parametrize("make", [tiny_loaded, tiny_llama])
def test_choices_are_scored_under_the_same_noise(make, specs):
    loaded = make()
    settings = replace(SETTINGS, edits=specs)
    model = SinklabLM(loaded, settings=settings)
    found = model.loglikelihood(choices(loaded))
    context = ids(loaded, CONTEXT)
    pairs = [(context, ids(loaded, CONTEXT + end)[len(context) :]) for end in ENDS]
    direct = score(
        loaded,
        pairs,
        likelihood_settings(settings),
        groups=[request_number(0, "toy", 0)] * 3,
        edits=[interventions.parse(spec) for spec in specs],
    )
    assert [logprob for logprob, _ in found] == pytest.approx(
        [one.logprob for one in direct], abs=1e-4
    )
    assert not any(greedy for _, greedy in found), (
        "greedy decoding is not asked for where there are choices"
    )
    # what was told is what the tables are made of
    assert model.told["toy", 0, 2]["tokens"] == len(pairs[2][1])
    one_at_a_time = [
        SinklabLM(loaded, settings=settings).loglikelihood([each])[0][0] for each in choices(loaded)
    ]
    assert [logprob for logprob, _ in found] == pytest.approx(one_at_a_time, abs=1e-4)


@pytest.mark.parametrize("make", [tiny_loaded, tiny_llama])
def test_answers_are_counted_while_they_last(make):
    loaded, counts = make(), []
    model = an_lm(loaded, new_tokens=4)
    asked = [request for document in range(4) for request in choices(loaded, document)]
    model.answered(asked, counts.append)
    assert counts == [1] * 12
    model.answered(asked, counts.append)
    assert len(counts) == 12, "what is answered is not asked for again"
    counts.clear()
    text = instance("generate_until", CONTEXT, {"until": []}, document=9)
    model.answered([text], counts.append)
    assert counts == [0.25] * 4


def test_a_single_continuation_is_compared_with_greedy_decoding():
    loaded = tiny_llama()
    model = an_lm(loaded)
    for context in ("The old", "The sea", "The boats", "He", "Will", "it", "looked", "the wind"):
        (text,) = model.generate_until([instance("generate_until", context, {"max_gen_toks": 1})])
        # read again, most texts fall into other tokens
        if text.strip() and len(ids(loaded, context + text)) == len(ids(loaded, context)) + 1:
            break
    else:
        raise AssertionError("no text is read again as it was written")
    right = model.loglikelihood([instance("loglikelihood", context, text, document=1)])[0]
    wrong = model.loglikelihood([instance("loglikelihood", context, " rising", document=2)])[0]
    assert (right[1], wrong[1]) == (True, False)
    assert right[0] > wrong[0]


def test_contexts_may_be_empty_or_end_in_a_space():
    loaded = tiny_loaded()
    model = an_lm(loaded, estimator="chain_rule")
    empty, spaced, plain = (
        model.loglikelihood([instance("loglikelihood", context, end, document=at)])[0][0]
        for at, (context, end) in enumerate([("", "The"), ("The old ", "man"), ("The old", " man")])
    )
    assert spaced == pytest.approx(plain, abs=1e-5)
    (direct,) = score(loaded, [((), ids(loaded, "The"))], likelihood_settings(model.settings))
    assert empty == pytest.approx(direct.logprob, abs=1e-5)
    assert an_lm(tiny_llama()).loglikelihood([instance("loglikelihood", "", "The")])[0][0] < 0


def test_watched_scores_are_the_same_scores():
    loaded = tiny_loaded(1)
    watched = an_lm(loaded, record_sinks=None)
    plain = an_lm(loaded)
    one, other = (model.loglikelihood(choices(loaded)) for model in (watched, plain))
    assert [pair[0] for pair in one] == pytest.approx([pair[0] for pair in other], abs=1e-4)
    facts = watched.told["toy", 0, 0]["sinks"]
    assert len(facts) == 2
    assert all(
        0 < row["share"] <= 1 and math.isnan(row["in_masked"]) and row["steps"] > 0 for row in facts
    )
    assert plain.told["toy", 0, 0]["sinks"] == []


def test_drawn_answers_follow_the_seed_and_one_is_written_of_each():
    request = instance("generate_until", CONTEXT, {"max_gen_toks": 4})
    drawn = {"temperature": 3.0}
    one, again, other = (
        an_lm(tiny_loaded(), **drawn, seed=seed).generate_until([request]) for seed in (0, 0, 1)
    )
    assert one == again != other
    several = instance("generate_until", CONTEXT, {}, repeats=3)
    refused("asks for 3 answers", an_lm(tiny_loaded()).generate_until, [several])


def test_lm_eval_finds_it_by_name_and_arguments():
    model = get_model("sinklab").create_from_arg_string(
        "pretrained=tiny,mask_sinks=2,tasks=piqa", {"batch_size": 3, "device": "cpu"}
    )
    assert (model.settings.batch, model.settings.tasks) == (3, ("piqa",))
    assert model.edits == (by_protocol("paper", 2),)
    assert SinklabLM(tiny_loaded(), cache="dual").settings.cache == "dual"
    assert (model.rank, model.world_size, model.loaded.name) == (0, 1, "tiny")
    assert model.eot_token_id == model.tokenizer.eos_token_id
    assert model.tokenizer_name == "tiny"


def test_an_autoregressive_model_is_masked_by_its_last_row():
    model = SinklabLM(tiny_llama(), settings=replace(SETTINGS, mask_sinks=2, control="random"))
    edit = by_protocol("paper", 2, control="random", fewer=True, scores="last_row")
    assert model.edits == (edit,)
    once = replace(MaskSinks(2), keys=Random(TopKeys(2), fewer=True), when="clean")
    assert model.scored_edits == (once,), "a text that is read once has no step before"


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_protocol_and_the_rule_make_the_edit(protocol):
    settings = replace(
        SETTINGS, mask_sinks=2, protocol=protocol, sink_rule="gu:weight=0.2", control="equal_mass"
    )
    model = SinklabLM(tiny_loaded(), settings=settings)
    assert model.edits == (by_protocol(protocol, 2, Gu(0.2), control="equal_mass"),)
    (edit,) = replace(settings, control="matched", sink_rule=None).interventions()
    assert edit == by_protocol(protocol, 2, control="matched")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"mask_snks": 2},
            "did you mean 'mask_sinks'",
        ),
        (
            {"control": "random"},
            "mask_sinks is not given",
        ),
        ({"mask_sinks": 0}, "mask_sinks must be at least 1"),
        ({"tasks": ""}, "at least one task"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(given, message):
    refused(message, SinklabLM, tiny_loaded(), **given)


def test_a_model_without_a_mask_token_and_contradictory_settings_are_refused():
    refused("has mask_token_id None", SinklabLM, tiny_loaded(mask_token_id=None))
    refused("fields, not both: got limit", SinklabLM, tiny_loaded(), settings=SETTINGS, limit=3)
    refused("no tokenizer files", SinklabLM, replace(tiny_loaded(), tokenizer=None))
    for given, message in (
        ({"rule": "entropi"}, "entropi"),
        (
            {"cache": "dual", "edits": ("block_keys:keys=top:k=1,when=clean",)},
            "decode without a cache",
        ),
    ):
        refused(message, an_lm, tiny_loaded(), **given)
    refused(
        "rule can be set for diffusion",
        an_lm,
        tiny_llama(),
        rule="entropy",
    )


def test_chats_are_rendered_and_not_begun_twice():
    loaded = tiny_llama()
    tokenizer = copy.deepcopy(loaded.tokenizer)
    said = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    tokenizer.chat_template = said + "{% if add_generation_prompt %}<me>{% endif %}"
    model = an_lm(replace(loaded, tokenizer=tokenizer), chat=True)
    history = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert model.apply_chat_template(history) == "<user>a<assistant>b<me>"
    assert model.apply_chat_template(history, add_generation_prompt=False) == "<user>a<assistant>b"
    assert model.tok_encode("The") == tokenizer("The", add_special_tokens=False)["input_ids"]


def test_an_autoregressive_text_begins_as_its_tokenizer_begins_one():
    tokenizer = beginning_tokenizer()
    plain = tokenizer("The", add_special_tokens=False)["input_ids"]
    model = an_lm(replace(tiny_llama(), tokenizer=tokenizer))
    for text in ("The", "<|begin|>The"):
        assert model.tok_encode(text) == [tokenizer.bos_token_id, *plain]
    model = an_lm(replace(tiny_loaded(), tokenizer=tokenizer))
    assert model.tok_encode("The") == plain
