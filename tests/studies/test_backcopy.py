"""Bigram-Backcopy: the source against enumeration, what is measured against plain computations, and
what may be said of it.
"""

import itertools
import math
import sys

import pandas as pd
import pytest
import torch

from launched import script

pytestmark = pytest.mark.ring("lab")

study = script("studies/backcopy")
Source, Rows = study.Source, study.Rows
SMALL = Source(3, tokens=4, triggers=1, concentration=0.7, length=6)


def all_rows(source):
    """Every row that the source can give, and its chance."""
    plain = source.tokens - source.triggers
    rows, chances = [], []
    for drawn in itertools.product(range(source.tokens), repeat=source.length - 1):
        chance = 1 / plain if drawn[0] >= source.triggers else 0.0
        for place in range(1, len(drawn)):
            if drawn[place - 1] < source.triggers:
                chance *= place > 1 and drawn[place] == drawn[place - 2]
            else:
                chance *= float(source.chances_XX[drawn[place - 1], drawn[place]])
        if chance:
            rows.append((source.tokens, *drawn))
            chances.append(chance)
    return torch.tensor(rows), torch.tensor(chances, dtype=torch.float64)


def test_rows_copy_behind_a_trigger_and_follow_the_matrix_elsewhere():
    source = Source(1)
    ids_BS = source.rows(4000, torch.Generator().manual_seed(0))
    assert (ids_BS[:, 0] == 32).all() and ids_BS[:, 1:].max() < 32 and ids_BS[:, 1].min() >= 4
    before, last, following = ids_BS[:, :-2], ids_BS[:, 1:-1], ids_BS[:, 2:]
    copied = last < 4
    assert 0.05 < copied.float().mean() < 0.3 and torch.equal(following[copied], before[copied])
    after = following[last == 9]
    shares = torch.bincount(after, minlength=32) / len(after)
    assert (shares - source.chances_XX[9]).abs().max() < 0.04
    assert torch.equal(
        source.rows(5, torch.Generator().manual_seed(7)),
        source.rows(5, torch.Generator().manual_seed(7)),
    )
    assert not torch.equal(Source(2).chances_XX, source.chances_XX)


def test_the_likelihood_is_that_of_enumeration():
    rows, chances = all_rows(SMALL)
    assert math.isclose(float(chances.sum()), 1, rel_tol=1e-12)
    assert torch.allclose(SMALL.nats(rows), -chances.log() / 5, rtol=1e-12)


@pytest.mark.slow
def test_the_posterior_is_that_of_enumeration_and_its_bound_is_the_entropy():
    rows, chances = all_rows(SMALL)
    bound = 0.0
    for masked in itertools.product((False, True), repeat=5):
        hidden = torch.tensor((False, *masked))
        count = int(hidden.sum())
        if not count:
            continue
        posterior = SMALL.posterior(rows.masked_fill(hidden, SMALL.tokens + 1))
        fits_RR = (rows[:, None, ~hidden] == rows[None, :, ~hidden]).all(-1).double() * chances
        fits_RR /= fits_RR.sum(1, keepdim=True)
        exact = fits_RR @ torch.nn.functional.one_hot(rows[:, hidden], 5).double().flatten(1)
        assert torch.allclose(
            posterior[:, hidden], exact.unflatten(1, (count, 5))[..., :4], atol=1e-12
        )
        # the chance of these masks at time t over t, averaged over t in (0, 1)
        weight = math.factorial(count - 1) * math.factorial(5 - count) / math.factorial(5)
        own = posterior[:, hidden].gather(2, rows[:, hidden, None])[..., 0]
        bound -= weight * float(chances @ own.log().sum(1)) / 5
    entropy = -float((chances * chances.log()).sum()) / 5
    assert math.isclose(bound, entropy, rel_tol=1e-10)


