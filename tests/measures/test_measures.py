"""Every measurement against a dense float64 computation on a model of two layers."""

# B batch, H query heads, Q queries, S keys, D head dim
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from safetensors.torch import save_file

from conformance.probing import check_intervention
from refusals import refused, refusing
from sinklab import intervene, trace
from sinklab.core.instrument import Listener
from sinklab.core.instrument.edits.block_keys import BlockKeys
from sinklab.core.instrument.edits.selectors import SinkKeys, TopKeys
from sinklab.core.instrument.routes import tapped
from sinklab.core.instrument.statistics import StatesView
from sinklab.core.subject import Canvas
from sinklab.lab.measures import WindowAttention
from sinklab.lab.measures.controls import Others
from sinklab.lab.measures.patch import Patch, save_run
from sinklab.lab.measures.statistics import LayerSimilarity
from sinklab.lab.scoring import state_records
from tiny_diffusion import tiny_model
from tiny_models import llama

IDS = torch.arange(1, 25).view(2, 12)


def test_those_with_options_hold_the_contract(tmp_path):
    model = tiny_model()
    file = tmp_path / "run.safetensors"
    save_run(model, file, torch.arange(1, 13)[None])
    check_intervention(Patch(file=str(file), positions=(1, 2), source=(4, 3)), model)
    check_intervention(Patch(file=str(file), positions=(1, 2), what="state"), model)


class Kept(Listener):
    """Calls as they were made, in float64."""

    def __init__(self):
        self.calls = []

    def observe(self, call, out):
        groups = call.q_BHQD.shape[1] // call.k_BKSD.shape[1]
        q_BHQD = call.q_BHQD.double()
        k_BHSD = call.k_BKSD.double().repeat_interleave(groups, 1)
        v_BHSD = call.v_BKSD.double().repeat_interleave(groups, 1)
        scores_BHQS = q_BHQD @ k_BHSD.mT / q_BHQD.shape[-1] ** 0.5
        seen_QS = torch.ones(scores_BHQS.shape[-2:], dtype=torch.bool)
        if call.is_causal:
            seen_QS = seen_QS.tril()
        weights_BHQS = scores_BHQS.masked_fill(~seen_QS, -torch.inf).softmax(-1)
        kept = {"q": q_BHQD, "k": k_BHSD, "v": v_BHSD, "seen": seen_QS, "weights": weights_BHQS}
        self.calls.append(SimpleNamespace(**kept))


@contextmanager
def outputs(modules, change):
    """What these layers give, or `change` of it and the number of the layer."""
    hooks = [
        module.register_forward_hook(lambda _module, _given, out, n=n: change(n, out))
        for n, module in enumerate(modules)
    ]
    yield
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("causal", [False, True])
def test_norms_and_cosines_of_every_head(causal):
    names = ("value_norm_by_head", "key_norm_by_head", "key_cosine", "head_output")
    model, kept = llama(causal=causal), Kept()
    with torch.no_grad(), trace(model, names) as recording, tapped(model, kept):
        model(IDS)
    for layer, call in enumerate(kept.calls):
        found = {name: recording.array(name)[0, :, layer] for name in names}
        expected = call.v.norm(dim=-1), call.k.norm(dim=-1)
        for name, norm_BHS in zip(names, expected, strict=False):
            assert_allclose(found[name], norm_BHS, rtol=1e-5)
        cosine_BHS = np.zeros(call.k.shape[:3])
        for place in np.ndindex(*cosine_BHS.shape):
            row, head, key = place
            of = [
                float(torch.cosine_similarity(call.q[row, head, i], call.k[row, head, key], dim=0))
                for i in range(len(call.seen))
                if call.seen[i, key]
            ]
            cosine_BHS[place] = np.mean(of)
        assert_allclose(found["key_cosine"], cosine_BHS, atol=1e-5)
        out_BHQD = call.weights @ call.v
        square_BHD = torch.linalg.svdvals(out_BHQD) ** 2
        assert_allclose(
            found["head_output"][..., 0], square_BHD.sum(-1) / square_BHD[..., 0], rtol=1e-4
        )
        mean_BH1D = out_BHQD.mean(2, keepdim=True)
        cosine_BHQ = torch.cosine_similarity(out_BHQD, mean_BH1D, dim=-1)
        assert_allclose(found["head_output"][..., 1], cosine_BHQ.mean(-1), atol=1e-5)


