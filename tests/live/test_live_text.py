"""What the live page asks of the model, against loops written by hand: full attention with a column
left out.
"""

# S canvas positions, L layers, H heads, K keys
import base64
from functools import cache

import numpy as np
import pytest
import torch

import published_toys
from refusals import refused
from sinklab.core.subject.settings import DecodingSettings
from sinklab.extras.live import LiveText
from sinklab.lab.checkpoints import load
from tiny_diffusion import tiny_loaded

PROMPT, NEW, SEED = "It was a dark and", 6, 3
SETTINGS = DecodingSettings()


@pytest.fixture(scope="module")
def tiny():
    return load("tiny", dtype=torch.float64)


@pytest.fixture(scope="module")
def live_text(tiny):
    live_text = LiveText(tiny, SETTINGS)
    return live_text, list(live_text.write(PROMPT, NEW, SEED))


@pytest.fixture(scope="module")
def edited(live_text):
    """The same text with a key blocked from a step on."""
    return cache(lambda first, key: list(live_text[0].block(first, key)))


def steps(messages):
    return [message for message in messages if message["kind"] == "step"]


def ids(step):
    return [token[0] for token in step["tokens"]]


def codes(step, live_text):
    shape = live_text.about()["layers"], live_text.about()["heads"], step["keys"]
    return np.frombuffer(base64.b64decode(step["codes"]["heads"]), np.uint8).reshape(shape)


def by_hand(loaded, canvas, hidden, first):
    """The canvases that a greedy loop reads, the most confident place written each time, and what
    it ends with.
    """
    mask, seen = loaded.model.config.mask_token_id, []
    ids_1S = torch.tensor([canvas])
    while bool((ids_1S == mask).any()):
        seen.append(ids_1S[0].tolist())
        probability_SV = logits(loaded, ids_1S, hidden if len(seen) > first else None).softmax(-1)
        probability_SV[:, mask] = 0
        best_S, token_S = probability_SV.max(-1)
        place = int(best_S.where(ids_1S[0] == mask, -1.0).argmax())
        ids_1S = ids_1S.clone()
        ids_1S[0, place] = token_S[place]
    return seen, ids_1S[0].tolist()


def logits(loaded, ids_1S, hidden):
    visible_SS = torch.ones(ids_1S.shape[1], ids_1S.shape[1], dtype=torch.bool)
    if hidden is not None:
        visible_SS[:, hidden] = False
    with torch.no_grad():
        return loaded.model(ids_1S, visible=visible_SS).logits[0]


@pytest.mark.slow
def test_the_plain_text_is_the_one_that_the_model_writes(tiny, live_text):
    told = live_text[1]
    seen, end = by_hand(tiny, ids(told[0]), 0, 99)
    assert [ids(step) for step in steps(told)] == seen and len(seen) == NEW
    assert [token[0] for token in told[-1]["tokens"]] == end[-NEW:]
    assert told[-1]["text"] == tiny.needed_tokenizer().decode(end[-NEW:])
    # masked, committed, prompt
    assert {age for step in steps(told) for age in step["ages"]} == {1, 3, 4}
    assert [step["ages"].count(3) for step in steps(told)] == list(range(NEW))


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 3, NEW - 1])
def test_a_key_is_gone_from_a_step_on_and_everything_before_stays(tiny, live_text, edited, first):
    plain, edited = live_text[1], edited(first, 1)
    seen, end = by_hand(tiny, ids(plain[0]), 1, first)
    assert [step["step"] for step in steps(edited)] == list(range(first, NEW))
    assert [ids(step) for step in steps(edited)] == seen[first:]
    assert [token[0] for token in edited[-1]["tokens"]] == end[-NEW:]
    assert all((codes(step, live_text[0])[..., 1] == 1).all() for step in steps(edited))
    assert all((codes(step, live_text[0])[..., 1] > 1).any() for step in steps(plain))


def test_every_forward_says_how_far_it_is(edited):
    told = edited(3, 1)
    assert [(one["step"], one["total"]) for one in told if one["kind"] == "again"] == [
        (step, NEW) for step in range(3)
    ]
    measured = [
        (one["pass"], one["step"], one["total"]) for one in told if one["kind"] == "measuring"
    ]
    assert measured == [("plain", NEW - 3, NEW - 3), ("edited", NEW - 3, NEW - 3)]


def test_the_loss_is_that_of_the_plain_tokens_on_the_plain_canvases(tiny, live_text, edited):
    plain, first = steps(live_text[1]), 3
    measured = edited(first, 1)[-1]["measured"]
    after = [
        *[ids(step) for step in plain[1:]],
        ids(plain[-1])[:-NEW] + [token[0] for token in live_text[1][-1]["tokens"]],
    ]
    for name, hidden in (("plain_loss", None), ("edited_loss", 1)):
        losses = []
        for step, written in zip(plain[first:], after[first:], strict=True):
            (place,) = [
                one
                for one, (old, new) in enumerate(zip(ids(step), written, strict=True))
                if old != new
            ]
            out_SV = logits(tiny, torch.tensor([ids(step)]), hidden)
            losses.append(-float(out_SV[place].log_softmax(-1)[written[place]]))
        # the model of the page is read in batches, its loss taken in single precision
        assert measured[name] == pytest.approx(np.mean(losses), rel=1e-5)
    assert measured["tokens"] == NEW - first