def rows_of(source, objective, count, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return Rows.of(source, source.rows(count, generator), objective != "causal", generator)


def scores_of(q, k, attn_mask=None, is_causal=False, scale=None, **rest):
    """Scores before the softmax, written out; −∞ where a query may not see a key."""
    scores = q @ k.mT * scale
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is None:
        return scores
    if attn_mask.dtype == torch.bool:
        return scores.masked_fill(~attn_mask, -torch.inf)
    return scores + attn_mask


@pytest.mark.slow
def test_what_is_measured_is_what_a_plain_computation_gives():
    source = Source(0)
    for objective, variant in (("causal", "logit"), ("diffusion", "sink"), ("diffusion", "plain")):
        model = study.trained(source, objective, variant, 1, 3)
        rows, causal = rows_of(source, objective, 16), objective == "causal"
        weights, norms = [], []
        own = torch.nn.functional.scaled_dot_product_attention

        def spy(q, k, v, weights=weights, norms=norms, own=own, **how):
            weights.append(scores_of(q, k, **how).softmax(-1))
            norms.append(v.norm(dim=-1).mean(1))
            return own(q, k, v, **how)

        with pytest.MonkeyPatch.context() as patch, torch.no_grad():
            patch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
            ids_BS = rows.ids_BS if causal else rows.canvas.ids_BS
            logits = model(ids_BS, causal=causal).logits
        with torch.no_grad():
            measured, facts = study.heads(model, rows), study.scored(model, source, rows)
        added, weights_BHQK, norm_BK = model.config.sink_count, weights[-1], norms[-1]
        masked_BS = torch.ones_like(ids_BS, dtype=torch.bool) if causal else rows.canvas.open_BS
        kept_B = masked_BS.sum(1) >= 8
        asked_BHQK = (weights_BHQK * masked_BS[:, None, :, None])[kept_B]
        queries = masked_BS[kept_B].sum()
        text_BS = masked_BS if causal else ~masked_BS
        norm = norm_BK[:, added].mean() / norm_BK[:, added + 1 :][text_BS[:, 1:]].mean()
        for head, found in enumerate(measured):
            sums_BK = asked_BHQK[:, head].sum(1)
            assert found["first"] == pytest.approx(
                float(sums_BK[:, added].sum() / queries), abs=1e-5
            )
            assert found["added"] == pytest.approx(
                float(sums_BK[:, :added].sum() / queries), abs=1e-5
            )
            strongest_B = sums_BK[:, added:].amax(1) / masked_BS[kept_B].sum(1)
            assert found["strongest"] == pytest.approx(float(strongest_B.mean()), abs=1e-5)
            assert found["gu"] == pytest.approx(float((strongest_B > 0.3).double().mean()))
            assert found["norm"] == pytest.approx(float(norm), rel=1e-4)
        if causal:
            own_B = (
                -logits[:, :-1].log_softmax(-1).gather(2, rows.ids_BS[:, 1:, None])[..., 0].mean(1)
            )
        else:
            costs = -logits.log_softmax(-1).gather(2, rows.ids_BS[..., None])[..., 0] * masked_BS
            own_B = costs.sum(1) / rows.t_B / 47
        assert facts["loss"] == pytest.approx(float(own_B.mean()), rel=1e-5)
        assert (
            facts["over"] == pytest.approx(facts["loss"] / facts["best"] - 1) and facts["over"] > 0
        )
        assert facts["hidden"] != facts["loss"]


@pytest.mark.slow
def test_the_smallest_run_measures_every_model_and_goes_on_where_it_stopped(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(study, "ARMS", [arm for arm in study.ARMS if arm[2] == 1])
    few = {part: (*one, kinds[:2]) for part, (*one, kinds) in study.PARTS.items()}
    monkeypatch.setattr(study, "PARTS", few)
    monkeypatch.setattr(sys, "argv", f"backcopy --smallest --out {tmp_path}".split())
    study.main()
    said = capsys.readouterr().out
    assert "parts-converted-plain-0" in said and "inconclusive: more than 5 % above" in said
    found = pd.read_json(tmp_path / "results.json", typ="series")
    kinds = {part: len(table["models"]) / 3 for part, table in found.items()}
    assert kinds == {part: len(one[2]) for part, one in study.PARTS.items()}
    assert len(found["masking"]["masking"]) == 2 * (len(study.ARMS) + 2)
    assert all((tmp_path / f"{name}.png").stat().st_size > 5000 for name in ("variants", "masking"))
    monkeypatch.setattr(study, "trained", None)
    study.main()
    assert capsys.readouterr().out in said


NOISE = (0.01, -0.01, 0.02, -0.02, 0.0, 0.0)


def made_up(over=(0.01, 0.04), first=(0.8, 0.02), untrained=(0.1, 0.03), seeds=6):
    """Models by state and kind, one a seed, with these numbers."""
    firsts = {"trained": first, "fresh": untrained, "permuted": untrained}
    kinds = {}
    for (state, both), (number, kind) in itertools.product(
        firsts.items(), enumerate((study.CAUSAL, study.DIFFUSION))
    ):
        lines = {"over": over[number], "first": both[number], "shared": 0.0, "strongest": 0.0}
        models = pd.DataFrame(lines, index=range(seeds))
        if state == "trained":
            models["first"] += [(1 - 2 * number) * one for one in NOISE[:seeds]]
        kinds[state, *kind] = models
    return kinds


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, "less"),
        ({"over": (0.01, 0.06)}, "inconclusive: more than 5 %"),
        ({"first": (0.2, 0.02)}, "inconclusive: causal models without"),
        ({"seeds": 5}, "inconclusive"),
        ({"first": (0.8, 0.8), "untrained": (0.1, 0.1)}, "inconclusive"),
        ({"untrained": (0.8, 0.02)}, "no finding: untrained models show it"),
        ({"untrained": (0.9, 0.02)}, "no finding: untrained models show it"),
    ],
)
def test_a_contrast_is_drawn_where_it_may_be(changes, verdict):
    given = {"first": (0.8, 0.02), "untrained": (0.1, 0.03), "seeds": 6} | changes
    (line,) = study.contrasts(made_up(**given)).to_dict("records")
    first, untrained, seeds = given["first"], given["untrained"], given["seeds"]
    assert (line["of"], line["less"]) == ("diffusion plain", "causal plain")
    assert line["verdict"].startswith(verdict)
    assert line["mean"] == pytest.approx(first[1] - first[0] - 2 * sum(NOISE[:seeds]) / seeds)
    assert line["fresh"] == pytest.approx(untrained[1] - untrained[0])


