"""Forwards that are run in another way: under checkpointing, inside one another, for another text,
in float64.
"""

# B batch, S sequence
from __future__ import annotations

import pytest
import torch
import transformers

from refusals import refusing
from sinklab.core import compat
from sinklab.core.instrument import trace
from tiny_models import HandWritten, checkpointed, llama

IDS = torch.randint(1, 30, (2, 10), generator=torch.Generator().manual_seed(1))


@pytest.mark.ring("lab")
def test_the_first_backward_of_an_eager_model_under_checkpointing():
    model = checkpointed(llama(attention="eager"))
    model(IDS).logits.sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    for _ in range(2):
        model.zero_grad()
        with trace(model) as recording:
            model(IDS).logits.sum().backward()
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            assert torch.equal(parameter.grad, gradient)
        assert recording.array("received").shape == (1, 2, 2, 4, 10)


class Twice(HandWritten):
    inside = False
    caught: str | None = None

    def forward(self, ids_BS):
        if self.inside or ids_BS.shape[1] == 1:
            return super().forward(ids_BS)
        return super().forward(ids_BS) + self(ids_BS[:, :1])


def test_a_forward_inside_a_forward_is_refused_by_name():
    model = Twice()
    with (
        refusing("forward of Twice runs inside"),
        trace(model),
    ):
        model(IDS)
    model.inside = True
    with trace(model) as recording:
        model(IDS)
    assert len(recording.received) == 1


class Interrupted(HandWritten):
    stops = True

    def forward(self, ids_BS):
        if self.stops:
            raise KeyboardInterrupt
        return super().forward(ids_BS)


def test_a_forward_after_one_that_was_interrupted_is_not_inside_it():
    model = Interrupted()
    with trace(model) as recording:
        with pytest.raises(KeyboardInterrupt):
            model(IDS)
        model.stops = False
        model(IDS)
    assert len(recording.received) == 1


SMALL = {
    "vocab_size": 40,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "hidden_size": 16,
}
OWN = {
    "BloomForCausalLM": {},
    "MptForCausalLM": {"d_model": 16, "n_layers": 2, "n_heads": 2},
    "XLNetModel": {"d_model": 16, "d_inner": 24},
}


@pytest.mark.parametrize("name", OWN)
def test_no_remedy_is_given_that_changes_nothing(name):
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**SMALL | OWN[name])).eval()
    assert compat.lacks_sdpa(model) == name
    with torch.no_grad(), pytest.raises(ValueError) as refused, trace(model):
        model(IDS)
    assert f"{name} has an attention of its own" in str(refused.value)
    assert "set_attn_implementation" not in str(refused.value)