def test_a_sink_may_go_from_one_head_alone(live_text):
    plain = steps(live_text[1])[4]
    for step in steps(list(live_text[0].block(4, 0, layer=2, head=1)))[:1]:
        was, now = codes(plain, live_text[0]), codes(step, live_text[0])
        assert was[2, 1, 0] > 1 and now[2, 1, 0] == 1
        others = np.delete(now[2], 1, 0)
        assert (now[:2] == was[:2]).all() and (others == np.delete(was[2], 1, 0)).all()


def test_what_became_of_the_main_sinks(live_text, edited):
    first, key = 3, 0
    edited = edited(first, key)
    before, after = (
        np.array([step["main"] for step in of]) - 1
        for of in (steps(live_text[1])[first:], steps(edited))
    )
    measured = edited[-1]["measured"]
    assert measured["held"] == pytest.approx((before == key).mean()) and measured["held"] > 0
    assert measured["moved"] == pytest.approx((before != after).mean())
    assert key not in measured["went"] and measured["went"][0] in after[before == key]


@pytest.mark.slow
def test_an_added_sink_can_be_blocked_too():
    live_text = LiveText(load("tiny-sink"), SETTINGS)
    plain = steps(list(live_text.write(PROMPT, 4, 0)))
    assert plain[0]["added"] == 1 and plain[0]["keys"] == len(plain[0]["tokens"]) + 1
    edited = steps(list(live_text.block(1, 0)))
    assert (codes(plain[1], live_text)[..., 0] > 1).any() and (
        codes(edited[0], live_text)[..., 0] == 1
    ).all()
    edited = steps(list(live_text.block(1, 1)))
    assert (codes(edited[0], live_text)[..., 1] == 1).all() and (
        codes(edited[0], live_text)[..., 0] > 1
    ).any()


def blocked(loaded, prompt, **settings):
    live_text = LiveText(loaded, DecodingSettings(**settings))
    plain = list(live_text.write(prompt, NEW, SEED))
    key = plain[0]["keys"] - NEW - 1
    edited = list(live_text.block(len(steps(plain)) // 2, key))
    assert all((codes(step, live_text)[..., key] <= 1).all() for step in steps(edited))
    assert edited[-1]["measured"]["plain_loss"] > 0 and edited[-1]["measured"]["edited_loss"] > 0
    return plain, edited


@pytest.mark.parametrize("kind", ["dream", "smdm", "llada2"])
def test_every_published_format_that_fills_masks(kind, tmp_path):
    getattr(published_toys, kind)(tmp_path)
    plain, edited = blocked(load(tmp_path), "5 6 7")
    assert len(steps(plain)) == NEW and len(steps(edited)) == NEW // 2
    assert plain[0]["ages"] == [4] * 3 + [1] * NEW


def test_padding_in_front_is_no_text():
    loaded = tiny_loaded(block_length=16, blocks_from="column")
    plain, _ = blocked(loaded, "The old man")
    prompt = len(loaded.needed_tokenizer()("The old man")["input_ids"])
    assert plain[0]["ages"] == [0] * (-prompt % 16) + [4] * prompt + [1] * NEW and -prompt % 16 > 0


@pytest.mark.parametrize("kind", ["kv", "logit"])
def test_every_kind_of_added_sink(kind):
    plain, _ = blocked(tiny_loaded(2, sink_kind=kind), "The old man")
    assert plain[0]["added"] == 2


@pytest.mark.parametrize(
    "settings",
    [
        {"cache": "prefix", "block_length": 4},
        {"cfg_scale": 1.0},
        {"schedule": "threshold:threshold=0.3"},
        {"schedule": "timed", "rule": "origin", "steps": 12},
        {"stop_ids": tuple(range(9, 20))},
    ],
)
def test_every_way_to_decode(settings):
    blocked(tiny_loaded(), "The old man", **settings)


def test_what_makes_no_sense_is_refused(tiny, live_text):
    refused("write one first", next, LiveText(tiny, SETTINGS).block(0, 0))
    for wrong, message in (
        ((NEW, 0), f"step is 0 to {NEW - 1}"),
        ((0, 999), "the key is 0 to"),
        ((0, -1), "the key is 0 to"),
        ((0, 0, 6, 0), "the layer is 0 to 5"),
        ((0, 0, 0, 6), "the head is 0 to 5"),
    ):
        refused(message, next, live_text[0].block(*wrong))
    refused("fit the model's context", next, live_text[0].write(PROMPT, 4000, 0))
    refused("write one first", next, live_text[0].block(0, 0))
    refused("tiny-causal is autoregressive", LiveText, load("tiny-causal"), SETTINGS)
