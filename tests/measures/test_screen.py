"""The first-order screen of heads: exact where the loss is linear in a head's output."""

import numpy as np
import pytest
import torch
from test_partial import IDS, OneCall
from torch.testing import assert_close

from refusals import refusing
from sinklab import intervene
from sinklab.core.instrument.edits.block_keys import BlockKeys
from sinklab.lab.measures.screen import first_order_costs
from tiny_models import llama


@pytest.mark.parametrize("causal", [False, True])
def test_of_a_linear_loss_it_is_the_cost_of_the_blocked_key(causal):
    model = OneCall(causal)
    model.v.requires_grad_()
    weights = torch.randn(2, 4, 7, 5, dtype=torch.float64, generator=torch.Generator())

    def losses_by_head():
        return (model() * weights).sum((-2, -1))

    (costs_BH,) = first_order_costs(model, lambda: losses_by_head().sum(-1)).values()
    with torch.no_grad(), intervene(model, BlockKeys("top:k=1", when="now")):
        blocked_BH = losses_by_head()
    assert_close(costs_BH, (blocked_BH - losses_by_head()).float())


def test_it_ranks_the_heads_of_a_model_and_leaves_its_gradients_alone():
    model = llama().double()

    def losses():
        return model(IDS).logits[:, -1].logsumexp(-1)

    costs = first_order_costs(model, losses)
    assert [tuple(own.shape) for own in costs.values()] == [(1, 4)] * len(costs)
    assert all(one.grad is None for one in model.parameters())
    real = []
    for layer in range(len(costs)):
        for head in range(4):
            edit = BlockKeys("top:k=1", when="now", layers=(layer,), heads=(head,))
            with torch.no_grad():
                before = losses()
                with intervene(model, edit):
                    real.append(float(losses() - before))
    assert np.corrcoef(real, torch.cat([*costs.values()], 1)[0])[0, 1] > 0.7
    with refusing("gradients"), torch.no_grad():
        first_order_costs(OneCall(False), lambda: torch.zeros(2))
