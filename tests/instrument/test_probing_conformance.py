"""The conformance suites of interventions and statistics, over every built-in and every example."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch.testing import assert_close

from conformance.probing import check_intervention, check_statistic
from refusals import refused
from sinklab.core.instrument import BlockKeys, Edit, Selector, Statistic, trace
from sinklab.core.registry import interventions, removals, selectors, statistics
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


def test_the_intervention_of_the_example_conforms(scratch):
    scratch(interventions, example="add_a_intervention")
    check_intervention("temper:temperature=3")


def test_the_selector_of_the_example_conforms(scratch):
    scratch(selectors, example="add_a_selector")
    keys = "(shared_sinks:share=0.25,rule=excess:epsilon=0.5)"
    check_intervention(f"block_keys:keys={keys},when=kept,limit=9", tiny_model())


@pytest.mark.parametrize("name", sorted(built_in(statistics)))
def test_a_built_in_statistic_conforms(name):
    check_statistic(name, tiny_model(2))


def test_the_statistic_of_the_example_conforms(scratch):
    scratch(statistics, example="add_a_statistic")
    check_statistic("largest_share", tiny_model())


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
    refused(message, check_statistic, "unfinished", tiny_model())


def test_what_a_statistic_reads_unnamed_is_computed_when_it_asks(scratch):
    scratch(statistics)

    @statistics.register("unnamed", axes="head key")
    def unnamed(call):
        return call.received_BHS

    model, ids = tiny_model(), torch.arange(8)[None] + 30
    with trace(model, ("received", "unnamed"), heads=(1, 0)) as both:
        model(ids)
    with trace(model, ("unnamed",), heads=(1, 0)) as alone:
        model(ids)
    assert torch.equal(both.values("unnamed")[0], both.received[0])
    assert_close(alone.values("unnamed")[0], both.received[0])
