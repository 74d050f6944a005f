"""Forwards that are run in another way: under checkpointing, and inside one another."""

# B batch, S sequence
from __future__ import annotations

import pytest
import torch
from probed import IDS

from refusals import refusing
from sinklab.core.instrument import trace
from tiny_models import HandWritten, checkpointed, llama


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
        assert recording.array("received").shape == (1, 2, 2, 4, 12)


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
