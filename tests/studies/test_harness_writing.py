"""Several answers in one batch: each is what it would be alone, and what sinks did is read off the
same run.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from refusals import refused
from sinklab.core.instrument import BlockKeys, Dose, TopKeys, trace
from sinklab.core.instrument.edits.dose import MEASURED
from sinklab.core.sinks import Excess
from sinklab.core.subject import Canvas
from sinklab.lab.measures import MaskSinks, Random, WindowAttention, by_protocol
from sinklab.lab.scoring.requests import by_last_query
from sinklab.lab.scoring.writing import Writing, WritingRequest, ended, is_over, seeded
from sinklab.lab.studies.benchmarks.requests import needs_own_batch, write_batch
from sinklab.lab.studies.benchmarks.study import EvalSettings
from sinklab.lab.studies.trace.study import StudySettings
from tiny_diffusion import tiny_loaded
from tiny_llama import tiny_llama

PROMPTS = (
    "The old man",
    "The sea and the boats were rising",
    "It",
)
BLOCK = 3
SETTINGS = EvalSettings(block_length=BLOCK)
NEW = 2 * BLOCK


def asked(loaded, until=()):
    ids = [tuple(loaded.tokenizer(text)["input_ids"]) for text in PROMPTS]
    return [WritingRequest(each, until, 100 + number) for number, each in enumerate(ids)]


def one_by_one(loaded, each, edits=()):
    """The text that a study writes, which knows no batches."""
    settings = StudySettings(
        new_tokens=NEW, block_length=BLOCK if loaded.family == "diffusion" else 32
    )
    texts = Writing(loaded, [each], settings, NEW, seeded(edits, each.seed), ends=False)
    with texts.begin() as writer:
        *_, last = writer.steps()
    return ended(loaded, last.moment().written.tolist(), (), each.ids[-1:])[1]


LOOP = (MaskSinks(k=1),)
CLEAN = (MaskSinks(k=1, when="clean"), WindowAttention(radius=3))
CAUSAL_LOOP, CAUSAL_CLEAN = by_last_query(LOOP), by_last_query(CLEAN)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, edits",
    [
        ("shifted", ()),
        ("diffusion", LOOP),
        ("with a sink", CLEAN),
        ("autoregressive", CAUSAL_LOOP),
        ("autoregressive", CAUSAL_CLEAN),
    ],
)
def test_rows_of_a_batch_are_what_they_are_alone(kind, edits):
    loaded = tiny_llama()
    if kind != "autoregressive":
        loaded = tiny_loaded(int(kind == "with a sink"), logit_shift=kind == "shifted")
    settings = replace(SETTINGS, stop_at_eos=kind == "autoregressive")
    requests = asked(loaded)
    together = write_batch(loaded, requests, settings, NEW, edits)
    for request, answer in zip(requests, together, strict=True):
        assert answer["text"] == one_by_one(loaded, request, edits)


def close(one, other):
    assert all(one[name] == other[name] for name in ("text", "tokens", "steps"))
    assert Dose(one["dose"]).row() == pytest.approx(
        Dose(other["dose"]).row(), abs=1e-4, nan_ok=True
    )
    for left, right in zip(one["sinks"], other["sinks"], strict=True):
        assert left == pytest.approx(right, abs=1e-4, nan_ok=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make, selector",
    [(lambda: tiny_loaded(1), "received"), (tiny_llama, "last_row")],
)
def test_facts_of_a_row_do_not_depend_on_its_neighbours(make, selector):
    loaded = make()
    requests = asked(loaded)
    edits = (MaskSinks(k=1, scores=selector),)
    together = write_batch(loaded, requests, SETTINGS, NEW, edits, watch=True)
    plain = write_batch(loaded, requests, SETTINGS, NEW, edits)
    assert [answer["text"] for answer in together] == [answer["text"] for answer in plain], (
        "watching changes nothing"
    )
    for request, answer in zip(requests, together, strict=True):
        close(answer, write_batch(loaded, [request], SETTINGS, NEW, edits, watch=True)[0])
    assert 0 < Dose(together[0]["dose"]).removed < 1
    facts = together[0]["sinks"]
    assert len(facts) == 2
    for row in facts:
        if make is tiny_llama:
            assert row["in_masked"] == row["in_sink"] == 0 < row["in_prompt"]


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["paper", "rule", "clean"])
def test_the_dose_of_an_answer_is_that_of_its_log(protocol):
    loaded = tiny_loaded(1)
    edits = (by_protocol(protocol, 2, Excess(1.5)), WindowAttention(radius=4))
    request = asked(loaded)[1]
    (answer,) = write_batch(loaded, [request], SETTINGS, NEW, edits, watch=True)
    entries = {name: [] for name in MEASURED}
    with Writing(
        loaded, [request], replace(SETTINGS, seed=request.seed), NEW, seeded(edits, request.seed)
    ).begin() as writer:
        for _ in writer.steps():
            for removal in writer.log.removals:
                if removal.label == "block_keys":
                    for name, values in entries.items():
                        values += removal[name].flatten().tolist()
            writer.log.removals.clear()
    dose, means = (
        Dose(answer["dose"]),
        {name: np.nanmean(values) for name, values in entries.items() if name != "matched"},
    )
    # two layers with four heads, and no column goes at the first step but in a clean pass
    assert dose.weight == (NEW if protocol == "clean" else NEW - 1) * 8
    assert dose.keys == pytest.approx(means["keys"]) and dose.keys <= 2
    assert (dose.held, dose.removed) == pytest.approx((means["held"], means["removed"]))
    assert dose.sinks == pytest.approx(np.nansum(entries["sinks"]) / np.nansum(entries["chosen"]))
    assert (dose.sinks == 1) == (protocol == "rule")
    unwatched = Dose(write_batch(loaded, [request], SETTINGS, NEW, edits)[0]["dose"])
    assert np.isnan(unwatched.removed) and unwatched.held == pytest.approx(dose.held)


def test_facts_are_those_of_the_attention_itself():
    sink = 2
    loaded = tiny_loaded(sink)
    request = asked(loaded)[1]
    answer = write_batch(loaded, [request], replace(SETTINGS, stop_at_eos=False), NEW, watch=True)[
        0
    ]
    config = loaded.model.config
    canvas = Canvas.from_prompts([list(request.ids)], new_tokens=NEW, mask_id=config.mask_token_id)
    settings = replace(SETTINGS, stop_at_eos=False, seed=request.seed)
    with trace(loaded.model, ("received",)) as recording:
        before = [
            step.before_BS[0]
            for step in loaded.model.denoise(canvas, settings)
            if recording.mark(step) is None
        ]
    received_TLHK = recording.array("received")[:, 0]
    length = received_TLHK.shape[-1] - sink
    share_TLHK = received_TLHK / length
    for layer, facts in enumerate(answer["sinks"]):
        assert facts["steps"] == NEW
        assert facts["share"] == pytest.approx(share_TLHK[:, layer].max(-1).mean(), abs=1e-5)
        above = received_TLHK[:, layer] > 1 + 3 * (length - 1) / length
        assert facts["sinks"] == pytest.approx(above.sum(-1).mean(), abs=1e-6)
        assert facts["with_sink"] == pytest.approx(above.any(-1).mean(), abs=1e-6)
        strong = (share_TLHK[:, layer].max(-1) > 0.3) & above.any(-1)
        assert facts["gu_rate"] == pytest.approx(strong.mean(), abs=1e-6)
        main_TH = received_TLHK[:, layer].argmax(-1) - sink
        masked = sum(
            int(place >= 0 and ids[place] == config.mask_token_id)
            for ids, places_H in zip(before, main_TH, strict=True)
            for place in places_H
        )
        assert facts["in_masked"] == pytest.approx(masked / main_TH.size)
        assert facts["in_sink"] == pytest.approx((main_TH < 0).mean())
        assert sum(
            facts[f"in_{state}"] for state in ("masked", "committed", "prompt", "sink")
        ) == pytest.approx(1)


def test_an_answer_ends_at_its_end():
    loaded = tiny_loaded()
    request = asked(loaded)[0]
    whole = write_batch(loaded, [request], SETTINGS, NEW)[0]
    assert whole["steps"] == NEW
    first = whole["text"]
    early = write_batch(loaded, [replace(request, until=("", first[:1]))], SETTINGS, NEW)[0]
    assert early["text"] == ""
    assert early["steps"] == BLOCK, "the first block holds the end, so the second is not written"
    eos = loaded.tokenizer.eos_token_id
    assert ended(loaded, [7, 9, eos, 8], ())[0] == [7, 9]
    assert is_over(loaded, [eos], ())
    assert not is_over(loaded, [], ("x",))
    # a special token may be named by a task as its end
    mask = loaded.tokenizer.mask_token
    assert ended(loaded, [loaded.tokenizer.mask_token_id, 5], (mask,)) == ([], "")


def spelled(*tokens):
    """A tokenizer of these tokens that decodes as SentencePiece's do: without the first space."""
    tokenizer = Tokenizer(models.WordLevel({token: number for number, token in enumerate(tokens)}))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_an_indented_line_keeps_its_spaces():
    loaded = replace(tiny_llama(), tokenizer=spelled("\n", "▁▁▁▁return", "▁1"))
    assert loaded.tokenizer.decode([1, 2]) == "   return 1"
    assert ended(loaded, [1, 2], (), before=[0]) == ([1, 2], "    return 1")
    assert ended(loaded, [1, 2], (" 1",), before=[0])[1] == "    return"
    assert ended(loaded, [1, 2], ())[1] == "   return 1"


