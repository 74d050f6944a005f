"""The conformance suites of interventions and statistics, over every built-in and every example."""

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
import torch

from conformance.probing import check_intervention
from refusals import refused
from sinklab.core.attention.received import attention_statistics
from sinklab.core.instrument import BlockKeys, Edit, Selector, Statistic, call, trace
from sinklab.core.registry import interventions, removals, selectors, statistics
from sinklab.core.subject import Canvas
from sinklab.lab.checks import check_text
from tiny_diffusion import tiny_model

INTERVENTIONS = [
    "block_keys:keys=top:k=2",
    "block_keys:keys=sinks:rule=excess:epsilon=1.0,how=zero_value",
    "block_keys:keys=random:like=top:k=1,layers=1,when=kept,limit=3",
    "block_keys:keys=top:k=2,heads=0+3,when=clean",
    "block_keys:keys=top:k=1,queries=masked,when=clean",
    "block_keys:keys=top:k=2,how=shuffle_value",
    "block_keys:keys=top:k=2,how=weaken:beta=0.25,when=now",
    "block_keys:keys=top:k=1,how=share:to=0.001",
    "block_keys:keys=random:like=(sinks:rule=excess:epsilon=0.5,k=2),when=now",
    "block_keys:keys=(equal_mass:like=top:k=1,rule=excess:epsilon=0.9,arm=keys),when=now",
    "block_keys:keys=others:like=top:k=2,beyond=2,when=now",
    "block_keys:keys=positions:positions=1+4,when=now,steps=1+none",
    "lone_rows:rows=0+5,heads=1",
    "window_attention:radius=2,keep=0..2,heads=1",
    "clip_channel:channels=3+7,limit=0.1,layers=0",
    "amplify:positions=1+4,scale=3,mean=channels",
]


def built_in(registry):
    return {name for name, kind in registry.items() if kind.__module__.startswith("sinklab.")}


@pytest.mark.parametrize("text", INTERVENTIONS)
def test_a_built_in_intervention_conforms(text):
    check_intervention(text, tiny_model(2))


def test_every_built_in_intervention_is_checked():
    checked = {text.partition(":")[0] for text in INTERVENTIONS}
    # `patch` needs a file: tests/measures
    assert built_in(interventions) == checked | {"patch"}


def test_every_built_in_selector_and_removal_is_checked():
    texts = " ".join(INTERVENTIONS)
    assert all(f"keys={name}" in texts or f"({name}:" in texts for name in selectors)
    own = built_in(removals) - {"mask", "mean_value"}
    assert all(f"how={name}" in texts for name in own)


@pytest.mark.slow
def test_the_intervention_of_the_example_conforms(scratch):
    scratch(interventions, example="add_a_intervention")
    check_intervention("temper:temperature=3")


STATISTICS = [*sorted(built_in(statistics)), "drift:of=value", "given_by_state:rule=gu"]


def recorded(names, **how):
    """A recording of two steps of a padded batch."""
    model = tiny_model(2)
    prompts, mask_id = [[5, 6, 7], [8, 9, 10, 11, 12]], model.config.mask_token_id
    canvas = Canvas.from_prompts(prompts, new_tokens=11, mask_id=mask_id, pad_id=0)
    written_BS = canvas.ids_BS.clone()
    written_BS[:, -1] = 5
    with torch.no_grad():
        plain = model(canvas.ids_BS, canvas.attention_mask).logits
        with trace(model, names, canvas=canvas, **how) as recording:
            traced = model(canvas.ids_BS, canvas.attention_mask).logits
            model(written_BS, canvas.attention_mask)
    assert torch.equal(plain, traced), "a trace changes what the model gives"
    return recording


@pytest.fixture(scope="module")
def together():
    """All of them at once: as they are, in small chunks, and of some heads in another order."""
    found = {"whole": recorded(STATISTICS), "heads": recorded(STATISTICS, heads=(1, 0))}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(call, "attention_statistics", partial(attention_statistics, chunk=3))
        return found | {"chunks": recorded(STATISTICS)}


@pytest.mark.parametrize("text", STATISTICS)
def test_a_built_in_statistic_conforms(text, together):
    text = statistics.as_text(check_text(statistics, text))
    arrays = {how: one.array(text) for how, one in together.items()}
    whole, dims = arrays["whole"], together["whole"].dims(text)
    sizes = {"step": 2, "batch": 2, "layer": 2, "head": 4, "state": 3, "key": 18, "position": 16}
    assert all(size == sizes.get(axis, size) for axis, size in zip(dims, whole.shape, strict=True))
    # nothing comes before the first step
    assert np.isfinite(whole[text.startswith("drift") :]).all()
    alike = {"chunks": whole, "alone": whole}
    arrays["alone"] = recorded((text,)).array(text)
    if "head" in dims:
        alike["heads"] = whole.take([1, 0], dims.index("head"))
    for how, expected in alike.items():
        np.testing.assert_allclose(arrays[how], expected, 1e-4, 1e-5, err_msg=how)


@dataclass(frozen=True)
class Hot(Edit):
    """Flattens every attention row."""

    factor: float = 0.5

    def before(self, call):
        scale = call.q_BHQD.shape[-1] ** -0.5 if call.scale is None else call.scale
        return replace(call, scale=scale * self.factor)


@dataclass(frozen=True)
class Nothing(Selector):
    """Takes no key."""

    def select(self, call):
        return torch.zeros_like(call.scores_BHS, dtype=torch.bool)


@pytest.mark.parametrize(
    "select, message",
    [
        (lambda call: call.eligible_BHS[:, 0], "bool of shape"),
        (lambda call: call.scores_BHS, "bool .* float32"),
        (lambda call: call.eligible_BHS.repeat(1, 2, 1), "8, 16"),
        (lambda view: None, "NoneType"),
    ],
)
def test_a_selector_is_told_what_to_select(scratch, monkeypatch, select, message):
    scratch(selectors)
    monkeypatch.setattr(Nothing, "select", lambda self, view: select(view))
    selectors.register("nothing")(Nothing)
    refused(message, check_intervention, BlockKeys(Nothing(), when="now"), tiny_model())


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda call: call.q_BHQD.mul_(0.5) is None or call, "as it was"),
        (lambda call: replace(call, v_BKSD=call.v_BKSD[:, :, 1:]), "values after"),
    ],
)
def test_an_edit_is_told_what_to_return(scratch, monkeypatch, change, message):
    scratch(interventions)
    monkeypatch.setattr(Hot, "before", lambda self, call: change(call))
    interventions.register("hot")(Hot)
    refused(message, check_intervention, Hot(), tiny_model())


class Unfinished(Statistic):
    """Has another shape than it says."""

    axes = ("batch", "layer", "key")

    def measure(self, call):
        return call.received_BHS


def test_a_statistic_is_told_what_to_give(scratch):
    scratch(statistics)
    statistics.register("unfinished")(Unfinished)
    message = r"\(any, any\).*axes.*'batch', 'key'.* for each layer"
    refused(message, recorded, ("unfinished",))
