import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from likelihood_twin import exact, ids, logprobs
from refusals import refused
from sinklab.core.instrument import BlockKeys, SinkKeys, TopKeys, intervene, trace
from sinklab.core.sinks import Excess
from sinklab.lab.measures import (
    MaskPositions,
    MaskSinks,
    Random,
    WindowAttention,
    by_protocol,
)
from sinklab.lab.scoring.likelihood import LikelihoodSettings, rolling, score, scoring_edits
from sinklab.lab.scoring.requests import monte_carlo
from tiny_diffusion import tiny_loaded
from tiny_llama import tiny_llama

REQUESTS = [(ids(9, 1), ids(5, 2)), (ids(12, 3), ids(4, 3)), (ids(20, 6), ids(7, 7))]
SETTINGS = LikelihoodSettings(samples=5, batch=4)
EDITS = {
    "k": (partial(tiny_loaded, 1), MaskSinks(k=2)),
    "random": (partial(tiny_loaded, 1), BlockKeys(Random(TopKeys(2)))),
    "random, causal": (tiny_llama, BlockKeys(Random(TopKeys(2)))),
    "epsilon, causal": (tiny_llama, BlockKeys(SinkKeys(Excess(1.0)))),
    "positions": (partial(tiny_loaded, 1), MaskPositions((0, 3))),
    "window, causal": (tiny_llama, WindowAttention(radius=3)),
}


@pytest.mark.parametrize("name", EDITS)
def test_batches_order_and_company_do_not_matter_under_an_edit(name):
    loaded, edit = EDITS[name]
    loaded = loaded()
    clean = logprobs(loaded, REQUESTS, SETTINGS)
    whole = score(loaded, REQUESTS, SETTINGS, edits=[edit])
    assert logprobs(loaded, REQUESTS, SETTINGS) == clean, "the model is left alone"
    again = score(loaded, REQUESTS[::-1], replace(SETTINGS, batch=64), edits=[edit])[::-1]
    for one, other, unedited in zip(whole, again, clean, strict=True):
        assert one.logprob == pytest.approx(other.logprob, rel=1e-5)
        assert one.dose.row() == pytest.approx(other.dose.row(), abs=1e-5, nan_ok=True)
        # layers and heads of every row
        assert one.dose.weight == other.dose.weight and one.dose.weight % 8 == 0
        assert abs(one.logprob - unedited) > 1e-3


@pytest.mark.parametrize("guided", [0.0, 0.5])
def test_the_dose_of_a_score_is_what_its_keys_received(guided):
    loaded, (context, _) = tiny_loaded(), REQUESTS[0]
    # of one token there is one noisy copy; the first layer does not depend on what is hidden in it
    edit = MaskSinks(k=2, layers=(0,), counted_by=Excess(0.9))
    settings = replace(SETTINGS, cfg_scale=guided)
    company = [(context, [3]), *REQUESTS]
    found = score(loaded, company, settings, edits=[edit])[0]
    mask_id = loaded.model.config.mask_token_id
    read = [[*context, mask_id], [mask_id] * (len(context) + 1)][: 1 + bool(guided)]
    with torch.no_grad(), trace(loaded.model, layers=(0,)) as recording:
        loaded.model(torch.tensor(read))
    received_BHS = recording.received[0][:, 0]
    keys = received_BHS.shape[-1]
    best_BHM = received_BHS.topk(2).values
    dose = found.dose
    assert dose.keys == 2 and dose.weight == best_BHM.shape[0] * best_BHM.shape[1]
    assert (
        dose.held == dose.removed == pytest.approx(float(best_BHM.sum(-1).mean()) / keys, rel=1e-5)
    )
    assert dose.sinks == float((best_BHM > 1 + 0.9 * (keys - 1) / keys).float().mean())
    assert math.isnan(score(loaded, company, settings, edits=[edit], measure=False)[0].dose.removed)
    assert score(loaded, company[:1], settings)[0].dose is None
    assert rolling(loaded, context, SETTINGS, edits=[edit]).dose.keys == 2


