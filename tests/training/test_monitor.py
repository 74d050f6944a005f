"""The sink monitor against maps read one by one, what it leaves as it was, and when it looks."""

import copy
import math

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from refusals import refusing
from sinklab.core.instrument import trace
from sinklab.core.sinks import COMMITTED, MASKED
from sinklab.lab.analysis.facts import facts
from sinklab.lab.training.monitor import measured, nested_masks, pooled
from sinklab.lab.training.recorders import Monitor, Recorder
from tiny_diffusion import tiny_model

IDS = torch.randint(3, 280, (3, 24), generator=torch.Generator().manual_seed(5))


def test_a_token_once_open_stays_open():
    masks_TRS = nested_masks((4, 20))
    assert masks_TRS.sum(-1).tolist() == [[count] * 4 for count in (18, 14, 10, 6, 2)]
    assert not (masks_TRS[1:] & ~masks_TRS[:-1]).any()
    assert not torch.equal(masks_TRS[2, 0], masks_TRS[2, 1])
    assert nested_masks((1, 3))[-1].sum() == 1


@pytest.mark.parametrize("sinks, given", [(2, 0), (0, 3)])
def test_shares_are_those_of_the_maps(sinks, given):
    model = tiny_model(sinks)
    overall, *layers = measured(model, IDS, given=given)
    places = [(step, layer, head) for step in range(5) for layer in range(2) for head in range(4)]
    with trace(model, maps=places) as recording, torch.no_grad():
        for hidden_BS in nested_masks((3, 24 - given)):
            opened_BS = torch.zeros(3, given, dtype=torch.bool)
            model(IDS.masked_fill(torch.cat([opened_BS, hidden_BS], 1), model.config.mask_token_id))
    for layer in range(2):
        maps = np.array([recording.map(*place).numpy() for place in places if place[1] == layer])
        share_MBK = maps.mean(2)
        flags = 24 * share_MBK > 1 + 3 * 23 / 24
        expected = {
            "sink_share": share_MBK[..., :sinks].sum(-1).mean() if sinks else math.nan,
            "top_text_share": share_MBK[..., sinks:].max(-1).mean(),
            "sinks": flags.sum(-1).mean(),
            "text_sinks": flags[..., sinks:].sum(-1).mean(),
        }
        for name, value in expected.items():
            found = layers[layer][name]
            assert found == pytest.approx(value, rel=1e-5, nan_ok=True), name
    assert expected["sinks"] > 0
    assert (overall["added"], overall["even_share"]) == (sinks, sinks / (sinks + 24))
    assert [row["layer"] for row in (overall, *layers)] == [-1, 0, 1]
    assert overall["sinks"] == pytest.approx(np.mean([row["sinks"] for row in layers]))


def test_holders_mobility_and_values_of_a_constructed_text():
    """One row, four levels, two layers of one head; ten tokens behind one added sink."""
    received = np.full((4, 2, 1, 11), 0.5, np.float32)
    for level, key in enumerate((0, 0, 2, 7)):
        received[level, 0, 0, key] = 5.0
    for level, key in enumerate((1, 1, 1)):
        received[level, 1, 0, key] = 5.0
    values = np.full((4, 2, 11), 2.0, np.float32)
    values[..., 0], values[..., 1] = 0.25, 1.0
    # the last five tokens, one of which is a sink of the first layer, are masks of short values
    states = np.full((4, 10), COMMITTED)
    states[..., 5:] = MASKED
    values[..., 6:] = 0.5
    arrays = {"received": received, "value_norm": values, "visible": np.full((4, 11), 10.0)}
    arrays["positions"] = np.full(4, 10.0)
    layers = pooled([facts(arrays, states, added=1)])
    expected = {
        "main_none": [0, 0.25],
        # of six pairs of levels five have their sinks apart
        "mobility": [5 / 6 * 4 / 7, 5 / 6, 0],
        "value_added": [0.25, 0.25],
        "value_masked": [0.5, 0.5],
        "value_sink": [2, 1],
        "value_other": [(4 * 1 + 15 * 2) / 19, (1 + 16 * 2) / 17],
        "sink_share": [(5 + 5 + 0.5 + 0.5) / 40, 0.05],
    }
    for name, numbers in expected.items():
        assert_allclose(layers[name], numbers, rtol=1e-6, atol=1e-12, err_msg=name)


@pytest.mark.slow
def test_the_model_is_left_as_it_was():
    model = tiny_model(1).train()
    plain = measured(copy.deepcopy(model), IDS)
    model.model.compile(backend="eager", dynamic=False)
    compiled = model.model._compiled_call_impl
    state, weights = torch.get_rng_state(), copy.deepcopy(model.state_dict())
    assert measured(model, IDS) == plain
    assert model.model._compiled_call_impl is compiled and model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.model.layers)
    with refusing("the model's context is"):
        measured(model, IDS.repeat(1, 100))
    assert model.training


@pytest.mark.parametrize("causal", [False, True])
def test_an_even_share_is_that_of_attention_without_preference(causal):
    model = tiny_model(2)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.zero_()
    found = measured(model, IDS, causal=causal)[0]
    assert found["sink_share"] == pytest.approx(found["even_share"], rel=1e-5)


class State:
    def __init__(self, step, first):
        self.global_step, self.is_world_process_zero, self.log_history = step, first, []


def test_a_step_is_looked_at_once_by_one_process():
    recorder, model = Recorder(8, print, Monitor(IDS, every=1)), tiny_model(1)
    for first, expected in ((False, []), (True, [3])):
        state = State(3, first)
        for _ in range(2):
            recorder.look(model, state)
        assert [look["step"] for look in state.log_history] == expected


def test_a_causal_start_is_looked_at_as_causal_and_no_numbers_as_none():
    model, monitor = tiny_model(1), Monitor(IDS, every=1, causal_steps=2)
    looks = [monitor.rows(model, step)[0] for step in (0, 2, 3)]
    assert [look["causal"] for look in looks] == [True, True, False]
    assert looks[0]["sink_share"] == measured(model, IDS, causal=True)[0]["sink_share"]
    assert looks[2]["sink_share"] == measured(model, IDS)[0]["sink_share"]
    model.model.layers[0].self_attn.q_proj.weight.data.fill_(math.nan)
    assert math.isnan(monitor.rows(model, 3)[0]["sink_share"])
