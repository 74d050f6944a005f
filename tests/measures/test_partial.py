"""Partial removals, amplified states and what rows look at, against dense float64."""

# B batch, H query heads, Q queries, S keys, D head dim, N kinds of keys
import math

import pytest
import torch
from test_measures import outputs
from torch.nn import functional as F
from torch.testing import assert_close

from refusals import refusing
from sinklab import intervene, trace
from sinklab.core.instrument.edits.block_keys import BlockKeys
from sinklab.core.sinks import find_sinks
from sinklab.core.subject import Canvas
from sinklab.lab.measures import MaskPositions
from sinklab.lab.measures.amplify import Amplify
from sinklab.lab.scoring import state_records
from tiny_diffusion import tiny_model
from tiny_models import llama

IDS = torch.arange(1, 13)[None]


class OneCall(torch.nn.Module):
    """An attention call of fixed queries, keys and values, two query heads to a key head."""

    def __init__(self, causal):
        super().__init__()
        draw = torch.Generator().manual_seed(3)
        self.q, self.k, self.v = (
            torch.randn(2, heads, 7, 5, dtype=torch.float64, generator=draw) * 2
            for heads in (4, 2, 2)
        )
        self.causal = causal

    def forward(self):
        kv = {"is_causal": self.causal, "enable_gqa": True}
        return F.scaled_dot_product_attention(self.q, self.k, self.v, **kv)

    def dense(self):
        """Weights and values, (B, H, Q, S) and (B, H, S, D)."""
        k, v = (one.repeat_interleave(2, 1) for one in (self.k, self.v))
        scores_BHQS = self.q @ k.mT / math.sqrt(5)
        if self.causal:
            scores_BHQS = scores_BHQS.masked_fill(torch.ones(7, 7).triu(1).bool(), -math.inf)
        return scores_BHQS.softmax(-1), v


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("how", ["weaken:beta=0.25", "share:to=0.1"])
def test_a_row_is_that_of_the_closed_form(how, causal):
    model, some = OneCall(causal), [2, 4]
    edit = MaskPositions(some, how=how, heads=(0, 3))
    with intervene(model, edit) as log:
        ours_BHQD = model()
    weights_BHQS, v_BHSD = model.dense()
    p_BHQ1 = weights_BHQS[..., some].sum(-1, keepdim=True)
    o_BHQD = weights_BHQS @ v_BHSD
    mean_BHQD = weights_BHQS[..., some] @ v_BHSD[:, :, some] / p_BHQ1.clamp_min(1e-30)
    left_BHQ1 = torch.full_like(p_BHQ1, 0.25)
    if how.startswith("share"):
        left_BHQ1 = (0.1 * (1 - p_BHQ1) / (0.9 * p_BHQ1)).nan_to_num(posinf=1)
    left_BHQ1[:, 1:3] = 1
    less = 1 - left_BHQ1
    theirs_BHQD = o_BHQD + less * p_BHQ1 * (o_BHQD - mean_BHQD) / (1 - less * p_BHQ1)
    assert_close(ours_BHQD, theirs_BHQD, rtol=0, atol=1e-12)
    now_BHQ1 = left_BHQ1 * p_BHQ1 / (1 - less * p_BHQ1)
    removed_BH = (p_BHQ1 - now_BHQ1)[:, [0, 3], :, 0].mean(-1)
    assert_close(log.removals[0]["removed"][:, 0], removed_BH.float(), rtol=0, atol=1e-6)
    if how.startswith("share") and not causal:
        assert_close(now_BHQ1[:, [0, 3]], torch.full((2, 2, 7, 1), 0.1).double())


def test_fractions_at_both_ends_are_blocked_keys_and_nothing():
    model = llama().double()
    outputs = []
    for how in ("mask", "weaken:beta=0", "weaken:beta=1"):
        with torch.no_grad(), intervene(model, MaskPositions((0, 3), how=how)) as log:
            outputs.append(model(IDS).logits)
    assert torch.equal(outputs[0], outputs[1])
    assert log.removals[0]["removed"].abs().max() < 1e-6
    with torch.no_grad():
        assert_close(outputs[2], model(IDS).logits)


