"""Attention that is known because it was made: every number a trace gives of it is pinned."""

# B batch, H heads, S positions, D head dim
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from probed import decoded
from torch import nn
from torch.testing import assert_close

from sinklab.core.instrument import trace
from sinklab.core.sinks import Excess, find_sinks
from sinklab.core.subject import Canvas
from sinklab.lab.caching import DualCache, PrefixCache
from tiny_diffusion import tiny_model

S = 40


class Given(nn.Module):
    """One layer whose scores are the argument: keys are unit vectors, so a query is its row of
    scores.
    """

    def forward(self, scores_BHSS, values_BHSD):
        keys = torch.eye(scores_BHSS.shape[-1]).expand(*scores_BHSS.shape[:2], -1, -1)
        return F.scaled_dot_product_attention(scores_BHSS, keys, values_BHSD, scale=1.0)


NAMES = (
    "received",
    "row_entropy",
    "row_logsumexp",
    "last_row",
    "output_norm",
    "noop_bound",
    "value_norm",
    "key_norm",
)


def test_uniform_attention_gives_every_key_one_and_has_no_sink():
    model = Given()
    with trace(model, NAMES) as recording:
        model(torch.zeros(1, 1, S, S), torch.ones(1, 1, S, 4))
    at = {name: torch.from_numpy(recording.array(name))[0, 0, 0] for name in NAMES}
    assert_close(at["received"][0], torch.ones(S))
    assert_close(at["row_entropy"][0], torch.full((S,), math.log(S)))
    assert_close(at["row_logsumexp"][0], torch.full((S,), math.log(S)))
    assert_close(at["last_row"][0], torch.full((S,), 1 / S))
    # equal values add up to themselves: the bound is met
    assert_close(at["output_norm"][0], torch.full((S,), 2.0))
    assert_close(at["noop_bound"][0], torch.full((S,), 2.0))
    assert_close(at["value_norm"], torch.full((S,), 2.0))
    assert_close(at["key_norm"], torch.ones(S))
    assert not find_sinks(
        recording.array("received"), Excess(0.5), recording.array("received").shape[-1]
    ).any()


@pytest.mark.parametrize("sinks, cache", [(0, None), (1, PrefixCache()), (1, DualCache())])
def test_a_column_that_receives_all_is_a_sink_in_every_step_of_a_cached_run(cache, sinks):
    """Scaled by positions over queries, a rule means the same however few queries ran."""
    model = tiny_model(sinks)
    canvas = Canvas.from_prompts(
        [[5, 6, 7, 8, 9, 10]], new_tokens=30, mask_id=model.config.mask_token_id
    )
    _, recording, _ = decoded(model, canvas, cache=cache)
    received = recording.array("received")
    visible = recording.array("visible")[:, :, None, None]
    positions = recording.array("positions")[:, :, None, None]
    assert positions.ravel().tolist() == [36.0] * 30
    # everything rests on one key, whatever ran
    single = np.zeros_like(received)
    single[..., 4] = visible[..., 4]
    found = find_sinks(single, Excess(3.0), visible, positions)
    assert found[..., 4].all() and found.sum() == found[..., 4].size
    even = np.broadcast_to(visible / received.shape[-1], received.shape)
    assert not find_sinks(even, Excess(0.5), visible, positions).any()
    # the run itself: a mean weight above that of all positions' rule is a sink, and nothing else is
    expected = received / visible * 36 > 1 + 3.0 * 35 / 36
    assert np.array_equal(find_sinks(received, Excess(3.0), visible, positions), expected)
