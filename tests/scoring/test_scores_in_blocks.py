"""Scores of models with attention in blocks: each block is judged behind the clean ones before
it.
"""

import pytest
import torch

from sinklab.lab.measures import MaskSinks
from sinklab.lab.scoring.heldout import edited_losses
from sinklab.lab.scoring.likelihood import exact, score
from sinklab.lab.scoring.settings import LikelihoodSettings
from tiny_diffusion import tiny_loaded

CONTEXT, CONTINUATION = (7, 8, 9), (11, 12, 13, 14, 15)


def log_probabilities(model, clean_1S, noisy_1S):
    logits_1SV = model(noisy_1S, clean=clean_1S).logits.double()
    return logits_1SV.log_softmax(-1).gather(-1, clean_1S[..., None])[0, :, 0]


def one_block_at_a_time(loaded, length, masked_L):
    """log p of the masked tokens, from canvases in which later blocks are all [MASK]."""
    model, mask_id = loaded.model, loaded.model.config.mask_token_id
    ids_S, begin = torch.tensor(CONTEXT + CONTINUATION), len(CONTEXT)
    total = 0.0
    for start in range(0, len(ids_S), length):
        canvas_S = torch.full_like(ids_S, mask_id)
        canvas_S[: start + length] = ids_S[: start + length]
        hidden_S = torch.zeros(len(ids_S), dtype=torch.bool)
        hidden_S[begin:] = masked_L
        hidden_S[:start] = hidden_S[start + length :] = False
        canvas_S[hidden_S] = mask_id
        logits_SV = model(canvas_S[None]).logits[0].double().log_softmax(-1)
        total += logits_SV.gather(-1, ids_S[:, None])[hidden_S].sum().item()
    return total


def test_with_blocks_of_one_the_exact_likelihood_is_the_chain_rule_in_one_pass():
    loaded = tiny_loaded(block_length=1)
    loaded.model.double()
    ids_1S = torch.tensor([CONTEXT + CONTINUATION])
    noisy_1S = torch.full_like(ids_1S, loaded.model.config.mask_token_id)
    at_once = log_probabilities(loaded.model, ids_1S, noisy_1S)[len(CONTEXT) :].sum().item()
    (chain,) = score(loaded, [(CONTEXT, CONTINUATION)], LikelihoodSettings(estimator="chain_rule"))
    assert chain.logprob == pytest.approx(at_once, abs=1e-9)
    assert exact(loaded, CONTEXT, CONTINUATION) == pytest.approx(at_once, abs=1e-9)
    # the same model as a causal one would be asked: each token from what stands before it alone
    assert one_block_at_a_time(loaded, 1, torch.ones(5, dtype=torch.bool)) == pytest.approx(
        at_once, abs=1e-9
    )


@pytest.mark.parametrize("length", [2, 4])
def test_a_score_conditions_on_clean_blocks(length):
    loaded = tiny_loaded(block_length=length)
    loaded.model.double()
    (found,) = score(loaded, [(CONTEXT, CONTINUATION)], LikelihoodSettings(estimator="chain_rule"))
    expected = 0.0
    for place in range(len(CONTINUATION)):
        masked_L = torch.arange(len(CONTINUATION)) >= place
        ids_S, begin = torch.tensor(CONTEXT + CONTINUATION), len(CONTEXT)
        block = (begin + place) // length
        canvas_S = ids_S.clone()
        canvas_S[begin:][masked_L] = loaded.model.config.mask_token_id
        canvas_S[(block + 1) * length :] = loaded.model.config.mask_token_id
        logits_SV = loaded.model(canvas_S[None]).logits[0].double().log_softmax(-1)
        expected += logits_SV[begin + place, CONTINUATION[place]].item()
    assert found.logprob == pytest.approx(expected, abs=1e-9)


def test_the_heldout_loss_reads_clean_blocks_and_edits_reach_both_halves():
    loaded, full = tiny_loaded(block_length=64), tiny_loaded()
    full.model.load_state_dict(loaded.model.state_dict())
    ids_RS = torch.randint(5, 200, (4, 24), generator=torch.Generator().manual_seed(0))
    plain, masked = edited_losses(loaded, ids_RS, [[], [MaskSinks(k=1)]])
    same, _ = edited_losses(full, ids_RS, [[], []])
    torch.testing.assert_close(plain.losses_R, same.losses_R)
    short = tiny_loaded(block_length=4)
    short.model.load_state_dict(loaded.model.state_dict())
    in_blocks, hidden = edited_losses(short, ids_RS, [[], [MaskSinks(k=1)]])
    assert (in_blocks.losses_R - plain.losses_R).abs().min() > 1e-3
    for before, after in [(plain, masked), (in_blocks, hidden)]:
        assert (after.losses_R - before.losses_R).abs().max() > 1e-2
        assert after.dose.keys == pytest.approx(1)
