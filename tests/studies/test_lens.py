"""The logit lens, the choice of sinks and their matches, and linear probes, each against a plain
twin.
"""

import math

import numpy as np
import pytest
import torch
from torch import nn

from refusals import refused, refusing
from sinklab.core.probing import trace
from sinklab.core.sinks import Excess
from sinklab.lab.analysis import linear_probes as probes
from sinklab.lab.studies.contents.lens import MEASURES, LogitLens, residual_states
from sinklab.lab.studies.contents.samples import matched_pairs, places_of, sink_heads
from sinklab.lab.studies.contents.study import chosen_rule
from tiny_diffusion import tiny_model
from tiny_llama import tiny_llama

BLOCK, FUTURE, COMMITTED, PROMPT = range(4)


def noisy_ids(model, length=12):
    ids = torch.randint(3, 250, (1, length), generator=torch.Generator().manual_seed(1))
    ids[0, 5:9] = model.config.mask_token_id
    return ids


def hooks_of(model):
    return sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()
    )


@pytest.mark.parametrize("sink", [0, 2])
def test_residual_states_are_those_between_the_layers(sink):
    model = tiny_model(sink)
    ids, before = noisy_ids(model), hooks_of(model)
    with torch.inference_mode(), residual_states(model) as seen:
        model(ids)
    assert hooks_of(model) == before
    assert len(seen.depths_BSD) == 3
    assert torch.equal(seen.depths_BSD[0], model.model.embed_tokens(ids))
    with torch.inference_mode():
        assert torch.equal(model.model.norm(seen.depths_BSD[2]), model.hidden_states(ids))
    # the sinks ran apart, and start from their embeddings
    assert len(seen.added_ND) == (3 if sink else 0)
    if sink:
        assert torch.equal(seen.added_ND[0], model.sink_embeddings)


def test_of_two_forwards_the_first_is_kept():
    model = tiny_model()
    one, other = noisy_ids(model), noisy_ids(model).flip(1)
    with torch.inference_mode(), residual_states(model) as seen:
        model(one)
        model(other)
        assert torch.equal(seen.depths_BSD[0], model.model.embed_tokens(one))
        seen.depths_BSD.clear()
        model(other)
    assert torch.equal(seen.depths_BSD[0], model.model.embed_tokens(other))


@pytest.mark.parametrize(
    ("make", "shift"),
    [
        (tiny_model, False),
        (lambda: tiny_model(logit_shift=True), True),
        # a causal model has a lens too
        (lambda: tiny_llama().model, False),
    ],
)
def test_after_the_last_layer_the_lens_is_the_model(make, shift):
    model = make()
    with torch.inference_mode(), residual_states(model) as seen:
        logits_SV = model(torch.arange(3, 15)[None]).logits[0]
    read_SV = LogitLens.of(model).logits(seen.depths_BSD[2][0])
    # at position i the lens reads what query i predicts
    assert torch.allclose(logits_SV[shift:], read_SV[: len(read_SV) - shift], atol=1e-6)