@pytest.mark.parametrize("shift", [False, True])
def test_sinks_are_chosen_by_a_clean_pass_over_the_same_noisy_row(shift):
    loaded, (context, continuation) = tiny_loaded(logit_shift=shift), REQUESTS[0]
    edit = MaskSinks(k=3, when="clean")
    plan = monte_carlo(5, 1, SETTINGS)
    values = []
    for row, weight in zip(plan.rows_n, plan.weights_n, strict=True):
        masked_L = plan.masked_NL[row]
        noisy_1S = torch.tensor([context + continuation])
        noisy_1S[0, len(context) :].masked_fill_(masked_L, loaded.model.config.mask_token_id)
        with torch.no_grad(), intervene(loaded.model, edit) as log:
            with log.probing():
                loaded.model(noisy_1S)
            logp_LV = loaded.model(noisy_1S).logits[0, len(context) :].double().log_softmax(-1)
        values.append(
            weight * logp_LV[torch.arange(5), torch.tensor(continuation)][masked_L].sum().item()
        )
    (found,) = score(loaded, REQUESTS[:1], SETTINGS, groups=[1], edits=[MaskSinks(k=3)])
    assert found.logprob == pytest.approx(math.fsum(values) / 5, rel=1e-5)


def test_an_autoregressive_model_loses_what_a_clean_pass_over_the_text_chose():
    loaded, (context, continuation) = tiny_llama(), REQUESTS[0]
    ids_1S = torch.tensor([context + continuation[:-1]])
    with torch.no_grad(), intervene(loaded.model, MaskSinks(k=3, when="clean")) as log:
        with log.probing():
            loaded.model(ids_1S, use_cache=False)
        logp_LV = (
            loaded.model(ids_1S, use_cache=False)
            .logits[0, len(context) - 1 :]
            .double()
            .log_softmax(-1)
        )
    plain = logp_LV[torch.arange(5), torch.tensor(continuation)].sum().item()
    for selector in ("received", "last_row"):
        found = score(
            loaded, REQUESTS, SETTINGS, edits=[MaskSinks(k=3, scores=selector)], greedy=True
        )
        assert found[0].logprob == pytest.approx(plain, rel=1e-5)
        assert all(math.isfinite(one.logprob) for one in found)


@pytest.mark.slow
def test_random_controls_follow_their_seed_and_the_settings():
    loaded = tiny_loaded()
    edit = BlockKeys(Random(TopKeys(2)))
    first = logprobs(loaded, REQUESTS, SETTINGS, edits=[edit])
    assert first == logprobs(loaded, REQUESTS, SETTINGS, edits=[edit])
    assert first != pytest.approx(
        logprobs(loaded, REQUESTS, SETTINGS, edits=[replace(edit, seed=1)]), rel=1e-4
    )
    # of one token there is one mask, but each sample draws its own columns
    (one,) = score(loaded, [(ids(9), [5])], LikelihoodSettings(samples=20), edits=[edit])
    (clean,) = score(loaded, [(ids(9), [5])], LikelihoodSettings(samples=20))
    assert one.stderr > 0.001
    assert clean.stderr == 0


def test_guidance_and_edits_go_together():
    loaded, settings = tiny_loaded(1), replace(SETTINGS, cfg_scale=0.5, samples=200)
    truth = exact(loaded, *REQUESTS[0], cfg_scale=0.5, edits=[MaskSinks(k=2)])
    (found,) = score(loaded, REQUESTS[:1], settings, edits=[MaskSinks(k=2)])
    assert abs(found.logprob - truth) < 4 * found.stderr


def test_edits_become_such_as_a_single_reading_can_carry_out():
    loop, now = MaskSinks(k=2, when="kept", limit=6, scores="last_row"), MaskSinks(k=2, when="now")
    carried, causal = (
        scoring_edits([loop, now], is_diffusion=kind, over_steps=True) for kind in (True, False)
    )
    # a source that one reading can have stays
    assert carried == (MaskSinks(k=2, when="clean", scores="last_row"), now)
    assert causal == (MaskSinks(k=2, when="clean"), now)
    open_edit = (MaskSinks(k=1),)
    assert scoring_edits(open_edit, is_diffusion=True)[0].when == "clean"
    others = (
        MaskPositions((0,), steps=(0, 4)),
        MaskPositions(range(2, 4), steps=(0, None)),
        WindowAttention(2),
    )
    assert scoring_edits(others, is_diffusion=True) == others


@pytest.mark.parametrize(
    "edit, message",
    [
        (MaskPositions(range(2, 4), steps=(1, None)), "begins at step 1 and would change"),
        (MaskPositions((14,)), "position 14, but .* has 14 tokens"),
        (MaskPositions(range(2, 15), steps=(0, None)), "names position 14, but the"),
        (MaskSinks(k=1, queries="from14"), "names position 14, but the"),
        (by_protocol("paper", 2), "when='previous' has no step"),
        (by_protocol("held", 2), "when='kept' has no step before"),
        (MaskSinks(k=14), "every query must keep a key, "),
        (MaskSinks, "object of class Intervention, got"),
    ],
)
def test_edits_that_do_not_fit_are_refused(edit, message):
    refused(message, score, tiny_loaded(), REQUESTS, SETTINGS, edits=[edit])
