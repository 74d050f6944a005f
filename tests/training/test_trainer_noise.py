"""Noise by row: what a row is masked with does not depend on ranks, micro-batches or history."""

import pytest
import torch
from transformers import TrainingArguments

from sinklab.lab.data import Rows
from sinklab.lab.data.noise import corrupt, masked_token_loss
from sinklab.lab.training import DiffusionTrainer
from sinklab.lab.training.trainer import (
    NEVER,
    NoisyCollator,
    Objective,
    row_masks,
    row_times,
)
from tiny_diffusion import tiny_model

ROWS = torch.arange(24)


def ids(rows=24, length=16):
    return torch.randint(3, 280, (rows, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("sampler", ["iid", "low_discrepancy"])
def test_the_noise_of_a_row_is_its_own_however_rows_are_drawn(sampler):
    t = row_times(3, ROWS, 8, sampler)
    masks = row_masks(3, ROWS, t.expand(-1, 16))
    torch.rand(5)
    backwards = ROWS.flip(0)
    assert torch.equal(row_times(3, backwards, 8, sampler), t.flip(0))
    assert torch.equal(row_masks(3, backwards, t.flip(0).expand(-1, 16)), masks.flip(0))
    assert all(
        torch.equal(row_times(3, ROWS[n : n + 1], 8, sampler), t[n : n + 1]) for n in range(24)
    )
    other = row_times(4, ROWS, 8, sampler)
    assert not torch.isclose(other, t).any(), "another seed, other times"
    assert len(t.unique()) == len(row_masks(3, ROWS, torch.full((24, 16), 0.5)).unique(dim=0)) == 24
    assert t.min() > 0
    assert t.max() <= 1


def test_masks_are_those_of_corrupt_and_stay_out_of_prompts():
    batch = {"input_ids": ids(), "row": ROWS, "maskable": ids() % 2 == 0}
    rows = [{name: part[n] for name, part in batch.items()} for n in range(24)]
    noisy = NoisyCollator(3, 8, "iid")(rows)
    free = row_masks(3, ROWS, noisy["t"])
    assert torch.equal(noisy["masked"], free & batch["maskable"])
    assert (free & ~batch["maskable"]).any()
    # the same draw as corrupt makes of it with this row's generator
    from sinklab.lab.data.rows import place_generator

    _, masked = corrupt(
        ids()[5:6], noisy["t"][5:6, 0], mask_id=2, generator=place_generator(3, 1, 5)
    )
    assert torch.equal(masked[0], free[5])


def test_rows_of_causal_steps_get_no_noise():
    collator = NoisyCollator(0, 4, "iid", clean_steps=2)
    rows = [{"input_ids": ids()[n], "row": torch.tensor(n)} for n in range(24)]
    assert "masked" not in collator(rows[4:8])
    assert "masked" in collator(rows[8:12])


def trainer_of(model, causal_steps=0, together=2):
    arguments = TrainingArguments("out", use_cpu=True, report_to="none")
    shifted = model.config.logit_shift
    objective = Objective(causal_steps, model.config.mask_token_id, shifted)
    return DiffusionTrainer(
        model=model, args=arguments, objective=objective, heldout=Rows(ids(7)), together=together
    )


def step_loss(trainer, batches, step=0):
    """The loss of one optimizer step in these micro-batches, as the Trainer adds it up; gradients
    are on the model.
    """
    trainer.state.global_step = step
    samples, _ = trainer.get_batch_samples(iter(batches), len(batches), "cpu")
    trainer.current_gradient_accumulation_steps = len(samples)
    trainer.model.zero_grad()
    total = torch.zeros(())
    for sample in samples:
        loss = trainer.compute_loss(trainer.model, sample) / len(samples)
        loss.backward()
        total += loss.detach()
    return total


def gradients(model):
    return {
        name: weight.grad.clone()
        for name, weight in model.named_parameters()
        if weight.grad is not None
    }


@pytest.mark.parametrize("maskable", [False, True])
def test_micro_batches_change_neither_loss_nor_gradient(maskable):
    model = tiny_model(1).double().train()
    trainer = trainer_of(model)
    columns = {"input_ids": ids(8), "row": torch.arange(8)}
    if maskable:
        columns["maskable"] = torch.arange(16) >= torch.arange(8)[:, None]
    rows = [{name: part[n] for name, part in columns.items()} for n in range(8)]
    collator = NoisyCollator(0, 8, "low_discrepancy")
    whole = step_loss(trainer, [collator(rows)])
    expected = gradients(model)
    split = step_loss(
        trainer, [collator(rows[:2]), collator(rows[2:4]), collator(rows[4:6]), collator(rows[6:])]
    )
    assert torch.allclose(whole, split, rtol=1e-6)
    found = gradients(model)
    assert expected.keys() == found.keys()
    assert all(
        torch.allclose(expected[name], found[name], rtol=1e-5, atol=1e-7) for name in expected
    )

    batch = collator(rows)
    noisy = batch["input_ids"].masked_fill(batch["masked"], model.config.mask_token_id)
    plain = masked_token_loss(
        model(noisy, logits_to_keep=batch["masked"]).logits,
        batch["input_ids"],
        batch["masked"],
        batch["t"],
        maskable_BS=batch.get("maskable"),
    )
    assert torch.allclose(plain.float(), whole.float(), rtol=1e-5), (
        "Eq. 3–4, a mean over maskable tokens"
    )


def test_held_out_noise_is_fixed_by_row_and_batches_do_not_matter():
    model = tiny_model(1).eval()
    measured = [trainer_of(model, together=together).heldout_losses() for together in (1, 2, 7, 16)]
    torch.rand(3)
    assert all(torch.allclose(one["losses"], measured[0]["losses"], rtol=1e-5) for one in measured)
    assert measured[0]["tokens"].tolist() == [16] * 7
    assert measured[0]["loss"] == pytest.approx(measured[0]["losses"].mean().item())

    batch = trainer_of(model)._measured
    noisy = batch["input_ids"].masked_fill(batch["masked"], model.config.mask_token_id)
    for row, loss in enumerate(measured[0]["losses"].tolist()):
        one = slice(row, row + 1)
        logits = model(noisy[one], logits_to_keep=batch["masked"][one]).logits
        where = (batch["input_ids"][one], batch["masked"][one], batch["t"][one])
        assert masked_token_loss(logits, *where).item() == pytest.approx(loss, rel=1e-5)

    causal = trainer_of(model, NEVER, together=3).heldout_losses()
    logits = model(ids(7), causal=True).logits[:, :-1].flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, ids(7)[:, 1:].flatten())
    assert causal["loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert causal["tokens"].tolist() == [15] * 7


def test_weight_decay_leaves_sinks_norms_and_biases_alone():
    model = tiny_model(2, gate="elementwise", gate_bias=4.0)
    decaying = set(trainer_of(model).get_decay_parameter_names(model))
    names = {name for name, _ in model.named_parameters()}
    spared = names - decaying
    assert "sink_embeddings" in spared
    assert "gates.0.bias" in spared
    assert "gates.0.weight" in decaying
    assert "model.layers.0.mlp.up_proj.weight" in decaying
    assert all("norm" in name or "bias" in name or "sink" in name for name in spared)