def test_a_row_that_sees_nothing_else_keeps_its_keys():
    model = OneCall(True)
    with intervene(model, MaskPositions((0,), how="share:to=0.3")):
        ours_BHQD = model()
    assert_close(ours_BHQD[:, :, 0], model.v.repeat_interleave(2, 1)[:, :, 0])
    for how, says in (("weaken:beta=1.5", "at most 1"), ("share:to=1", "less than 1")):
        with refusing(says):
            BlockKeys("top:k=1", how=how)


@pytest.mark.parametrize("how", ["weaken:beta=0.5", "share:to=0.1", "zero_value"])
def test_the_dose_behind_an_edit_that_blocks_is_its_own(how):
    model, first = OneCall(True), MaskPositions((0,))
    with intervene(model, first, MaskPositions((1,), how=how)) as log, trace(model) as after:
        model()
    with intervene(model, first), trace(model) as before:
        model()
    removed_BHS = before.received[0][:, 0]
    if how != "zero_value":
        removed_BHS = removed_BHS - after.received[0][:, 0]
    second = log.removals[1]
    assert_close(second["removed"][:, 0], removed_BHS[..., 1].float() / 7, rtol=0, atol=1e-6)
    assert second["alone"].eq(0).all() and log.removals[0]["alone"].eq(1).all()


@pytest.mark.parametrize("mean", ["channels", "positions", "none"])
def test_amplified_states_are_spread_about_their_mean(mean):
    model, some = tiny_model(), [2, 5]

    def change(layer, out_BQD):
        means = {
            "channels": out_BQD[:, some].mean(-1, keepdim=True),
            "positions": out_BQD.mean(1, keepdim=True),
            "none": torch.zeros(()),
        }
        changed_BQD = out_BQD.clone()
        changed_BQD[:, some] = 4 * (out_BQD[:, some] - means[mean]) + means[mean]
        return out_BQD if layer else changed_BQD

    edit = Amplify(positions=some, scale=4.0, mean=mean, layers=(0,))
    with torch.no_grad(), intervene(model, edit) as log:
        found = model(IDS).logits
    with torch.no_grad(), outputs(model.model.layers, change):
        assert_close(found, model(IDS).logits)
    assert {record.layer for record in state_records(log)} == {0}


def test_the_mean_over_positions_leaves_out_padding():
    model, found = tiny_model(), []
    for pad in (0, 4):
        ids_BS = F.pad(IDS, (pad, 0))
        edit = Amplify(positions=(2 + pad,), scale=4.0, mean="positions", layers=(0,))
        with torch.no_grad(), intervene(model, edit):
            found.append(model(ids_BS, ids_BS > 0).logits[:, pad:])
    assert_close(*found, rtol=1e-4, atol=1e-5)


def test_shares_of_a_row_are_those_of_the_dense_map():
    model = tiny_model(1).eval()
    canvas = Canvas.from_prompts([[5, 6, 7]], new_tokens=6, mask_id=model.config.mask_token_id)
    ids_BS = canvas.ids_BS.clone()
    ids_BS[0, 4:7] = 9
    wanted = ("given_by_state", "received")
    with torch.no_grad(), trace(model, wanted, canvas=canvas, maps=[(0, 0, 1)]) as recording:
        model(ids_BS)
    map_QS = recording.maps[0, 0, 1][0]
    prefix = map_QS.shape[-1] - ids_BS.shape[1]
    state_S = torch.tensor([-1] * prefix + [2] * 3 + [0] + [1] * 3 + [0] * (len(ids_BS[0]) - 7))
    shares_Q3 = torch.stack([map_QS[:, state_S == state].sum(-1) for state in range(3)], -1)
    ours_LHQN = recording.given_by_state[0][0]
    assert_close(ours_LHQN[0, 1, :, :3], shares_Q3, rtol=0, atol=1e-6)
    received_HS = recording.received[0][0, 0]
    sinks_HS = find_sinks(received_HS[None], "excess", recording.visible[0][:, 0, None])[0]
    assert_close(ours_LHQN[0, 1, :, 3], map_QS[:, sinks_HS[1]].sum(-1), rtol=0, atol=1e-6)
