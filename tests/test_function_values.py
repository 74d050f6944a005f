"""A registered function is a class: its further arguments are fields, with text, limits, help and
pickle as those of any other.
"""

import pickle
from dataclasses import replace

import pytest
import torch

from sinklab.core.errors import limited
from sinklab.core.instrument import BlockKeys, Selector, intervene, trace
from sinklab.core.registry import (
    interventions,
    removals,
    rules,
    selectors,
    statistics,
    unmasking_rules,
)
from sinklab.core.sinks import Gu, find_sinks
from sinklab.lab.registry import commands
from tiny_diffusion import new_model


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    """What a test registers is unknown to the next."""
    for known in (commands, interventions, removals, rules, selectors, statistics, unmasking_rules):
        monkeypatch.setattr(known, "_classes", {**known})


def weak_values(call, k: int = limited(1, at_least=1)):
    """The keys of the shortest values."""
    return call.top(-call.values_BHSD.norm(dim=-1), k)


def test_arguments_are_fields_of_a_frozen_class(monkeypatch):
    kind = selectors.register("weak_values")(weak_values)
    assert issubclass(kind, Selector)
    assert kind.__doc__ == "The keys of the shortest values."
    assert selectors.as_text(kind(k=3)) == "weak_values:k=3"
    assert selectors.parse("weak_values:k=3") == kind(3)
    with pytest.raises(ValueError, match="at least 1"):
        kind(0)
    with pytest.raises(ValueError, match="did you mean"):
        selectors.parse("weak_values:kk=3")
    monkeypatch.setitem(globals(), "weak_values", kind)
    assert pickle.loads(pickle.dumps(kind(3))) == kind(3)


def test_a_selector_and_a_removal_block_as_classes_do():
    @removals.register("halve")
    def halve(call, blocked_BHS, random_BHS, share=0.5):
        kept_BKS = torch.where(blocked_BHS, share, 1.0)[:, : call.v_BKSD.shape[1]]
        return replace(call, v_BKSD=call.v_BKSD * kept_BKS[..., None])

    selectors.register("weak_values")(weak_values)
    model, ids = new_model(), torch.arange(8)[None] % 5 + 1
    plain = model(ids).logits
    with intervene(model, "block_keys:keys=weak_values,when=now,how=(halve:share=0)") as log:
        edited = model(ids).logits
    assert not torch.equal(edited, plain)
    assert log.dose().keys == 1
    with intervene(model, BlockKeys("weak_values", when="now", how=halve(share=1.0))):
        assert torch.equal(model(ids).logits, plain)


def test_a_statistic_has_the_axes_and_reads_that_it_was_marked_with():
    @statistics.register("largest_share", axes="head", reads="received")
    def largest_share(call, power=1.0):
        received_BHS = call.received_BHS**power
        return received_BHS.amax(-1) / received_BHS.sum(-1)

    model, ids = new_model(), torch.arange(8)[None] % 5 + 1
    with trace(model, ("received", "largest_share", "largest_share:power=2")) as recording:
        model(ids)
    received = recording.array("received")
    assert recording.dims("largest_share") == ("step", "batch", "layer", "head")
    for power, name in ((1, "largest_share"), (2, "largest_share:power=2.0")):
        expected = (received**power).max(-1) / (received**power).sum(-1)
        assert torch.allclose(*map(torch.as_tensor, (recording.array(name), expected)))
    with pytest.raises(ValueError, match="no field 'axis'; did you mean 'axes'"):
        statistics.register("other", axis="head")(lambda view: view)


def test_a_rule_reads_arrays():
    @rules.register("heavy")
    def heavy(received, seen_by, exists, weight=0.3):
        return received > weight * seen_by

    received = torch.tensor([[5.0, 1.0, 0.5, 1.5] * 2])
    assert torch.equal(
        find_sinks(received, heavy(0.2), received.shape[-1]),
        find_sinks(received, Gu(0.2), received.shape[-1]),
    )
    assert torch.equal(
        find_sinks(received, "heavy:weight=0.2", received.shape[-1]),
        find_sinks(received, Gu(0.2), received.shape[-1]),
    )


def test_an_edit_has_layers_and_heads_too():
    @interventions.register("temper")
    def temper(call, temperature: float):
        q_BHQD = call.q_BHQD.clone()
        q_BHQD[:, call.heads] /= temperature
        return replace(call, q_BHQD=q_BHQD)

    assert interventions.as_text(temper(2.0, heads=[0])) == "temper:temperature=2.0,heads=0"
    with pytest.raises(ValueError, match="needs temperature"):
        interventions.parse("temper:heads=0")


def test_each_value_of_a_statistic_has_a_memory_of_its_own():
    @statistics.register("grown", axes="")
    def grown(call, of="q"):
        now = getattr(call, f"{of}_B{'H' if of == 'q' else 'K'}{'Q' if of == 'q' else 'S'}D").mean()
        before = call.memory.get("before", now)
        call.memory["before"] = now
        return (now - before).expand(len(call.q_BHQD))

    model, ids = new_model(), torch.arange(8)[None] % 5 + 1
    with trace(model, ("grown", "grown:of=v")) as recording:
        model(ids)
        model(ids)
    assert not any(recording.array(name).any() for name in ("grown", "grown:of=v"))


def odd(call, *, k=1): ...


def starred(call, *more): ...


def named_as_the_base(call, select=3): ...


@pytest.mark.parametrize(
    "function", [odd, starred, named_as_the_base], ids=lambda one: one.__name__
)
def test_an_argument_that_cannot_be_an_option_is_refused(function):
    with pytest.raises(ValueError, match="a selector takes call and then its options"):
        selectors.register("odd")(function)


def test_options_without_annotation_are_read_by_their_defaults():
    @selectors.register("plain")
    def plain(call, k=limited(2, at_least=1), rule=None):
        return call.top(call.scores_BHS, k)

    assert selectors.parse("plain:k=3,rule=gu") == plain(k=3, rule="gu")
    with pytest.raises(ValueError, match="write attributes of the class"):
        selectors.register("marked", by_attention=False)(type("Marked", (Selector,), {}))


def test_too_few_arguments_are_refused_and_commands_stay_functions():
    with pytest.raises(
        ValueError, match=r"takes received, seen_by, exists .*, but is lone\(received\)"
    ):

        @rules.register("lone")
        def lone(received):
            return received > 1

    @commands.register("hello")
    def hello(name: str = "you"):
        return name

    assert hello() == "you"