def test_what_the_lens_measures_is_what_a_plain_loop_finds():
    model = tiny_model()
    hidden, size = (model.config.mask_token_id,), 200
    lens = LogitLens.of(model, hidden_ids=hidden, vocabulary=size)
    states_ND, last_ND = torch.randn(7, 32) * 3, torch.randn(7, 32) * 3
    token_N, frequent_N = (
        torch.tensor([5, 6, -1, 8, 9, 250, 11]),
        torch.tensor([11, -1, 4, 4, 4, 4, 4]),
    )
    found = lens.measures(states_ND, last_ND, token_N, frequent_N, chunk=3)
    assert tuple(found) == MEASURES
    allowed = [token for token in range(size) if token not in hidden]
    for row in range(7):
        logits, last = (
            model.lm_head(model.model.norm(part[row])).double().detach()[:size]
            for part in (states_ND, last_ND)
        )
        p, q = logits[allowed].softmax(0), last[allowed].softmax(0)
        assert found["hidden"][row].item() == pytest.approx(
            logits.softmax(0)[list(hidden)].item(), rel=1e-4
        )
        assert found["entropy"][row].item() == pytest.approx(-(p * p.log()).sum().item(), rel=1e-4)
        assert found["kl"][row].item() == pytest.approx((q * (q / p).log()).sum().item(), rel=1e-3)
        for prefix, token in (("", int(token_N[row])), ("frequent_", int(frequent_N[row]))):
            if not 0 <= token < size:
                assert (
                    found[f"{prefix}probability"][row].isnan()
                    and found[f"{prefix}log10_rank"][row].isnan()
                )
                continue
            place = allowed.index(token)
            rank = sorted(p.tolist(), reverse=True).index(p[place].item()) + 1
            assert found[f"{prefix}probability"][row].item() == pytest.approx(
                p[place].item(), rel=1e-3
            )
            assert found[f"{prefix}log10_rank"][row].item() == pytest.approx(
                np.log10(rank), abs=1e-6
            )


def test_a_lens_needs_a_norm_a_head_and_equal_lengths():
    model = tiny_model()
    refused(
        "3 last states, 2 and 2 tokens",
        LogitLens.of(model).measures,
        torch.zeros(2, 32),
        torch.zeros(3, 32),
        torch.zeros(2),
        torch.zeros(2),
    )
    with refusing("DiffusionLM lacks the norm"):
        del model.model.norm
        LogitLens.of(model)
    with (
        refusing("Linear keeps no list `layers`"),
        residual_states(nn.Linear(2, 2)),
    ):
        pass


def test_places_follow_the_blocks():
    state_S = np.array([2, 2, 1, 0, 1, 0, 0, 2, 0])
    assert places_of(state_S, 0, 3).tolist() == [3, 3, 2, 0, 2, 1, 1, 3, 1]
    assert places_of(state_S, 1, 3).tolist() == [3, 3, 2, 0, 2, 0, 0, 3, 0]
    assert places_of(state_S, 0, None).tolist() == [3, 3, 2, 0, 2, 0, 0, 3, 0]


@pytest.mark.parametrize("sink", [0, 1])
def test_sinks_of_a_traced_forward_are_those_of_the_rule(sink):
    model = tiny_model(sink)
    ids = noisy_ids(model)
    with torch.inference_mode(), trace(model) as recording:
        model(ids)
    received_LHK, visible_LK = (
        recording.received[0][0].numpy(),
        recording.visible_by_layer[0][0].numpy(),
    )
    place_S = np.full(12, COMMITTED)
    found_LS = sink_heads(received_LHK, place_S, visible_LK=visible_LK, rule=Excess(0.5))
    text_LHS = received_LHK[..., sink:]
    assert found_LS.tolist() == (text_LHS > 1 + 0.5 * 11 / 12).sum(1).tolist()
    assert found_LS.any()


def test_the_strongest_of_each_place_are_taken_head_by_head():
    received_LHK = np.array([[[9.0, 1, 2, 3, 4, 5], [9, 5, 4, 3, 2, 1]]])
    # the first key is an added sink; one position alone has nothing to be compared with
    place_S = np.array([PROMPT, PROMPT, FUTURE, FUTURE, BLOCK])
    assert sink_heads(received_LHK, place_S, rule=None).tolist() == [[1, 1, 1, 1, 0]]


def test_matches_are_alike_and_near():
    place_S = np.array([PROMPT] * 4 + [COMMITTED] * 5 + [FUTURE] * 3)
    token_S = np.array([7, 7, 8, 9, 4, 5, 4, 6, 5, 2, 2, 2])
    sink_S = np.isin(np.arange(12), [0, 5, 10])
    pairs = matched_pairs(sink_S, place_S, token_S, np.random.default_rng(0), 4).tolist()
    # the same token before the nearest: 8 is a 5 as 5 is, though 4 and 6 are nearer
    assert [0, 1] in pairs and [5, 8] in pairs
    assert [10, 9] in pairs or [10, 11] in pairs
    assert len(pairs) == 3