def test_under_a_window_only_the_queries_that_still_see_a_key_count():
    model, kept = tiny_model(), Kept()
    mask_id = model.config.mask_token_id
    canvas = Canvas.from_prompts([[5, 6, 7, 8, 9, 10]], new_tokens=6, mask_id=mask_id)
    names = ("key_cosine", "received_from_masked:least=1")
    near_QS = torch.ones(12, 12).triu(-1).tril(1)
    watched = trace(model, names, canvas=canvas, layers=0)
    edited = intervene(model, WindowAttention(radius=1))
    with torch.no_grad(), edited, watched as recording, tapped(model, kept):
        model(canvas.ids_BS)
    call = kept.calls[0]
    cosine_HQS = torch.cosine_similarity(call.q[0, :, :, None], call.k[0, :, None], dim=-1)
    cosine_HS = (cosine_HQS * near_QS).sum(1) / near_QS.sum(0)
    assert_allclose(recording.array(names[0])[0, 0, 0], cosine_HS, atol=1e-5)
    weights_HQS = (call.q @ call.k.mT / call.q.shape[-1] ** 0.5)[0]
    weights_HQS = weights_HQS.masked_fill(near_QS == 0, -torch.inf).softmax(-1)[:, 6:]
    # the prompt but its last token is seen by no masked query
    expected_HS = weights_HQS.sum(1) / near_QS[6:].sum(0) * near_QS.sum(0)
    assert expected_HS[:, :5].isnan().all() and expected_HS[:, 5:].isfinite().all()
    assert_allclose(recording.array(names[1])[0, 0, 0], expected_HS, atol=1e-5)