@pytest.mark.ring("extras")
def test_what_draws_or_waits_is_written_alone():
    for changes, edits, lonely in (
        ({}, (MaskSinks(k=1),), False),
        ({}, (BlockKeys(Random(TopKeys(1))),), True),
        ({"temperature": 0.5}, (), True),
        ({"rule": "random"}, (), True),
        ({"schedule": "threshold"}, (), False),
        ({"schedule": "threshold"}, (MaskSinks(k=1),), True),
        ({"schedule": "threshold", "cache": "dual"}, (), True),
        ({"rule": "low_confidence:alg_temp=0.1"}, (), True),
        ({"schedule": "timed:pooled=true"}, (), True),
        ({"schedule": "dynamic"}, (), False),
    ):
        assert needs_own_batch(replace(SETTINGS, **changes), edits) == lonely, (changes, edits)


def test_nan_logits_and_long_prompts_are_refused():
    loaded = tiny_llama(context=16)
    long, short = ([WritingRequest((5,) * count, (), 0)] for count in (10, 1))
    refused("16 positions, got 20", write_batch, loaded, long, SETTINGS, 10)
    with torch.no_grad():
        loaded.model.lm_head.weight.fill_(torch.nan)
    refused("gave NaN logits at step 0", write_batch, loaded, short, SETTINGS, 2)
