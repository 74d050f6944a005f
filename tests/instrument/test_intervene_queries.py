"""For whom keys are blocked, lone rows, and values that stand in; against dense float64
attention.
"""

# B batch, H heads, Q queries, S keys
from types import SimpleNamespace

import pytest
import torch
from dense_twin import at, dense, over_queries, received, top
from probed import EXACT, IDS, padding
from torch.testing import assert_close

from refusals import refusing
from sinklab.core.attention import running
from sinklab.core.attention.context import decoding
from sinklab.core.instrument import BlockKeys, intervene
from sinklab.core.subject import Canvas
from sinklab.lab.measures import LoneRows, MaskPositions, MaskSinks
from tiny_diffusion import tiny_model
from tiny_models import llama

OWN = torch.eye(12, dtype=torch.bool)
QUERIES = {"all": range(12), "from5": range(5, 12)}


def blocked(columns_BH1S, queries):
    """What is hidden where keys are blocked for these queries, but for their own key."""
    return columns_BH1S & at(*queries)[:, None] & ~OWN


def test_a_lone_row_is_the_form_of_attention_that_is_trained():
    lone, full = tiny_model(1, attention="first_alone").double(), tiny_model(1).double()
    full.load_state_dict(lone.state_dict())
    with torch.no_grad(), intervene(full, LoneRows()):
        inside = full(IDS).logits
    with torch.no_grad():
        assert_close(inside, lone(IDS).logits, **EXACT)
        assert not torch.allclose(inside, full(IDS).logits)


@pytest.mark.parametrize(
    "queries, causal, padded", [("all", True, True), ("all", False, False), ("from5", True, False)]
)
def test_keys_are_blocked_for_some_queries(queries, causal, padded):
    model, (given, real) = llama(causal=causal).double(), padding(padded)
    with torch.no_grad(), intervene(model, MaskSinks(2, when="now", queries=queries)) as log:
        ours = model(IDS, **given).logits
    hidden = []

    def hide(layer, a):
        hidden.append(blocked(top(received(a, real), 2), QUERIES[queries]))
        return hidden[-1]

    theirs, twin = dense(model, lambda: model(IDS, **given).logits, hide)
    assert_close(ours[real], theirs[real], **EXACT)
    (removal,) = log.removals
    count_B1 = real.sum(-1)[:, None]
    for layer in range(2):
        before = twin.before[layer][0] * real[:, None, :, None]
        lost_BH = over_queries(before.masked_fill(~hidden[layer], 0.0).sum(-1), real)
        assert_close(removal["removed"][:, layer], lost_BH, rtol=1e-5, atol=1e-6)
        strongest = (received(twin.maps[layer], real) / count_B1.unsqueeze(-1)).max(-1)
        assert_close(removal["strongest"][:, layer], strongest.values.float(), rtol=1e-5, atol=1e-6)
        assert torch.equal(removal["strongest_at"][:, layer].long(), strongest.indices)
        others = (before > 0) & ~OWN
        alone = others.any(-1) & ~(others & ~hidden[layer]).any(-1)
        assert torch.equal(removal["alone"][:, layer], alone.sum(-1).float())


@pytest.mark.parametrize("queries", ["masked", "committed", "prompt"])
def test_states_of_queries(queries):
    model = tiny_model().double()
    mask_id = model.config.mask_token_id
    canvas = Canvas.from_prompts([[5, 6, 7]] * 2, new_tokens=9, mask_id=mask_id)
    ids_BS = canvas.ids_BS.clone()
    ids_BS[0, 4:6], ids_BS[1, 8] = 9, 10
    state = {"masked": ids_BS == mask_id, "prompt": ~canvas.open_BS}
    state["committed"] = ~state["masked"] & canvas.open_BS
    edit = MaskPositions((1, 4), queries=queries)
    with (
        torch.no_grad(),
        intervene(model, edit),
        decoding(SimpleNamespace(canvas=canvas)),
        running(ids_BS),
    ):
        ours = model(ids_BS).logits
    hidden = (state[queries][:, :, None] & at(1, 4) & ~OWN)[:, None]
    theirs, _ = dense(model, lambda: model(ids_BS).logits, lambda layer, a: hidden)
    assert_close(ours, theirs, **EXACT)
    # without a canvas masks are seen in the ids, and nobody knows what was given
    if queries == "prompt":
        with refusing("queries='prompt'"), intervene(model, edit):
            model(ids_BS)
    if queries == "masked":
        with torch.no_grad(), intervene(model, edit):
            assert_close(model(ids_BS).logits, theirs, **EXACT)


def test_values_of_other_keys_are_no_choice_where_queries_see_different_keys():
    model = llama(causal=True)
    refused = refusing("different keys")
    with refused, intervene(model, BlockKeys("top:k=1", when="now", how="shuffle_value")):
        model(IDS)