def test_nothing_is_matched_twice_nor_beyond_what_is_asked():
    place_S, token_S = np.full(8, FUTURE), np.full(8, 2)
    sink_S = np.arange(8) < 5
    pairs = matched_pairs(sink_S, place_S, token_S, np.random.default_rng(0), 8)
    # five sinks, three others
    assert sorted(pairs[:, 1].tolist()) == [5, 6, 7] and len(set(pairs[:, 0].tolist())) == 3
    assert len(matched_pairs(sink_S, place_S, token_S, np.random.default_rng(0), 2)) == 2
    assert matched_pairs(sink_S & False, place_S, token_S, np.random.default_rng(0), 2).shape == (
        0,
        2,
    )


def test_both_sides_of_a_sink_are_matched():
    place_S, token_S, sink_S = np.full(3, FUTURE), np.full(3, 2), np.array([False, True, False])
    matches = {
        int(matched_pairs(sink_S, place_S, token_S, np.random.default_rng(n), 1)[0, 1])
        for n in range(20)
    }
    assert matches == {0, 2}


def test_any_rule_chooses_sinks():
    received_LHK = np.array([[[9.0, 1, 2, 3, 4, 5], [0, 5, 4, 3, 2, 1]]])
    rule = chosen_rule("top:k=2", 3.0)
    assert sink_heads(received_LHK, np.zeros(5), rule=rule).tolist() == [[1, 1, 0, 0, 1]]
    assert (chosen_rule("excess", 5.0), chosen_rule("strongest", 3.0)) == (Excess(5.0), None)


def test_unknown_choices_are_refused():
    refused("top; did you mean 'strongest'", chosen_rule, "strong", 3.0)
    refused("epsilon must be at least 0", chosen_rule, "excess", -1.0)
    refused(r"3 positions .* keys, got 2", sink_heads, np.ones((1, 1, 2)), np.zeros(3))


def plain_ridge(x, y, fold, penalties):
    """Normal equations written out, fold by fold; the prediction and the penalty of the last
    fold.
    """

    def fit(rows, at, penalty):
        centred = x[rows] - x[rows].mean(0)
        gram = centred.T @ centred / rows.sum() + penalty * torch.eye(x.shape[1], dtype=x.dtype)
        weight = torch.linalg.solve(gram, centred.T @ (y[rows] - y[rows].mean(0)) / rows.sum())
        return y[rows].mean(0) + (x[at] - x[rows].mean(0)) @ weight

    predicted = torch.empty_like(y)
    for test in fold.unique():
        errors = []
        for penalty in penalties:
            error = 0.0
            for inner in fold.unique():
                if inner != test:
                    at = fold == inner
                    error += (fit((fold != test) & ~at, at, penalty) - y[at]).square().sum().item()
            errors.append(error)
        best = penalties[int(np.argmin(errors))]
        predicted[fold == test] = fit(fold != test, fold == test, best)
    return predicted, best


def test_ridge_is_the_plain_one_with_its_penalty_chosen_inside():
    x = probes.standardised(torch.randn(60, 5))
    text = torch.arange(60) % 12
    fold = probes.folds_of(text, 4)
    signal = x @ torch.randn(5, 2, dtype=torch.float64) + 0.3 * torch.randn(
        60, 2, dtype=torch.float64
    )
    noise = torch.randn(60, 1, dtype=torch.float64)
    held = probes.ridge(x, {"signal": signal, "noise": noise}, fold)
    chosen = []
    for name, y in (("signal", signal), ("noise", noise)):
        plain, best = plain_ridge(x, y, fold, probes.PENALTIES)
        assert torch.allclose(held[name].predicted_NC, plain, atol=1e-8)
        chosen.append(best)
    # each target has its own: noise is shrunk away
    assert chosen[0] < 1 < chosen[1]
    assert probes.explained(held["signal"], signal, text, 12).value() > 0.8
    assert probes.explained(held["noise"], noise, text, 12).value() < 0.1


