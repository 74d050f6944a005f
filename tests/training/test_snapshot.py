"""The snapshot against maps read one by one, and what it must leave as it was."""

import copy

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from refusals import refused, refusing
from sinklab.core.instrument import trace
from sinklab.lab.training.snapshots import LEVELS, MEASURES, measured_heads, nested_masks, snapshot
from tiny_diffusion import tiny_model
from tiny_llama import tiny_llama

IDS = torch.randint(3, 280, (3, 24), generator=torch.Generator().manual_seed(5))


def same(one, other, tolerance=0.0):
    for name in MEASURES:
        assert_allclose(one[name], other[name], rtol=tolerance, atol=tolerance, err_msg=name)


def test_a_token_once_open_stays_open():
    masks_TRS, again_TRS, other_TRS = (
        nested_masks((4, 20), (0.1, 0.5, 1.0, 0.9), seed=seed) for seed in (3, 3, 4)
    )
    assert masks_TRS.sum(-1).tolist() == [[count] * 4 for count in (20, 18, 10, 2)]
    assert not (masks_TRS[1:] & ~masks_TRS[:-1]).any()
    assert not torch.equal(masks_TRS[2, 0], masks_TRS[2, 1])
    assert torch.equal(masks_TRS, again_TRS)
    assert not torch.equal(masks_TRS, other_TRS)
    assert nested_masks((1, 3), (0.1,), seed=0).sum() == 1


@pytest.mark.parametrize("sinks, given", [(0, 0), (2, 0), (0, 3)])
def test_shares_are_those_of_the_maps(sinks, given):
    model = tiny_model(sinks)
    seen = snapshot(model, IDS, seed=7, batch=2, given=given)
    places = [(step, layer, head) for step in range(5) for layer in range(2) for head in range(4)]
    with trace(model, maps=places) as recording, torch.no_grad():
        for hidden_BS in nested_masks((3, 24 - given), LEVELS, 7):
            opened_BS = torch.zeros(3, given, dtype=torch.bool)
            model(IDS.masked_fill(torch.cat([opened_BS, hidden_BS], 1), model.config.mask_token_id))
    for layer in range(2):
        maps = np.array([recording.map(*place).numpy() for place in places if place[1] == layer])
        share_MBK = maps.mean(2)
        expected = {
            "sink_share": share_MBK[..., :sinks].sum(-1).mean(),
            "top_text_share": share_MBK[..., sinks:].max(-1).mean(),
            "first_share": share_MBK[..., sinks].mean(),
            "sinks": (24 * share_MBK > 1 + 3 * 23 / 24).sum(-1).mean(),
            "text_sinks": (24 * share_MBK[..., sinks:] > 1 + 3 * 23 / 24).sum(-1).mean(),
        }
        for name, value in expected.items():
            assert seen.layers[name][layer] == pytest.approx(value, rel=1e-5), name
    assert expected["sinks"] > 0
    assert (seen.added, seen.length, seen.even_share) == (sinks, 24, sinks / (sinks + 24))
    assert seen.overall["sink_share"] == pytest.approx(seen.layers["sink_share"].mean())
    assert sum(
        seen.overall[f"main_{name}"] for name in ("added", "first", "early", "other", "none")
    ) == pytest.approx(1)


def test_holders_mobility_and_values_of_a_constructed_text():
    """One row, four levels, two layers of one head; ten tokens behind one added sink."""
    received = np.full((1, 4, 2, 1, 11), 0.5, np.float32)
    for level, key in enumerate((0, 0, 2, 7)):
        received[0, level, 0, 0, key] = 5.0
    for level, key in enumerate((1, 1, 1)):
        received[0, level, 1, 0, key] = 5.0
    values = np.full((1, 4, 2, 11), 2.0, np.float32)
    values[..., 0], values[..., 1] = 0.25, 1.0
    masked = np.zeros((1, 4, 10), bool)
    layers, overall = measured_heads(received, values, np.full((1, 4, 11), 10.0), masked, 1)
    holders = {
        "main_added": [0.5, 0],
        "main_first": [0, 0.75],
        "main_early": [0.25, 0],
        "main_other": [0.25, 0],
        "main_none": [0, 0.25],
    }
    for name, expected in holders.items():
        assert layers[name].tolist() == expected, name
    # of six pairs of levels five have their sinks apart; the text alone has two, apart; the other
    # layer stands still
    assert_allclose(layers["mobility"], [5 / 6, 0], atol=1e-12)
    assert_allclose(layers["text_mobility"], [1, 0], atol=1e-12)
    assert overall["mobility"] == pytest.approx(5 / 6 * 4 / 7)
    assert_allclose(layers["value_added"], [0.25, 0.25])
    assert_allclose(layers["value_sink"], [2, 1])
    assert_allclose(layers["value_other"], [72 / 38, 73 / 37])
    assert layers["sink_share"] == pytest.approx([(5 + 5 + 0.5 + 0.5) / 40, 0.05])
    assert np.isnan(layers["value_masked"]).all()
    # the last five tokens, one of which is a sink of the first layer, are masks of short values:
    # told apart
    masked[..., 5:] = True
    values[..., 6:] = 0.5
    layers, _ = measured_heads(received, values, np.full((1, 4, 11), 10.0), masked, 1)
    assert_allclose(layers["value_masked"], [0.5, 0.5])
    assert_allclose(layers["value_sink"], [2, 1])
    assert_allclose(layers["value_other"], [(4 * 1 + 15 * 2) / 19, (1 + 16 * 2) / 17])


