import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from likelihood_twin import (
    ids,
    logprobs,
    plain_causal,
    plain_chain,
    plain_score,
)
from refusals import refused
from sinklab.core.subject import Canvas, DecodingSettings
from sinklab.lab.checkpoints import SpecialIds
from sinklab.lab.scoring import likelihood
from sinklab.lab.scoring.likelihood import LikelihoodSettings, Scored, rolling, score
from sinklab.lab.scoring.requests import monte_carlo
from tiny_diffusion import tiny_loaded
from tiny_llama import tiny_llama

MODELS = {
    "llada": {},
    "dream": {"logit_shift": True},
    "sink": {"sink": 2},
    "end": {"sink": 1, "sink_side": "end"},
}
PARTS = [Scored(-3.0, 3.0), Scored(-4.0, 4.0)]
REQUESTS = [
    (ids(9, 1), ids(5, 2)),
    ([], ids(4, 3)),
    (ids(3, 4), ids(1, 5)),
    (ids(20, 6), ids(7, 7)),
]
GROUPS = [3, 3, 4, 5]


@pytest.mark.parametrize(
    "model, noise, cfg_scale",
    [("llada", "llada", 0.0), ("dream", "smdm", 0.7), ("sink", "smdm", 0.0), ("end", "llada", 0.7)],
)
def test_scores_equal_plain_loops_over_the_same_masks(model, noise, cfg_scale):
    loaded = tiny_loaded(**MODELS[model])
    settings = LikelihoodSettings(noise=noise, samples=5, batch=4, cfg_scale=cfg_scale)
    chained = replace(settings, estimator="chain_rule")
    found, chains = (score(loaded, REQUESTS, how, groups=GROUPS) for how in (settings, chained))
    for request, group, one, chain in zip(REQUESTS, GROUPS, found, chains, strict=True):
        plan = monte_carlo(len(request[1]), group, settings)
        assert one.logprob == pytest.approx(
            plain_score(loaded, *request, plan, cfg_scale), rel=1e-5
        )
        assert chain.logprob == pytest.approx(plain_chain(loaded, *request, cfg_scale), rel=1e-5)
        assert (one.tokens, one.dropped, chain.stderr) == (len(request[1]), 0, 0)


@pytest.mark.slow
def test_a_forward_has_so_many_rows_at_most():
    for loaded, cfg_scale in ((tiny_loaded(), 0.0), (tiny_loaded(), 1.0), (tiny_llama(), 0.0)):
        sizes = []
        loaded.model.model.embed_tokens.register_forward_pre_hook(
            lambda module, args, sizes=sizes: (
                sizes.append(len(args[0])) if args[0].shape[1] > 1 else None
            )
        )
        score(
            loaded,
            REQUESTS * 4,
            LikelihoodSettings(samples=9, batch=4, cfg_scale=cfg_scale),
            greedy=True,
        )
        assert max(sizes) == 4


def test_logits_that_would_not_fit_are_made_in_smaller_batches(monkeypatch):
    loaded, causal, settings = tiny_loaded(), tiny_llama(), LikelihoodSettings(samples=8)
    before, causal_before = logprobs(loaded, REQUESTS, settings), logprobs(causal, REQUESTS)
    sizes = []
    loaded.model.model.embed_tokens.register_forward_pre_hook(
        lambda module, args: sizes.append(args[0].shape)
    )
    monkeypatch.setattr(likelihood, "MOST_LOGITS", 8 * loaded.model.config.vocab_size)
    assert logprobs(loaded, REQUESTS, settings) == pytest.approx(before, rel=1e-5)
    # a row of the longest request may ask for 7 of the 8 positions that fit
    assert max(shape[0] for shape in sizes if shape[1] == 27) == 1
    assert logprobs(causal, REQUESTS) == pytest.approx(causal_before, rel=1e-5)


def test_choices_of_one_context_share_noise_when_no_groups_are_given():
    loaded, settings = tiny_loaded(), LikelihoodSettings(samples=4)
    request = (ids(8), ids(6, 1))
    one, same = score(loaded, [request, request], settings)
    assert one == same
    for changed, groups in ((settings, [9]), (replace(settings, seed=1), None)):
        (other,) = score(loaded, [request], changed, groups=groups)
        assert other.logprob != pytest.approx(one.logprob)


def greedy_requests(loaded, cfg_scale):
    """What decoding writes, and the same with another last token, by turns."""
    requests = []
    for number, length in enumerate((1, 4, 6, 6)):
        context = [token % 270 for token in ids(5 + number, number)]
        canvas = Canvas.from_prompts(
            [context],
            new_tokens=length,
            mask_id=loaded.model.config.mask_token_id,
            pad_id=0,
            context=64,
        )
        *_, last = loaded.model.denoise(canvas, DecodingSettings(cfg_scale=cfg_scale))
        written = last.ids_BS[0, -length:].tolist()
        requests += [(context, written), (context, [*written[:-1], 3 if written[-1] != 3 else 4])]
    return requests


@pytest.mark.parametrize(
    "model, cfg_scale", [("llada", 0.0), ("dream", 0.5), ("sink", 0.0), ("end", 0.5)]
)
def test_greedy_is_what_decoding_writes(model, cfg_scale):
    loaded = tiny_loaded(**MODELS[model])
    requests = greedy_requests(loaded, cfg_scale)
    settings = LikelihoodSettings(samples=1, batch=3, cfg_scale=cfg_scale)
    found = score(loaded, requests, settings, greedy=True)
    assert [one.greedy for one in found] == [True, False] * 4
    assert not any(one.greedy for one in score(loaded, requests, LikelihoodSettings(samples=1)))


