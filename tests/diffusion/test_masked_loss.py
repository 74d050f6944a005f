import math

import pytest
import torch

from refusals import refused
from sinklab.lab.data.noise import corrupt, masked_token_loss, sample_times
from tiny_diffusion import tiny_model

VOCAB, MASK = 13, 12


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("sampler", ["iid", "low_discrepancy"])
def test_a_uniform_model_costs_log_v_over_drawn_times(sampler):
    times = sample_times(2000, sampler=sampler, eps=0.01, generator=seeded())
    # the variance of (masked / t) over a row is (1 - t) / (t S), whose mean over t is about (log(1
    # / eps) - 1) / S
    spread = math.log(VOCAB) * ((math.log(100) - 1) / 100 / 2000) ** 0.5
    ids = torch.randint(0, MASK, (2000, 100), generator=seeded())
    _, masked = corrupt(ids, times, mask_id=MASK, generator=seeded(1))
    # of a model that finds all tokens equally likely
    loss = masked_token_loss(torch.zeros(int(masked.sum()), VOCAB), ids, masked, times)
    assert abs(loss - math.log(VOCAB)) < 4 * spread


def plain_loss(logits_BSV, ids_BS, masked_BS, t_B, maskable_BS):
    """Eq. 3-4 as a loop over all positions, from logits everywhere."""
    total, tokens, rows = 0.0, 0, []
    for b in range(ids_BS.shape[0]):
        row, row_tokens = 0.0, 0
        for i in range(ids_BS.shape[1]):
            row_tokens += int(maskable_BS[b, i])
            if masked_BS[b, i]:
                z = logits_BSV[b, i]
                row = row + (z.exp().sum().log() - z[ids_BS[b, i]]) / t_B[b]
        rows.append(row / row_tokens)
        total, tokens = total + row, tokens + row_tokens
    return total / tokens, rows


def batch():
    """Logits everywhere, and what else the loss is given."""
    ids = torch.randint(0, MASK, (3, 11))
    maskable = torch.ones_like(ids, dtype=torch.bool)
    maskable[0, :4] = maskable[2, -3:] = False
    times = torch.tensor([0.5, 0.9, 0.6], dtype=torch.float64)
    _, masked = corrupt(ids, times, mask_id=MASK, maskable_BS=maskable, generator=seeded(1))
    assert masked.any(1).all()
    given = {"ids_BS": ids, "masked_BS": masked, "t_B": times, "maskable_BS": maskable}
    return torch.randn(3, 11, VOCAB, dtype=torch.float64), given


def test_it_equals_the_plain_loop_and_its_gradients():
    logits, given = batch()
    masked, leaf, plain_leaf = (
        given["masked_BS"],
        *(logits.clone().requires_grad_() for _ in range(2)),
    )
    loss, (plain, _) = masked_token_loss(leaf[masked], **given), plain_loss(plain_leaf, **given)
    loss.backward(), plain.backward()
    grad, plain_grad = leaf.grad, plain_leaf.grad
    assert abs(loss - plain) < 1e-13
    assert (grad - plain_grad).abs().max() < 1e-14
    assert grad[masked].abs().max() > 1e-3
    assert grad[~masked].abs().max() == 0


def test_half_precision_logits_are_summed_in_float32():
    logits, given = batch()
    logits, given["t_B"] = logits.bfloat16(), given["t_B"].float()
    loss = masked_token_loss(logits[given["masked_BS"]], **given)
    exact, _ = plain_loss(logits.double(), **given)
    assert loss.dtype == torch.float32
    assert abs(loss - exact) < 1e-5


@pytest.mark.parametrize(
    "change, message",
    [
        ({"maskable_BS": torch.zeros(3, 11, dtype=torch.bool)}, "there is none to divide by"),
    ],
)
def test_it_refuses_what_does_not_fit(change, message):
    logits, given = batch()
    given["logits_MV"] = logits[given["masked_BS"]]
    refused(message, masked_token_loss, **{**given, **change})


@pytest.mark.parametrize("sink", [0, 1])
def test_a_training_step_applies_the_head_at_masks_alone(sink):
    model = tiny_model(sink).train()
    rows, masks = [], []
    model.lm_head.register_forward_pre_hook(lambda module, args: rows.append(args[0].shape))
    model.model.embed_tokens.register_forward_pre_hook(
        lambda module, args: masks.append(int((args[0] == model.config.mask_token_id).sum()))
    )
    ids = torch.randint(3, model.config.vocab_size, (4, 24))
    noisy, masked = corrupt(
        ids, torch.full((4,), 0.5), mask_id=model.config.mask_token_id, generator=seeded()
    )
    model(noisy, labels=ids.masked_fill(~masked, -100)).loss.backward()
    assert rows == [(masks[0], 32)]
    assert 0 < masks[0] < ids.numel()
    assert model.lm_head.weight.grad.abs().max() > 0
