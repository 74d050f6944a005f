import pytest
import torch
from sink_toys import IDS, kv_model, logit_model

from sinklab.lab.checkpoints import describe, load
from sinklab.lab.training import freeze
from tiny_diffusion import tiny_model
from tiny_models import checkpointed


def test_a_new_kv_sink_takes_attention_and_adds_nothing():
    model = tiny_model(sink_kind="kv", sink_count=2)
    assert 0.2 < model.sink_keys.std() < 0.4
    assert torch.equal(model.sink_values, torch.zeros(2, 2, 2, 8))
    assert not torch.equal(model(IDS).logits, tiny_model()(IDS).logits)


def test_a_kv_sink_is_saved_loaded_and_counted(tmp_path):
    model = kv_model(2, gate="elementwise")
    model.save_pretrained(tmp_path)
    info = describe(tmp_path)
    assert info.sink == "2 (kv, front)"
    assert info.parameters == sum(p.numel() for p in model.parameters())
    assert (
        load(tmp_path, dtype="bfloat16", device_map={"": "cpu"}).model.sink_keys.dtype
        == torch.bfloat16
    )
    token = load(tmp_path, sink_kind="token", sink_count=1).model
    assert [name for name in token.state_dict() if name.startswith("sink")] == ["sink_embeddings"]
    parts = ("embed_tokens", "layers.0", "layers.1", "norm", "rotary_emb")
    split = {"lm_head": "cpu"} | {f"model.{part}": "cpu" for part in parts}
    assert torch.equal(load(tmp_path, device_map=split).model(IDS).logits, model(IDS).logits)


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
