"""The way through transformers' attention functions: what is recorded is what the way through SDPA
records.
"""

# B batch, H query heads, K key heads, Q queries, S keys, D head dim
from __future__ import annotations

import pytest
import torch
import transformers
from probed import IDS, PADDED
from torch import nn
from torch.testing import assert_close

from refusals import refused, refusing
from sinklab.core.instrument import (
    BlockKeys,
    Positions,
    TopKeys,
    intervene,
    trace,
)
from sinklab.core.instrument.routes import ModelTap
from sinklab.core.registry import statistics
from tiny_models import llama

LAYERS = [f"model.layers.{number}.self_attn" for number in (0, 1)]
ALL = ["received", "value_norm", "row_entropy", "last_row"]
if "massive_activations" in statistics:
    ALL.append("massive_activations")


def recorded(model, **given):
    with (
        trace(model, ALL) as recording,
        intervene(model, BlockKeys(TopKeys(1))) as log,
        torch.no_grad(),
    ):
        logits = model(IDS, **given).logits
        logits = model(IDS, **given).logits
    arrays = {name: torch.as_tensor(recording.array(name)) for name in ALL}
    return logits, arrays | {"gone": log.removals[-1].columns_BLHM}


def test_both_ways_record_the_same(monkeypatch):
    model = llama()
    logits, narrow = recorded(model, attention_mask=PADDED)
    # every model is tapped by hooks and a mode over its whole forward
    monkeypatch.setattr("sinklab.core.instrument.routes.interface_configs", lambda modules: [])
    others, wide = recorded(model, attention_mask=PADDED)
    assert torch.equal(logits, others)
    for name, found in wide.items():
        assert_close(narrow[name], found, rtol=0, atol=0, equal_nan=True)


def test_nothing_but_attention_is_heard_of_a_model_of_transformers(
    monkeypatch,
):
    heard, hear = [], ModelTap.__torch_function__

    def listen(self, func, *given):
        heard.append(func)
        return hear(self, func, *given)

    monkeypatch.setattr(ModelTap, "__torch_function__", listen)
    model = llama()
    with trace(model), torch.no_grad():
        assert not model.model.layers[0].self_attn._forward_hooks
        model(IDS)
    assert torch.nn.functional.linear not in heard and len(heard) <= 12 * 2


def test_the_model_keeps_its_attention():
    model = llama()
    plain = model(IDS).logits
    with trace(model) as outer:
        with trace(model.model):
            model(IDS)
        assert torch.equal(model(IDS).logits, plain)
    assert model.config._attn_implementation == "sdpa" and len(outer.received) == 2


@pytest.mark.ring("lab")
@pytest.mark.parametrize("causal, kv_heads", [(True, 2), (False, 4)])
def test_eager_attention_is_read_as_sdpa_is(causal, kv_heads):
    model, found, real = llama(causal=causal, kv_heads=kv_heads), [], PADDED.bool()
    for name in ("sdpa", "eager"):
        model.set_attn_implementation(name)
        with torch.no_grad():
            plain = model(IDS, attention_mask=PADDED).logits
            with trace(model, ("received", "row_entropy")) as recording:
                assert torch.equal(model(IDS, attention_mask=PADDED).logits, plain)
            assert torch.equal(model(IDS, attention_mask=PADDED).logits, plain)
        assert model.config._attn_implementation == name and recording.layers == LAYERS
        entropy_BSLH = recording.row_entropy[0].permute(0, 3, 1, 2)[real]
        found.append((recording.received[0], entropy_BSLH, recording.visible[0]))
    for one, other in zip(*found, strict=True):
        assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.ring("lab")
def test_edits_of_eager_attention():
    model, given = llama(), {"attention_mask": PADDED}
    logits, gone = [], []
    for name in ("sdpa", "eager"):
        model.set_attn_implementation(name)
        with (
            intervene(
                model, BlockKeys(TopKeys(2)), BlockKeys(Positions((5,)), when="now", heads=(1, 2))
            ) as log,
            torch.no_grad(),
        ):
            model(IDS, **given)
            logits.append(model(IDS, **given).logits[PADDED.bool()])
        gone.append([removal.columns_BLHM for removal in log.removals])
        with torch.no_grad():
            untouched = model(IDS, **given).logits[PADDED.bool()]
        assert (untouched - logits[-1]).abs().max() > 1e-2
    assert all(torch.equal(one, other) for one, other in zip(*gone, strict=True))
    assert_close(*logits, rtol=1e-4, atol=1e-4)


@pytest.mark.ring("lab")
def test_eager_attention_that_ignores_its_mask_is_refused_where_a_key_is_blocked():
    small = {"hidden_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2, "mlp_ratio": 2}
    sizes = {"patch_size": 16, "crop_size": 32, "frames_per_clip": 4, "tubelet_size": 2}
    predictor = {f"pred_{name}": size for name, size in small.items() if name != "mlp_ratio"}
    config = transformers.VJEPA2Config(**small, **sizes, **predictor)
    encoder = transformers.VJEPA2Model(config).eval().encoder
    encoder.config._attn_implementation = "eager"
    frames = torch.randn(1, 4, 3, 32, 32)
    with torch.no_grad(), trace(encoder) as recording:
        encoder(frames)
    assert len(recording.received) == 1
    with refusing("ignores its mask"), intervene(encoder, BlockKeys(TopKeys(2), when="now")):
        encoder(frames)


@pytest.mark.ring("lab")
def test_sinks_that_a_function_reads_from_its_module_are_refused_by_name():
    model = llama(attention="eager")
    # as MiMoV2Flash
    model.model.layers[0].self_attn.sinks = nn.Parameter(torch.zeros(4))
    with refusing("LlamaAttention .*'sinks'"), trace(model):
        model(IDS)


@pytest.mark.parametrize("base", ["flex_attention", "flash_attention_2", "hub/kernel"])
def test_other_attention_functions_are_refused_by_name(base):
    model = llama()
    model.config._attn_implementation_internal = base
    for watch in (trace, intervene):
        with refusing(rf'{base}.*set_attn_implementation\("sdpa"\)'), watch(model):
            pass
    assert model.config._attn_implementation == base


def test_a_forward_that_is_not_seen_is_refused():
    functions = transformers.AttentionInterface
    functions.register("unread", functions._global_mapping["sdpa"])
    model = llama()
    with trace(model) as recording:
        model(IDS)
        model.set_attn_implementation("unread")
        refused("forward 2 made no attention", model, IDS)
    assert len(recording.received) == 1 and model.config._attn_implementation == "unread"
    del functions._global_mapping["unread"]


def test_transformers_has_its_own_functions_again_after_the_last_block():
    own = transformers.AttentionInterface.get_interface
    with trace(llama(), allow_empty=True):
        assert transformers.AttentionInterface.get_interface is not own
        with trace(llama(), allow_empty=True):
            pass
        assert transformers.AttentionInterface.get_interface is not own
    assert transformers.AttentionInterface.get_interface is own
