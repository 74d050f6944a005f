"""Training with the sinks in the sequence: the same model as with a prefix, and as the masked
form.
"""

import copy

import pytest
import torch
from test_diffusion_lm import (
    ATTENTION,
    FAMILIES,
    SeenMasks,
    TrueFloat64,
    assert_same_gradients,
    build,
    compare,
    gradients,
    ragged,
)

from sinklab.core.attention import watching
from tiny_models import checkpointed

pytestmark = pytest.mark.ring("extras")


def model_of(sink=("token", 2, "front"), **settings):
    model = build(sink, **settings).train()
    model.sink_form = "sequence"
    return model


def lengths(model, *args, **settings):
    """(queries, keys) of the attention calls of one evaluation."""
    with SeenMasks() as seen:
        model(*args, **settings)
    return {call[:2] for call in seen.calls}


@pytest.mark.parametrize("family", FAMILIES)
@ATTENTION
def test_every_backbone_with_a_gate(family, impl):
    ids, mask = ragged()
    compare(model_of(family=family, gate="elementwise", impl=impl), ids, mask, 1e-12)


@pytest.mark.parametrize("side", ["front", "end"])
@ATTENTION
def test_causal_and_visible_equal_the_prefix_form(impl, side):
    model = model_of(("token", 2, side), impl=impl)
    ids, mask = ragged()
    visible = torch.rand(3, 9, 9, generator=torch.Generator().manual_seed(4)) < 0.5
    for settings in (
        {"causal": True},
        {"causal": True, "attention_mask": mask},
        {"visible": visible},
        {"visible": visible[0], "attention_mask": mask, "causal": True},
    ):
        with TrueFloat64():
            inside, prefix = (model(ids, **settings).logits, model.eval()(ids, **settings).logits)
        model.train()
        real = (
            mask.bool() if "attention_mask" in settings else torch.ones_like(mask, dtype=torch.bool)
        )
        assert (inside - prefix)[real].abs().max() <= 1e-12 * prefix.abs().max()


def test_checkpointing_and_autocast_keep_it():
    for change, precision, tolerance in [
        (checkpointed, False, 1e-9),
        (lambda model: None, True, 2e-2),
    ]:
        plain = model_of(("zero", 2, "end"), dtype=torch.float32, std=0.1, gate="elementwise")
        changed = copy.deepcopy(plain)
        plain.sink_form = "prefix"
        change(changed)
        (ids, mask), losses = ragged(), []
        with torch.autocast("cpu", torch.bfloat16, enabled=precision):
            for model in (plain, changed):
                losses.append(model(ids, mask, labels=ids.where(mask.bool(), -100)).loss)
        expected, loss = losses
        assert abs(loss - expected) <= max(tolerance, 1e-6) * expected
        grads = gradients(plain, expected)
        assert grads["sink_embeddings"].abs().max() > 0
        assert_same_gradients(gradients(changed, loss), grads, max(tolerance, 1e-5))


def test_it_is_for_training_alone():
    model = model_of()
    ids, _ = ragged()
    apart = {(1, 1), (9, 11)}
    assert lengths(model, ids) == {(11, 11)}
    with torch.no_grad():
        assert lengths(model, ids) == apart
    with watching(model):
        assert lengths(model, ids) == apart
    assert lengths(model.eval(), ids) == apart
    model.train().sink_form = "auto"
    assert lengths(model, ids) == apart
    assert lengths(model_of(("none", 0, "front")), ids) == {(9, 9)}