def test_outliers_of_hidden_states():
    model = llama()
    states = []
    keep = outputs(model.model.layers, lambda _n, out: states.append(out))
    with torch.no_grad(), keep, trace(model, ("outliers",)) as recording:
        model(IDS)
    for layer, state in enumerate(states):
        state_SD = state[0].double()
        apart_SD = state_SD - state_SD.mean(-1, keepdim=True)
        kurtosis = (apart_SD**4).mean(-1) / (apart_SD**2).mean(-1) ** 2
        # torch's median of an even number of channels is the lower one
        ratio = (
            state_SD.abs().amax(-1) / state_SD.abs().sort(-1).values[:, state_SD.shape[1] // 2 - 1]
        )
        found = recording.array("outliers")[0, 0, layer]
        assert_allclose(found, [kurtosis.mean(), ratio.mean()], rtol=1e-4)


def test_drift_from_step_to_step():
    model = llama()
    written_BS = IDS.clone()
    written_BS[:, 5] = 40
    kept = Kept()
    names = ("drift", "drift:of=value")
    with torch.no_grad(), trace(model, names) as recording, tapped(model, kept):
        model(IDS)
        model(written_BS)
    before, now = kept.calls[:2], kept.calls[2:]
    key, value = recording.array("drift"), recording.array("drift:of=value")
    assert np.isnan(key[0]).all() and np.isnan(value[0]).all()
    for layer in range(2):
        for found, name in ((key, "k"), (value, "v")):
            vectors = (getattr(call[layer], name) for call in (before, now))
            expected_BHS = 1 - torch.cosine_similarity(*vectors, dim=-1)
            assert_allclose(found[1, :, layer], expected_BHS, atol=1e-5)
    # below the first attention only the written token has another key
    assert (key[1, :, 0].max(1).argmax(-1) == 5).all()


def test_drift_is_from_the_first_forward_of_a_step_to_that_of_the_next():
    model, found = llama(), []
    for others in (0, 1):
        with torch.no_grad(), trace(model, ("drift",)) as recording:
            for step in range(3):
                model((IDS + step) % 50)
                # as the second forward of guidance
                for _ in range(others):
                    model(IDS.flip(1))
                recording.mark()
        found.append(recording.array("drift"))
    assert_allclose(*found)


def test_a_query_reads_its_neighbours_and_the_sinks_alone():
    model = llama()
    edit = BlockKeys(Others(TopKeys(2)), beyond=2, when="now")
    maps = tuple((0, layer, head) for layer in range(2) for head in range(4))
    with torch.no_grad(), trace(model) as plain:
        model(IDS)
    with torch.no_grad(), intervene(model, edit) as log, trace(model, maps=maps) as recording:
        model(IDS)
    place_S = torch.arange(12)
    far_QS = (place_S[:, None] - place_S).abs() > 2
    first_BHS = torch.from_numpy(plain.array("received")[0, :, 0])
    for head in range(4):
        map_BQS = torch.as_tensor(recording.map(0, 0, head))
        for row in range(2):
            kept_S = torch.isin(place_S, first_BHS[row, head].topk(2).indices)
            blocked_QS = far_QS & ~kept_S
            assert not map_BQS[row][blocked_QS].any()
            assert (map_BQS[row][~blocked_QS] > 0).all()
    assert (log.removals[0]["keys"] == 10).all()


def test_without_sinks_the_window_alone_is_left():
    model = llama()
    none = BlockKeys(Others(SinkKeys("gu:weight=0.99")), beyond=3, when="now")
    found = []
    for edit in (none, WindowAttention(radius=3)):
        with torch.no_grad(), intervene(model, edit):
            found.append(model(IDS).logits)
    torch.testing.assert_close(*found)


def test_patch_takes_keys_and_values_of_another_run(tmp_path):
    model = llama()
    one_BS, two_BS = torch.arange(1, 13)[None], torch.arange(20, 32)[None]
    file = tmp_path / "run.safetensors"
    save_run(model, file, two_BS)
    kept = Kept()
    edit = Patch(file=str(file), positions=(3,), source=(7,), what="value", layers=(1,), heads=(2,))
    with torch.no_grad(), tapped(model, kept):
        model(two_BS)
        model(one_BS)
        with intervene(model, edit):
            model(one_BS)
    other, own, edited = kept.calls[1], kept.calls[3], kept.calls[5]
    expected_BHSD = own.v.clone()
    expected_BHSD[:, 2, 3] = other.v[:, 2, 7]
    assert torch.equal(edited.v, expected_BHSD) and torch.equal(edited.k, own.k)
    with (
        refusing(r"\(12,\)"),
        intervene(model, Patch(file=str(file), positions=(12,))),
    ):
        model(one_BS)


def test_a_file_that_is_written_again_is_read_again(tmp_path):
    model, file, found = llama(), tmp_path / "run.safetensors", []
    for first in (1, 20):
        save_run(model, file, torch.arange(first, first + 12)[None], states=False)
        with torch.no_grad(), intervene(model, Patch(file=str(file), positions=(3,))):
            found.append(model(IDS).logits)
    assert not torch.equal(*found)


@pytest.mark.parametrize("layer", ["model.layers.0.self_attn", "another"])
def test_mean_values_of_another_model_are_refused(tmp_path, layer):
    file = tmp_path / "values.safetensors"
    save_file({layer: torch.zeros(3, 5)}, file)
    edit = BlockKeys(TopKeys(1), when="now", how=f"mean_value:file={file}")
    model = llama()
    with refusing("values of model.layers.0.self_attn must be"), intervene(model, edit):
        model(IDS)


@pytest.mark.parametrize("positions, source", [((), ()), ((1, 2), (3,))])
def test_patch_needs_a_source_for_each_position(positions, source):
    refused("one for each", Patch, file="run.safetensors", positions=positions, source=source)


def test_similarity_is_the_mean_over_all_pairs_of_layers_so_far():
    states_LBSD = torch.randn(4, 2, 5, 8, generator=torch.Generator().manual_seed(0))
    measure, memory = LayerSimilarity().measure, {}
    for layer, states_BSD in enumerate(states_LBSD):
        found_B3 = measure(StatesView(states_BSD, None, torch.arange(5), memory))
        if layer == 0:
            continue
        part = states_LBSD[: layer + 1].double()
        apart = (part - part.mean(0)) / part.std(0)
        for column, some in enumerate((part, part.mean(2, keepdim=True), apart)):
            pairs = [
                torch.cosine_similarity(some[a], some[b], dim=-1).mean(-1)
                for a in range(layer + 1)
                for b in range(a)
            ]
            torch.testing.assert_close(
                found_B3[:, column].double(), torch.stack(pairs).mean(0), rtol=1e-4, atol=1e-5
            )


def test_padding_does_not_count_in_the_similarity_of_layers():
    model, ids_1S = llama(), torch.arange(1, 13)[None]
    padded_1S = torch.nn.functional.pad(ids_1S, (0, 4))
    with torch.no_grad(), trace(model, ("layer_similarity",)) as recording:
        model(ids_1S)
        model(padded_1S, attention_mask=(padded_1S > 0).long())
    alone, padded = recording.array("layer_similarity")[:, 0]
    assert (alone[0] == 1).all() and (alone[1] < 1).all()
    np.testing.assert_allclose(padded, alone, atol=1e-5)


def test_patch_takes_hidden_states_of_another_model(tmp_path):
    model, other = llama(), llama()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.1)
    other_BS = torch.arange(20, 35)[None]
    file = tmp_path / "states.safetensors"
    save_run(other, file, other_BS)
    taken = []
    keep = outputs(other.double().model.layers, lambda _n, out: taken.append(out) or out)
    with torch.no_grad(), keep:
        other(other_BS)

    def change(layer, out_BSD):
        out_BSD = out_BSD.clone()
        if layer == 0:
            out_BSD[:, [3, 8]] = taken[0][:, [14, 2]]
        return out_BSD

    edit = Patch(file=str(file), positions=(3, 8), source=(14, 2), what="state", layers=(0,))
    with torch.no_grad(), intervene(model, edit) as log:
        found = model(IDS).logits
    with torch.no_grad(), outputs(model.double().model.layers, change):
        expected = model(IDS).logits
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
    assert [(one.layer, one.row, one.changed) for one in state_records(log)] == [
        (0, 0, 1.0),
        (0, 1, 1.0),
    ]
    for wrong in ({"positions": (12,), "source": (0,)}, {"positions": (0,), "source": (15,)}):
        edit = Patch(file=str(file), what="state", **wrong)
        with refusing(r"\((12|15),\)"), intervene(model, edit):
            model(IDS)
    with refusing(r"heads=\(1,\)"):
        Patch(file="run.safetensors", positions=(1,), what="state", heads=1)
