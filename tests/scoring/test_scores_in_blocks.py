"""Scores of models with attention in blocks: each block is judged behind the clean ones before
it.
"""

import numpy as np
import pytest
import torch

from likelihood_twin import exact
from sinklab.lab.measures import MaskSinks
from sinklab.lab.scoring.arms import arm_losses
from sinklab.lab.scoring.likelihood import score
from sinklab.lab.scoring.settings import LikelihoodSettings
from tiny_diffusion import tiny_loaded

CONTEXT, CONTINUATION = (7, 8, 9), (11, 12, 13, 14, 15)
IDS = torch.tensor(CONTEXT + CONTINUATION)


@pytest.mark.parametrize("length", [1, 2, 4])
def test_a_score_conditions_on_clean_blocks(length):
    loaded = tiny_loaded(block_length=length)
    model, mask_id = loaded.model.double(), loaded.model.config.mask_token_id
    (found,) = score(loaded, [(CONTEXT, CONTINUATION)], LikelihoodSettings(estimator="chain_rule"))
    expected = 0.0
    # each token from what stands before it alone: the rest of its block and all later ones are
    # masked
    for place in range(len(CONTEXT), len(IDS)):
        canvas_S = IDS.clone()
        canvas_S[place:] = mask_id
        logits_SV = model(canvas_S[None]).logits[0].double().log_softmax(-1)
        expected += logits_SV[place, IDS[place]].item()
    assert found.logprob == pytest.approx(expected, abs=1e-9)
    if length == 1:
        # then the exact likelihood is the chain rule in one pass
        noisy_1S = torch.full_like(IDS[None], mask_id)
        logits_SV = model(noisy_1S, clean=IDS[None]).logits[0].log_softmax(-1)
        at_once = logits_SV.gather(-1, IDS[:, None])[len(CONTEXT) :].sum().item()
        assert at_once == pytest.approx(expected, abs=1e-9)
        assert exact(loaded, CONTEXT, CONTINUATION) == pytest.approx(at_once, abs=1e-9)


def scored(loaded, ids_RS):
    """Losses (2, R) without edits, and with the strongest key blocked."""
    found = arm_losses(loaded, {0: [], 1: [MaskSinks(k=1)]}, ids_RS.tolist(), samples=4)
    loss = {(one.arm, one.text): one.loss for one in found if one.about["keys"] == one.arm}
    return np.array([[loss[arm, text] for text in range(len(ids_RS))] for arm in (0, 1)])


def test_the_heldout_loss_reads_clean_blocks_and_edits_reach_both_halves():
    loaded, full = tiny_loaded(block_length=64), tiny_loaded()
    full.model.load_state_dict(loaded.model.state_dict())
    ids_RS = torch.randint(5, 200, (4, 24), generator=torch.Generator().manual_seed(0))
    plain, masked = scored(loaded, ids_RS)
    same, _ = scored(full, ids_RS)
    np.testing.assert_allclose(plain, same, rtol=1e-5)
    short = tiny_loaded(block_length=4)
    short.model.load_state_dict(loaded.model.state_dict())
    in_blocks, hidden = scored(short, ids_RS)
    assert np.abs(in_blocks - plain).max() > 1e-3
    for before, after in [(plain, masked), (in_blocks, hidden)]:
        assert np.abs(after - before).max() > 1e-2