@pytest.mark.parametrize(
    ("doses", "equal", "mean"),
    # at half of the attention the one pays 0.3, the other 0.42
    [((0.5, 0.9), "less", -0.12), ((0.7, 0.9), "inconclusive: 6 seeds without a dose", math.nan)],
)
def test_costs_are_compared_at_equal_count_and_inside_the_doses_that_both_have(doses, equal, mean):
    told = {"causal": ((0.3, 0.6), doses), "diffusion": ((0.1, 0.5), (0.1, 0.6))}
    cells = []
    for (seed, noise), (objective, (costs, removed)) in itertools.product(
        enumerate(NOISE), told.items()
    ):
        fixed = {"seed": seed, "objective": objective, "task": "rows", "protocol": "clean"}
        cells.append(fixed | {"k": 0, "control": "none", "loss": 2.0, "removed": math.nan})
        for k, cost, dose in zip((1, 2), costs, removed, strict=True):
            loss = 2 + cost + noise * (k == 1)
            cells.append(fixed | {"k": k, "control": "sinks", "loss": loss, "removed": dose})
    count, dosed = study.costs(pd.DataFrame(cells), made_up()).to_dict("records")
    assert count["verdict"] == "more" and count["mean"] == pytest.approx(0.2)
    assert dosed["verdict"].startswith(equal)
    assert dosed["mean"] == pytest.approx(mean, abs=1e-9, nan_ok=True)
