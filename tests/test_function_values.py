"""A registered function is a class: its further arguments are fields, with text, limits, help and
pickle as those of any other.
"""

import pickle
from dataclasses import replace

import pytest
import torch

from sinklab.core.errors import limited
from sinklab.core.instrument import Selector, trace
from sinklab.core.registry import (
    interventions,
    removals,
    rules,
    selectors,
    statistics,
    unmasking_rules,
)
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