def test_wide_targets_find_their_penalty_on_mixtures():
    x = probes.standardised(torch.randn(90, 6))
    fold = probes.folds_of(torch.arange(90) % 15, 3)
    wide = x @ torch.randn(6, 100, dtype=torch.float64) + 2 * torch.randn(
        90, 100, dtype=torch.float64
    )
    held = probes.ridge(x, {"wide": wide}, fold, penalties=(0.1, 1000.0))["wide"]
    # the choice is clear, and all columns are predicted
    assert torch.allclose(held.predicted_NC, plain_ridge(x, wide, fold, (0.1,))[0], atol=1e-8)


def test_folds_keep_a_text_together_and_are_even():
    text = torch.arange(10).repeat_interleave(7)
    fold = probes.folds_of(text, 5)
    assert all(len(fold[text == one].unique()) == 1 for one in range(10))
    assert fold.bincount().tolist() == [14] * 5
    refused("there are 5 folds and 4 texts", probes.folds_of, torch.arange(4), 5)
    refused("there are 2 folds and 4 texts", probes.folds_of, torch.arange(4), 2)


def test_what_is_learned_of_a_text_by_heart_does_not_count():
    """States say which text they are of, and the target is a number drawn per text: rows dealt
    apart would read it.
    """
    text = torch.arange(20).repeat_interleave(10)
    x = probes.standardised(nn.functional.one_hot(text).double() + 0.01 * torch.randn(200, 20))
    y = torch.randn(20, dtype=torch.float64)[text][:, None]
    for fold, is_fair in ((probes.folds_of(text, 5), True), (torch.arange(200) % 5, False)):
        value = probes.explained(probes.ridge(x, {"y": y}, fold)["y"], y, text, 20).value()
        assert value < 0.05 if is_fair else value > 0.9


def test_constant_states_tell_exactly_nothing():
    x = probes.standardised(torch.full((30, 4), 0.1))
    assert not x.any()
    text = torch.arange(30) % 6
    y = torch.randn(30, 1)
    hot = nn.functional.one_hot(torch.arange(30) % 2).double()
    held = probes.ridge(x, {"y": y, "hot": hot}, probes.folds_of(text, 3))
    assert probes.explained(held["y"], y, text, 6).value().item() == 0
    assert probes.skill(held["hot"], hot, text, 6).value().item() == 0


def test_skill_is_measured_from_the_most_frequent_answer():
    answer = torch.tensor([0] * 40 + [1] * 20)
    x = probes.standardised(answer[:, None] + 0.01 * torch.randn(60, 3))
    text, hot = torch.arange(60) % 10, nn.functional.one_hot(answer).double()
    fold = probes.folds_of(text, 5)
    held = probes.ridge(x, {"true": hot, "shuffled": probes.shuffled(hot, text)}, fold)
    assert probes.skill(held["true"], hot, text, 10).value() == 1
    assert probes.accuracy(held["true"], hot) == 1
    shuffled = probes.shuffled(hot, text)
    assert probes.accuracy(held["shuffled"], shuffled) == pytest.approx(2 / 3, abs=0.1)
    assert probes.skill(held["shuffled"], shuffled, text, 10).value() <= 0


