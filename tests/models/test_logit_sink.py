"""A sink that is a logit per head: against gpt-oss's own attention."""

from types import SimpleNamespace

import pytest
import torch
from sink_toys import IDS, logit_model
from torch.nn import functional as F
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from sinklab.core.instrument import BlockKeys, TopKeys, intervene, trace
from tiny_diffusion import tiny_model

pytestmark = pytest.mark.ring("lab")


def calls_of(model, *args, **kwargs):
    """Arguments and output of every attention call of a pass."""
    own, seen = F.scaled_dot_product_attention, []

    def spy(query, key, value, **options):
        out = own(query, key, value, **options)
        seen.append((query, key, value, options, out))
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", spy)
        model(*args, **kwargs)
    return seen


@pytest.mark.parametrize("causal", [False, True])
def test_a_logit_sink_is_that_of_gpt_oss(causal):
    model = logit_model().double()
    hidden = torch.full((12, 12), -torch.inf).triu(1) if causal else None
    for layer, (q, k, v, options, out) in enumerate(calls_of(model, IDS, causal=causal)):
        groups = len(q[0]) // len(k[0])
        module = SimpleNamespace(
            sinks=model.sink_logits[layer, :, 0], num_key_value_groups=groups, training=False
        )
        assert k.shape[2] == 13 and not k[:, :, 0].any() and not v[:, :, 0].any()
        theirs, _ = eager_attention_forward(
            module, q, k[:, :, 1:], v[:, :, 1:], hidden, options["scale"]
        )
        assert torch.allclose(out.transpose(1, 2), theirs, atol=1e-12)


@pytest.mark.ring("extras")
@pytest.mark.parametrize("count", [1, 2])
def test_the_fast_decoder_adds_the_logits(count):
    model = logit_model(count)
    real = torch.ones_like(IDS, dtype=torch.bool)
    real[1, :3] = False
    for mask, wanted in ((None, IDS > 0), (real.long(), real)):
        fast, slow = model.denoiser(mask), model.denoiser(mask, plain=True)
        assert fast.is_fast and not slow.is_fast
        assert torch.allclose(fast(IDS, wanted), slow(IDS, wanted), atol=2e-4)


def test_a_trace_shows_what_the_sink_receives_and_an_edit_takes_it_away():
    model, plain = logit_model(), tiny_model()
    with trace(model, ("received",)) as recording, torch.no_grad():
        model(IDS)
    calls = [
        (q, k.repeat_interleave(len(q[0]) // len(k[0]), 1), options)
        for q, k, _, options, _ in calls_of(model, IDS)
    ]
    weights = [
        (q @ k.mT * options["scale"] + options["attn_mask"]).softmax(-1) for q, k, options in calls
    ]
    dense = torch.stack(weights, 1).sum(-2)
    assert torch.allclose(recording.received[0].float(), dense, atol=1e-4)
    assert recording.prefix == 1 and dense[..., 0].std() > 0.2
    with torch.no_grad():
        model.sink_logits.fill_(8.0)
        with intervene(model, BlockKeys(TopKeys(1), when="now")):
            hidden = model(IDS).logits
    assert torch.allclose(hidden, plain(IDS).logits, atol=1e-4)
