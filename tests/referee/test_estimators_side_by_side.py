"""Which estimator bounds which, on models small enough to enumerate."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import scipy
import torch
from transformers import LlamaConfig

from likelihood_twin import log_probabilities
from refusals import refused
from sinklab.core.models.config import DiffusionLMConfig
from sinklab.core.models.diffusion_lm import DiffusionLM
from sinklab.core.sampling.canvas import Canvas
from sinklab.core.sampling.settings import DecodingSettings
from sinklab.extras.referee.estimators import conditionals, in_order, over_orders
from sinklab.lab.checkpoints.loading import load
from sinklab.lab.scoring.likelihood import LikelihoodSettings, exact, score

VOCABULARY = 5


@pytest.fixture(scope="module")
def small():
    """Four tokens and [MASK]."""
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config = LlamaConfig(
        vocab_size=VOCABULARY, max_position_embeddings=32, initializer_range=0.6, **sizes
    )
    torch.manual_seed(3)
    model = DiffusionLM(DiffusionLMConfig(config, mask_token_id=2)).eval()
    return replace(load("tiny"), model=model, tokenizer=None, name="small")


TOKENS = [0, 1, 3, 4]
CONTEXT = [1, 4]


def test_the_table_is_the_slow_way_mask_by_mask(small):
    text = [3, 0, 4]
    table_ML = conditionals(small, CONTEXT, text, never_mask=False)
    for mask in range(1, 8):
        masked = [bool(mask >> place & 1) for place in range(3)]
        expected_L = log_probabilities(small, CONTEXT, text, masked).numpy()
        assert np.allclose(table_ML[mask][masked], expected_L[masked], atol=1e-5)
        assert np.isnan(table_ML[mask][~np.array(masked)]).all()


def test_the_mean_over_orders_is_that_over_all_permutations(small):
    table_ML = conditionals(small, CONTEXT, [0, 3, 3, 1])
    found = [in_order(table_ML, order) for order in itertools.permutations(range(4))]
    assert over_orders(table_ML) == pytest.approx(math.log(np.mean(np.exp(found))))
    assert over_orders(table_ML, "nelbo") == pytest.approx(np.mean(found))
    assert over_orders(table_ML, "best") == pytest.approx(max(found))
    assert over_orders(table_ML, "worst") == pytest.approx(min(found))


def test_the_bound_and_the_chain_rule_are_those_of_scores(small):
    text = [0, 3, 1, 1, 4]
    table_ML = conditionals(small, CONTEXT, text, never_mask=False)
    assert over_orders(table_ML, "nelbo") == pytest.approx(exact(small, CONTEXT, text), abs=1e-5)
    (chain,) = score(small, [(CONTEXT, text)], LikelihoodSettings(estimator="chain_rule"))
    assert in_order(table_ML, range(5)) == pytest.approx(chain.logprob, abs=1e-5)


def test_which_bounds_which(small):
    """The bound lies below the exact number for every text; a fixed order on either side of
    both.
    """
    above, below = 0, 0
    for text in itertools.product(TOKENS, repeat=3):
        table_ML = conditionals(small, CONTEXT, text)
        worst, nelbo, whole, best = (
            over_orders(table_ML, of) for of in ("worst", "nelbo", "exact", "best")
        )
        assert worst - 1e-9 <= nelbo <= whole + 1e-9 and whole <= best + 1e-9
        for steps in (1, 2):
            assert (
                over_orders(table_ML, "nelbo", steps)
                <= over_orders(table_ML, "exact", steps) + 1e-9
            )
        chain = in_order(table_ML, range(3))
        above, below = above + (chain > whole + 1e-6), below + (chain < nelbo - 1e-6)
    assert above > 5 and below > 5


@pytest.mark.parametrize("steps", [None, 1, 2, 3])
def test_samplers_have_a_distribution_and_the_bound_has_less(small, steps):
    tables = [conditionals(small, CONTEXT, text) for text in itertools.product(TOKENS, repeat=3)]
    assert sum(
        math.exp(over_orders(table_ML, "exact", steps)) for table_ML in tables
    ) == pytest.approx(1, abs=1e-5)
    if steps != 1:
        assert (
            sum(math.exp(over_orders(table_ML, "nelbo", steps)) for table_ML in tables) < 1 - 1e-4
        )
        assert sum(math.exp(over_orders(table_ML, "best", steps)) for table_ML in tables) > 1 + 1e-4
    chain = sum(math.exp(in_order(table_ML, (2, 0, 1))) for table_ML in tables)
    assert chain == pytest.approx(1, abs=1e-5)


def test_conditionals_of_one_distribution_agree_in_every_order():
    """Then exact, bound and any order are one number; fewer steps lose, on average over its own
    texts.
    """
    joint = np.random.default_rng(0).dirichlet(np.full(8, 0.3)).reshape(2, 2, 2)
    gained = {1: 0.0, 2: 0.0}
    for text in itertools.product(range(2), repeat=3):
        table_ML = np.full((8, 3), np.nan)
        for mask, place in itertools.product(range(1, 8), range(3)):
            if mask >> place & 1:
                seen = tuple(
                    slice(None) if mask >> other & 1 else text[other] for other in range(3)
                )
                summed = joint[seen]
                own = [other for other in range(3) if mask >> other & 1].index(place)
                marginal = summed.sum(tuple(axis for axis in range(summed.ndim) if axis != own))
                table_ML[mask, place] = math.log(marginal[text[place]] / marginal.sum())
        whole = math.log(joint[text])
        for of in ("exact", "nelbo", "best", "worst"):
            assert over_orders(table_ML, of) == pytest.approx(whole)
        for steps in gained:
            gained[steps] += joint[text] * (over_orders(table_ML, "exact", steps) - whole)
    assert gained[1] < gained[2] < 0


@pytest.mark.parametrize("steps", [1, 2])
def test_the_exact_number_is_how_often_the_decoder_writes_a_text(small, steps):
    """Thousands of texts of the decoder itself, against the likelihoods: a chi-square test at 0.1
    %.
    """
    rows = 6000
    canvas = Canvas.from_prompts([CONTEXT] * rows, new_tokens=2, mask_id=2)
    how = DecodingSettings(rule="random", temperature=1.0, steps=steps, seed=1)
    for step in small.model.denoise(canvas, how):
        written = step.ids_BS[:, 2:].tolist()
    texts = [*itertools.product(TOKENS, repeat=2)]
    counts = [sum(one == [*text] for one in written) for text in texts]
    chances = [
        math.exp(over_orders(conditionals(small, CONTEXT, text), "exact", steps)) for text in texts
    ]
    assert sum(counts) == rows
    expected = rows * np.array(chances) / sum(chances)
    assert scipy.stats.chisquare(counts, expected).pvalue > 1e-3
    wrong = rows * np.array(
        [math.exp(in_order(conditionals(small, CONTEXT, text), (0, 1))) for text in texts]
    )
    assert scipy.stats.chisquare(counts, wrong / wrong.sum() * rows).pvalue < 1e-6


def test_what_cannot_be_enumerated_is_refused(small):
    refused("at most 12 tokens", conditionals, small, CONTEXT, [0] * 13)
    refused("autoregressive", conditionals, load("tiny-causal"), CONTEXT, [5])
    table_ML = conditionals(small, CONTEXT, [0, 1])
    refused("1 to 2", over_orders, table_ML, steps=3)
    refused("each of 2 tokens once", in_order, table_ML, (0, 0))