def test_wide_states_keep_their_leading_directions():
    base = torch.randn(80, 3)
    wide = base @ torch.randn(3, 40) + 0.01 * torch.randn(80, 40)
    narrow = probes.standardised(wide, 3)
    assert narrow.shape == (80, 3)
    assert narrow.square().sum() > 0.99 * probes.standardised(wide).square().sum()
    state = torch.random.get_rng_state()
    assert torch.equal(probes.standardised(wide, 3), narrow)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_resampled_scores_are_those_of_the_texts_written_out():
    value, text = torch.randn(50), torch.arange(50) % 9
    value[3] = torch.nan
    score = probes.mean_score(value, text, 9)
    assert score.value().item() == pytest.approx(value.nanmean().item(), rel=1e-5)
    count = probes.resamples(9, 200)
    assert (count.sum(1) == 9).all()
    values = score.value(count)
    for draw in (0, 99):
        taken = torch.cat([value[text == one].repeat(int(count[draw, one])) for one in range(9)])
        assert values[draw].item() == pytest.approx(taken.nanmean().item(), rel=1e-5)
    low, high = probes.interval(score.value().item(), values, 9, fitted=False)
    assert low < value.nanmean() < high
    apart = values.quantile(torch.tensor([0.025, 0.975], dtype=values.dtype)) - score.value()
    # Student's t of 8 degrees of freedom is 1.18 times as wide as the normal distribution
    wider = 2.3060 / 1.9600 * math.sqrt(9 / 8)
    assert (low, high) == pytest.approx((score.value() + wider * apart).tolist(), rel=1e-3)
    assert all(map(math.isnan, probes.interval(0.5, values, 7, fitted=False)))
    assert all(map(math.isnan, probes.interval(math.nan, values, 9, fitted=False)))


def test_a_resample_chooses_its_penalty_anew():
    x, text = probes.standardised(torch.randn(60, 5)), torch.arange(60) % 12
    y = 0.4 * x[:, :1] + torch.randn(60, 1, dtype=torch.float64)
    fold = probes.folds_of(text, 4)
    score = probes.explained(probes.ridge(x, {"y": y}, fold)["y"], y, text, 12)
    count = probes.resamples(12, 50)
    values = score.value(count)
    number = {int(g): int(fold[text == g][0]) for g in text.unique()}
    for draw in (0, 30):
        top = 0.0
        for one in range(12):
            errors = (score.choice_FAG[number[one]] * count[draw]).sum(1)
            top += (count[draw, one] * score.top_AG[errors.argmin(), one]).item()
        expected = 1 - top / (count[draw] * score.bottom_G).sum().item()
        assert values[draw].item() == pytest.approx(expected)
    # what a fit was made of makes the interval wider
    plain, fitted = (
        probes.interval(score.value().item(), values, 12, fitted=how) for how in (False, True)
    )
    assert fitted[1] - fitted[0] == pytest.approx(probes.FITTED * (plain[1] - plain[0]))


def test_whole_texts_are_exchanged():
    text = torch.tensor([0] * 3 + [1] * 5 + [2] * 4)
    target = (10 * text + torch.arange(12))[:, None].repeat(1, 2)
    mixed = probes.shuffled(target, text)
    assert torch.equal(mixed[:, 0], mixed[:, 1])
    source = [mixed[text == one, 0] for one in range(3)]
    texts = [target[text == one, 0].tolist() for one in range(3)]
    for one, rows in enumerate(source):
        found = {next(other for other in range(3) if row in texts[other]) for row in rows.tolist()}
        assert len(found) == 1 and found != {one}
        whole = texts[found.pop()]
        first = whole.index(rows[0].item())
        assert rows.tolist() == [whole[(first + step) % len(whole)] for step in range(len(rows))]
    refused("there is only one", probes.shuffled, target, torch.zeros(12, dtype=torch.int64))


def test_probes_refuse_what_is_not_finite():
    fold = torch.arange(9) % 3
    refused(
        "got 3 folds, 1 states",
        probes.ridge,
        torch.tensor([[torch.nan]] + [[0.0]] * 8),
        {"y": torch.zeros(9, 1)},
        fold,
    )
    refused(
        "got 2 folds", probes.ridge, torch.zeros(9, 1), {"y": torch.zeros(9, 1)}, fold.clamp(max=1)
    )