def test_autoregressive_scores_equal_a_plain_loop():
    loaded = tiny_llama()
    written = list(ids(4, 8))
    for _ in range(5):
        with torch.no_grad():
            written.append(int(loaded.model(torch.tensor([written])).logits[0, -1].argmax()))
    requests = [*REQUESTS, (written[:4], written[4:])]
    for batch in (1, 2, 32):
        settings = LikelihoodSettings("chain_rule", samples=3, batch=batch)
        found = score(loaded, requests, settings, greedy=True)
        for (context, continuation), one in zip(requests, found, strict=True):
            total, greedy = plain_causal(loaded, context or [loaded.special.bos], continuation)
            assert one.logprob == pytest.approx(total, rel=1e-5)
            assert (one.greedy, one.stderr, one.tokens) == (greedy, 0.0, len(continuation))
        assert found[-1].greedy
    assert not score(loaded, requests)[-1].greedy


def test_long_contexts_lose_their_left_end():
    long, choice = ids(80), ids(6, 1)
    for loaded, kept in ((tiny_loaded(), 58), (tiny_llama(), 59), (tiny_loaded(1), 57)):
        settings = LikelihoodSettings(samples=3)
        cut, whole = score(
            loaded, [(long, choice), (long[-kept:], choice)], settings, groups=[0, 0]
        )
        assert cut.logprob == pytest.approx(whole.logprob, rel=1e-5)
        assert (cut.dropped, whole.dropped) == (80 - kept, 0)
    (stated,) = score(
        replace(tiny_loaded(), context=20), [(long, choice)], LikelihoodSettings(samples=1)
    )
    assert stated.dropped == 66, "what the authors state counts, not only what the positions reach"


@pytest.mark.slow
def test_rolling_is_the_sum_over_chunks():
    text, settings = ids(150), LikelihoodSettings(samples=4, batch=3)
    loaded = tiny_loaded()
    found = rolling(loaded, text, settings)
    assert found.tokens == 150
    assert found.logprob < 0 < found.stderr
    assert found == rolling(loaded, text, settings)
    chain = rolling(loaded, text[:70], LikelihoodSettings("chain_rule"))
    plain = plain_chain(loaded, [], text[:64]) + plain_chain(loaded, [], text[64:70])
    assert chain.logprob == pytest.approx(plain, rel=1e-5)
    llama = tiny_llama()
    causal = rolling(llama, text)
    parts = [([7], text[:64]), (text[63:64], text[64:128]), (text[127:128], text[128:])]
    assert causal.logprob == pytest.approx(
        sum(plain_causal(llama, *part)[0] for part in parts), rel=1e-5
    )
    assert causal.stderr == 0


def test_chunks_of_one_text_have_their_own_noise(monkeypatch):
    loaded, chunk, settings = tiny_loaded(), ids(64), LikelihoodSettings(samples=4)
    asked = []
    monkeypatch.setattr(
        likelihood, "score", lambda *given, groups, **more: asked.append((given, groups)) or PARTS
    )
    assert rolling(loaded, [*chunk, *chunk], settings) == Scored(-7.0, 5.0, tokens=128)
    ((_, groups),) = asked
    assert len(set(groups)) == 2, "or the errors of equal chunks would add up"


def test_progress_is_called_for_every_request_that_is_done():
    for loaded in (tiny_loaded(), tiny_llama()):
        calls = []
        score(loaded, REQUESTS, LikelihoodSettings(samples=2), progress=partial(calls.append, None))
        assert len(calls) == len(REQUESTS)
    assert score(tiny_loaded(), []) == []


@pytest.mark.parametrize("model", [tiny_loaded, tiny_llama])
@pytest.mark.parametrize(
    "requests, message",
    [
        ([(ids(3), ids(3)), (ids(3), [])], "request 1 has an empty continuation"),
        ([([], ids(65))], "of request 0 has 65 tokens, but .*rolling"),
        ([([5], [9999])], "request 0 holds the id 9999, but"),
    ],
)
def test_requests_that_cannot_be_scored_are_refused(model, requests, message):
    refused(message, score, model(), requests)


LLAMA, DIFFUSION = tiny_llama(), tiny_loaded()
MASK_ID = DIFFUSION.model.config.mask_token_id
GUIDED = LikelihoodSettings(cfg_scale=1.0)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: rolling(DIFFUSION, []), "least one token, but has none"),
        (lambda: score(DIFFUSION, REQUESTS[:2], groups=[0]), "got 1 for 2 requests"),
        (lambda: score(DIFFUSION, [([5], [6, MASK_ID])]), r"request 0 holds \[MASK\]"),
        (lambda: score(LLAMA, REQUESTS, GUIDED), "guidance masks the context"),
        (lambda: score(tiny_loaded(mask_token_id=None), REQUESTS), "has mask_token_id None"),
        (lambda: score(replace(LLAMA, special=SpecialIds()), [([], [5])]), "to start from, but"),
    ],
)
def test_what_cannot_be_scored_is_refused(call, message):
    refused(message, call)


def test_nan_logits_are_named():
    for loaded in (tiny_loaded(), tiny_llama()):
        with torch.no_grad():
            loaded.model.lm_head.weight[5] = math.nan
        refused("gave NaN logits while scoring", score, loaded, REQUESTS[:1])
