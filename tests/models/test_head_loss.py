"""The loss that never has all logits: against whole logits and F.cross_entropy."""

import pytest
import torch
from test_diffusion_lm import (
    MASK,
    VOCAB,
    assert_same_gradients,
    backbone,
    build,
    gradients,
    ragged,
)
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from refusals import refused
from sinklab.core.subject import DiffusionLM, DiffusionLMConfig
from tiny_models import checkpointed

# B batch, S sequence, M asked positions, V vocabulary


def question(highest=MASK, **changes):
    """Ids, their padding, labels and weights; padding and some of the text are not asked."""
    ids, mask = ragged()
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(0, highest, ids.shape, generator=generator)
    labels[(torch.rand(ids.shape, generator=generator) > 0.6) | (mask == 0)] = -100
    weights = torch.rand(ids.shape, generator=generator) + 0.1
    given = {"input_ids": ids, "attention_mask": mask, "labels": labels, "label_weights": weights}
    return given | changes


def whole(model, labels, label_weights, **given):
    """The same with every logit there is."""
    logits = model(**given).logits
    asked = labels != -100
    exact = torch.promote_types(logits.dtype, torch.float32)
    losses = F.cross_entropy(logits[asked].to(exact), labels[asked], reduction="none")
    return (losses * label_weights[asked]).sum()


def same(model, tolerance, *, chunk=4, scale=1.0, highest=MASK):
    given = question(highest)
    slow = whole(model, **given)
    slow_grads = gradients(model, slow * scale)
    out = model(**given, head_chunk=chunk)
    assert out.logits is None
    assert out.loss.dtype == (torch.float64 if model.dtype == torch.float64 else torch.float32)
    fast_grads = gradients(model, out.loss * scale)
    assert abs(out.loss - slow) <= tolerance * slow.abs()
    assert_same_gradients(fast_grads, slow_grads, tolerance)
    return fast_grads


@pytest.mark.parametrize("chunk", [4, 1000])
@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_loss_and_gradients_equal_those_of_whole_logits(chunk, shift, tied):
    torch.manual_seed(0)
    config = DiffusionLMConfig(
        backbone(tie_word_embeddings=tied),
        sink_kind="token",
        sink_count=1,
        logit_shift=shift,
        mask_token_id=MASK,
    )
    model = DiffusionLM(config).double()
    grads = same(model, 1e-12, chunk=chunk, scale=0.25)
    assert grads["sink_embeddings"].abs().max() > 0
    assert ("lm_head.weight" in grads) != tied


def test_float32_and_bfloat16():
    same(build(dtype=torch.float32, std=0.1), 2e-6)
    same(build(dtype=torch.bfloat16, std=0.1), 3e-2)
    # it multiplies in bfloat16 and sums in float32
    with torch.autocast("cpu", torch.bfloat16):
        same(build(dtype=torch.float32, std=0.1), 2e-2)


def test_a_head_with_fewer_rows_than_ids():
    model = build(output_vocab_size=VOCAB - 7)
    assert model.lm_head.out_features == VOCAB - 7
    same(model, 1e-12, highest=VOCAB - 7)
    given = question()
    given["labels"][0, 0] = MASK
    refused(rf"0…{VOCAB - 8}\), or -100 .*one is {MASK}", model, **given)


def test_weights_are_one_when_left_out_and_no_question_costs_nothing():
    model = build()
    left_out, ones = (
        model(**question(label_weights=weights)) for weights in (None, torch.ones(3, 9))
    )
    assert torch.equal(left_out.loss, ones.loss)
    none = torch.full((3, 9), -100)
    one = none.clone()
    one[0, 0] = 5
    assert model(**question(labels=one)).loss > 0
    nothing = model(**question(labels=none))
    grads = gradients(model, nothing.loss)
    assert nothing.loss == 0
    assert grads.keys() == dict(model.named_parameters()).keys()
    assert all((grad == 0).all() for grad in grads.values())


def test_without_gradients_and_with_a_frozen_head():
    model = build()
    expected = whole(model, **question())
    with torch.no_grad():
        loss = model(**question(), head_chunk=3).loss
    assert not loss.requires_grad
    assert abs(loss - expected) < 1e-10 * expected
    model.lm_head.requires_grad_(False)
    same(model, 1e-12)
    for parameter in model.model.parameters():
        parameter.requires_grad_(False)
    model.lm_head.requires_grad_(True)
    assert same(model, 1e-12).keys() == {"lm_head.weight"}


def test_gradients_add_up_over_batches_and_survive_checkpointing():
    model = build(("token", 2, "front"), gate="elementwise").train()
    once = gradients(model, model(**question()).loss)
    checkpointed(model)
    model.zero_grad()
    for _ in range(2):
        model(**question(), head_chunk=5).loss.backward()
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, 2 * once[name], rtol=1e-10, atol=1e-13), name


class LargestLogits(TorchFunctionMode):
    """Rows of the largest tensor as wide as the vocabulary that a function returned."""

    rows = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.ndim > 1 and out.shape[-1] == VOCAB:
            self.rows = max(self.rows, out.numel() // VOCAB)
        return out


def test_no_more_logits_than_a_chunk_exist():
    model = build()
    seen = LargestLogits()
    with seen:
        model(*ragged())
    assert seen.rows == 27
    seen.rows = 0
    with seen:
        model(**question(), head_chunk=4).loss.backward()
    assert seen.rows == 4


@pytest.mark.parametrize(
    "change, message",
    [
        ({"labels": None}, "labels are missing"),
        (
            {"labels": torch.zeros(3, 8, dtype=torch.long)},
            r"int64 of shape \(3, 9\), .* as input_ids",
        ),
        ({"label_weights": torch.zeros(3, 8)}, "float of shape .* as labels"),
        ({"head_chunk": 0}, "at least 1"),
        ({"logits_to_keep": torch.ones(3, 9, dtype=torch.bool)}, "not both"),
        ({"labels": torch.full((3, 9), VOCAB)}, f"but one is {VOCAB}"),
        ({"labels": torch.full((3, 9), -1)}, "but one is -1"),
    ],
)
def test_bad_questions_are_refused(change, message):
    refused(message, build(dtype=torch.float32), **question(**change))