def test_activations_are_those_of_the_hidden_states():
    model = tiny_model(1)
    seen = snapshot(model, IDS, levels=(0.5,), seed=1)
    shown = IDS.masked_fill(nested_masks((3, 24), (0.5,), 1)[0], model.config.mask_token_id)
    states = []
    # the states before the next layer, or before the last norm, are those after this one
    for module in (model.model.layers[1], model.model.norm):
        module.register_forward_pre_hook(lambda module, args: states.append(args[0].detach().abs()))
    with torch.no_grad():
        model(shown)
    added, text = (
        [each for each in states if (each.shape[1] == 1) == alone] for alone in (True, False)
    )
    expected = {
        "activation_added": [each.max() for each in added],
        "activation_first": [each[:, 0].max() for each in text],
        "activation_other": [each[:, 1:].max() for each in text],
        "activation_median": [each.flatten(1).median(1).values.mean() for each in text],
        "activation_ratio": [each.max() / each.flatten(1).median(1).values.mean() for each in text],
    }
    for name, values in expected.items():
        assert_allclose(seen.layers[name], np.array(values), rtol=1e-6, err_msg=name)
    assert seen.overall["activation_other"] == seen.layers["activation_other"].max()
    assert np.isnan(snapshot(tiny_model(), IDS).layers["activation_added"]).all()


def test_batches_do_not_matter_and_seeds_do():
    model = tiny_model(1)
    whole = snapshot(model, IDS)
    same(whole.layers, snapshot(model, IDS, batch=1).layers, 1e-5)
    assert whole.overall["sink_share"] != snapshot(model, IDS, seed=1).overall["sink_share"]
    rows = whole.as_rows()
    assert [row["layer"] for row in rows] == [-1, 0, 1]
    assert rows[2]["sink_share"] == whole.layers["sink_share"][1]
    assert set(MEASURES) <= set(rows[0])


def test_the_model_is_left_as_it_was():
    model = tiny_model(1).train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    plain = snapshot(copy.deepcopy(model), IDS)
    model.model.compile(backend="eager", dynamic=False)
    compiled = model.model._compiled_call_impl
    state, weights = torch.get_rng_state(), copy.deepcopy(model.state_dict())
    same(plain.layers, snapshot(model, IDS).layers)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        same(plain.layers, snapshot(model, IDS).layers)
    same(plain.layers, snapshot(torch.compile(model, backend="eager"), IDS).layers)
    assert model.model._compiled_call_impl is compiled
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    assert all(weight.grad is None for weight in model.parameters())
    assert not any(module._forward_hooks for module in model.model.layers)


def test_everything_is_put_back_after_an_error():
    model = tiny_model(context=16).train()
    model.model.compile(backend="eager")
    refused("the model's context is 16", snapshot, model, IDS)
    assert model.training
    assert model.model._compiled_call_impl is not None


def test_causal_models_read_the_clean_text():
    llama = tiny_llama().model
    seen = snapshot(llama, IDS)
    same(seen.layers, snapshot(llama, IDS, levels=(0.5,)).layers)
    assert np.isnan(seen.overall["mobility"])
    # the first token is seen by all, and the first query sees nothing else
    assert seen.overall["first_share"] > 1 / 24
    model = tiny_model()
    causal = snapshot(model, IDS, causal=True)
    with trace(model) as recording, torch.no_grad():
        model(IDS, causal=True)
    expected = recording.array("received")[0, ..., 0].mean((0, 2)) / 24
    assert_allclose(causal.layers["first_share"], expected, rtol=1e-6)


@pytest.mark.parametrize("causal", [False, True])
def test_an_even_share_is_that_of_attention_without_preference(causal):
    model = tiny_model(2)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.zero_()
    seen = snapshot(model, IDS, causal=causal)
    assert seen.overall["sink_share"] == pytest.approx(seen.even_share, rel=1e-5)


def test_bad_input_is_refused():
    model = tiny_model()
    refused(r"\(R, S\).*got shape \(24,\)", snapshot, model, IDS[0])
    refused(r"\(0, 1\], but are \(0.5, 0\)", snapshot, model, IDS, levels=(0.5, 0))
    with refusing("keeps no list `layers`"):
        broken = copy.deepcopy(model)
        broken.model.layers = torch.nn.Sequential(*broken.model.layers)
        snapshot(broken, IDS)
