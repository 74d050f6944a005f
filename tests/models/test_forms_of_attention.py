"""Causal attention and a lone first token as forms of a diffusion model: its passes, its denoiser,
its training.
"""

import json

import pytest
import torch
from test_attention_in_blocks import texts
from torch.testing import assert_close

import sinklab
from refusals import refused
from sinklab.core.instrument import trace
from sinklab.core.subject import DiffusionLMConfig
from tiny_diffusion import save_tiny, tiny_backbone, tiny_model

VARIANTS = [
    {},
    {"sink_kind": "token", "sink_count": 2, "sink_side": "end"},
    {"sink_kind": "logit", "sink_count": 1},
    {"logit_shift": True, "sink_kind": "token", "sink_count": 1},
]
FORMS = ("causal", "first_alone")


def pair(form, **variant):
    """A model with this form of attention and its twin with full attention, of the same weights."""
    changed, full = tiny_model(attention=form, **variant).double(), tiny_model(**variant).double()
    full.load_state_dict(changed.state_dict())
    return changed, full


@pytest.mark.ring("lab")
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_a_causal_model_is_the_causal_pass_of_its_twin(variant, backend):
    model, full = pair("causal", **variant)
    *_, ids_BS = texts(model)
    model.set_attn_implementation(backend), full.set_attn_implementation(backend)
    with torch.no_grad():
        logits = model(ids_BS).logits
        assert_close(logits, full(ids_BS, causal=True).logits)
        changed = ids_BS.clone()
        changed[:, 7:] = 3
        assert_close(model(changed).logits[:, :7], logits[:, :7], rtol=0, atol=0)
        assert (full(changed).logits[:, :7] - full(ids_BS).logits[:, :7]).abs().max() > 1e-3


@pytest.mark.ring("lab")
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_a_lone_first_token_is_a_visible_mask(variant):
    model, full = pair("first_alone", **variant)
    *_, ids_BS = texts(model)
    visible_SS = torch.ones(12, 12, dtype=torch.bool)
    visible_SS[0, 1:] = False
    with torch.no_grad():
        expected = full(ids_BS, visible=visible_SS).logits
        assert_close(model(ids_BS).logits, expected)
        assert (full(ids_BS).logits - expected).abs().max() > 1e-3


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_does_not_change_a_row(form, side):
    model = tiny_model(1, attention=form, logit_shift=True).double()
    *_, ids_BS = texts(model, rows=1, length=9)
    padding_B = torch.zeros(1, 3, dtype=torch.int64)
    real_BS = torch.ones_like(ids_BS)
    parts = [(padding_B, ids_BS), (padding_B, real_BS)]
    padded_BS, mask_BS = (torch.cat(part if side == "left" else part[::-1], 1) for part in parts)
    columns = slice(3, None) if side == "left" else slice(0, 9)
    with torch.no_grad():
        assert_close(model(padded_BS, mask_BS).logits[:, columns], model(ids_BS).logits)


def test_a_trace_counts_the_keys_that_each_query_sees():
    model = tiny_model(attention="first_alone")
    with trace(model) as recording:
        model(texts(model)[2])
    assert recording.visible[0][0].tolist() == [12] + [11] * 11


@pytest.mark.ring("lab")
def test_a_folder_keeps_the_form_and_an_old_one_has_full_attention(tmp_path):
    folder = save_tiny(tmp_path / "model", attention="first_alone")
    assert sinklab.load(folder).model.config.attention == "first_alone"
    file = folder / "config.json"
    config = json.loads(file.read_text())
    del config["attention"]
    file.write_text(json.dumps(config))
    assert sinklab.load(folder).model.config.attention == "full"
    refused("attention", DiffusionLMConfig, tiny_backbone(), attention="left")
    refused(
        "blocks exclude one another",
        DiffusionLMConfig,
        tiny_backbone(),
        attention="causal",
        block_length=4,
    )
