import pytest
import torch
from sink_toys import IDS, kv_model, logit_model

from sinklab.lab.training import freeze
from tiny_diffusion import tiny_model
from tiny_models import checkpointed


def test_a_new_kv_sink_takes_attention_and_adds_nothing():
    model = tiny_model(sink_kind="kv", sink_count=2)
    assert 0.2 < model.sink_keys.std() < 0.4
    assert torch.equal(model.sink_values, torch.zeros(2, 2, 2, 8))
    assert not torch.equal(model(IDS).logits, tiny_model()(IDS).logits)


@pytest.mark.parametrize(
    "model, tensors",
    [(kv_model(1), ["sink_keys", "sink_values"]), (logit_model(1), ["sink_logits"])],
)
def test_a_sink_survives_checkpointing_and_autocast(model, tensors):
    assert freeze(model, "sink") == tensors
    results = []
    for prepare in (torch.nn.Module.eval, checkpointed):
        prepare(model)
        model.zero_grad()
        model(IDS).logits.square().mean().backward()
        results.append([model.get_parameter(name).grad.clone() for name in tensors])
    for plain, again in zip(*results, strict=True):
        assert torch.allclose(plain, again, rtol=1e-5, atol=1e-9)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model(IDS).logits.float()
    assert (rounded - model(IDS).logits).abs().max() < 0.2 * rounded.abs().max()
