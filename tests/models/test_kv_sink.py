import pytest
import torch
from cached_twin import TwinSession
from sink_toys import IDS, MASK, kv_model
from transformers import DynamicCache

from sinklab.lab.checkpoints import describe, load
from sinklab.lab.training import freeze
from tiny_diffusion import tiny_model


def with_cache(model, ids):
    """The decoder with a stock cache filled by hand: what a kv sink must equal."""
    cache = DynamicCache(config=model.config.backbone)
    for layer, (keys_NGD, values_NGD) in enumerate(
        zip(model.sink_keys, model.sink_values, strict=True)
    ):
        rows = [
            one.transpose(0, 1)[None].repeat(len(ids), 1, 1, 1) for one in (keys_NGD, values_NGD)
        ]
        cache.update(*rows, layer)
    positions = torch.arange(ids.shape[1])[None]
    states = model.model(
        ids, past_key_values=cache, position_ids=positions, is_causal=False
    ).last_hidden_state
    return model.lm_head(states)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_kv_sink_is_a_cache_in_front_of_the_text(count):
    model, plain = kv_model(count).double(), tiny_model().double()
    assert model.sink_keys.shape == model.sink_values.shape == (2, count, 2, 8)
    found, twin = model(IDS).logits, with_cache(model, IDS)
    assert torch.equal(found, twin)
    assert not torch.allclose(found, plain(IDS).logits, atol=1e-2)
    weights = torch.randn(
        found.shape, dtype=found.dtype, generator=torch.Generator().manual_seed(3)
    )
    gradients = [
        torch.autograd.grad((one * weights).sum(), [model.sink_keys, model.sink_values])
        for one in (found, twin)
    ]
    for ours, theirs in zip(*gradients, strict=True):
        assert ours.abs().max() > 0
        assert (ours - theirs).abs().max() <= 1e-12 * theirs.abs().max()


def test_a_new_kv_sink_takes_attention_and_adds_nothing():
    model, plain = tiny_model(sink_kind="kv", sink_count=2), tiny_model()
    ours = model.state_dict()
    assert 0.2 < model.sink_keys.std() < 0.4
    assert torch.equal(model.sink_values, torch.zeros(2, 2, 2, 8))
    assert all(torch.equal(ours[name], tensor) for name, tensor in plain.state_dict().items())
    assert not torch.equal(model(IDS).logits, plain(IDS).logits)


def test_a_kv_sink_takes_no_position():
    model = kv_model(4, context=16)
    assert (model.config.text_positions, model.config.text_start) == (16, 0)
    assert model(torch.full((1, 16), 5)).logits.isfinite().all()
    with pytest.raises(ValueError, match="sink_side must be 'front'"):
        tiny_model(sink_kind="kv", sink_count=1, sink_side="end")
    with pytest.raises(ValueError, match="kv, logit, but is 'kvs'"):
        tiny_model(sink_kind="kvs", sink_count=1)


def test_padding_does_not_change_what_a_kv_sink_does():
    model = kv_model(2)
    padded = torch.nn.functional.pad(IDS[:1], (3, 0), value=1)
    mask = torch.nn.functional.pad(torch.ones(1, 12, dtype=torch.long), (3, 0))
    both = torch.cat([padded, torch.nn.functional.pad(IDS[1:2], (0, 3), value=1)])
    masks = torch.cat([mask, mask.flip(1)])
    logits = model(both, masks).logits
    assert torch.allclose(logits[0, 3:], model(IDS[:1]).logits[0], atol=1e-5)
    assert torch.allclose(logits[1, :12], model(IDS[1:2]).logits[0], atol=1e-5)


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_cached_decoding_keeps_a_kv_sink(shift, padded):
    model = kv_model(2, logit_shift=shift).double()
    ids = IDS[:2].clone()
    ids[:, 4:] = MASK
    attention = torch.ones_like(ids, dtype=torch.bool)
    attention[1, :2] = not padded
    session, twin = model.denoiser(attention).begin(), TwinSession(model, attention)
    for committed, columns in enumerate((None, slice(4, 8), torch.tensor([2, 4, 5, 11]), None)):
        wanted = torch.zeros_like(attention)
        wanted[:, 4:6] = True
        logits = twin(ids, wanted, columns)
        assert logits.std() > 0.1
        assert torch.allclose(session(ids, wanted, columns), logits, atol=1e-5)
        ids = ids.clone()
        ids[:, 4:6] = 50 + committed


@pytest.mark.parametrize("cache", ["none", "prefix", "dual"])
def test_a_kv_sink_takes_part_in_writing(cache):
    decoding = {"max_new_tokens": 8, "block_length": 4, "steps": 8, "cache": cache}
    model = kv_model(2)
    written = model.generate(IDS[:2, :4], **decoding)
    assert torch.equal(model.generate(IDS[:2, :4], **decoding), written)
    with torch.no_grad():
        model.sink_values.zero_()
    assert not torch.equal(model.generate(IDS[:2, :4], **decoding), written)


def test_a_kv_sink_is_saved_loaded_and_counted(tmp_path):
    model = kv_model(2, gate="elementwise")
    model.save_pretrained(tmp_path)
    again = load(tmp_path).model
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    info = describe(tmp_path)
    assert info.sink == "2 (kv, front)"
    assert info.parameters == sum(p.numel() for p in model.parameters())
    assert (
        load(tmp_path, dtype="bfloat16", device_map={"": "cpu"}).model.sink_keys.dtype
        == torch.bfloat16
    )
    plain = load(tmp_path, sink_kind="none", sink_count=0).model
    assert not [name for name in plain.state_dict() if name.startswith("sink")]
    token = load(tmp_path, sink_kind="token", sink_count=1).model
    assert [name for name in token.state_dict() if name.startswith("sink")] == ["sink_embeddings"]
    split = {
        "model.embed_tokens": "cpu",
        "lm_head": "cpu",
        "model.layers.0": "cpu",
        "model.layers.1": "cpu",
    }
    split |= {"model.norm": "cpu", "model.rotary_emb": "cpu"}
    assert torch.equal(load(tmp_path, device_map=split).model(IDS).logits, model(IDS).logits)


def test_a_kv_sink_survives_checkpointing_and_autocast():
    model = kv_model(1)
    freeze(model, "sink")
    results = []
    for checkpointed in (False, True):
        if checkpointed:
            model.train()
            enable = (
                getattr(model, "activation_checkpointing_enable", None)
                or model.gradient_checkpointing_enable
            )
            enable({"use_reentrant": False})
        model.zero_grad()
        model(IDS).logits.square().mean().backward()
        results.append((model.sink_keys.grad.clone(), model.sink_values.grad.clone()))
    for plain, again in zip(*results, strict=True):
        assert torch.allclose(plain, again, rtol=1e-5, atol=1e-9)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model(IDS).logits.float()
    assert (rounded - model(IDS).logits).abs().max() < 0.2 * rounded.abs().max()
