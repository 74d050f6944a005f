import pytest
import torch
from torch.overrides import TorchFunctionMode
from transformers import (
    AutoModelForMaskedLM,
    Glm4MoeConfig,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from masked_twin import masked_form
from refusals import refused
from sinklab.core.subject import DiffusionLM, DiffusionLMConfig
from tiny_models import SIZES, checkpointed

VOCAB, MASK = 61, 60
ATTENTION = pytest.mark.parametrize("impl", ["sdpa", "eager"])
SINKS = [
    ("none", 0, "front"),
    *[
        (kind, count, side)
        for kind in ("token", "zero")
        for count in (1, 2, 4)
        for side in ("front", "end")
    ],
]
FAMILIES = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "qwen3_moe": Qwen3MoeConfig,
    "glm4_moe": Glm4MoeConfig,
}
EXPERTS = {"moe_intermediate_size": 12, "num_experts_per_tok": 2}
EXPERTS = {
    "qwen3_moe": {**EXPERTS, "num_experts": 4},
    "glm4_moe": {**EXPERTS, "n_routed_experts": 4},
}


def backbone(family="llama", **fields):
    sizes = {**SIZES, "vocab_size": VOCAB}
    if family == "qwen3":
        sizes["head_dim"] = 8
    return FAMILIES[family](**{**sizes, **EXPERTS.get(family, {}), **fields})


def build(
    sink=("none", 0, "front"),
    *,
    family="llama",
    impl="sdpa",
    dtype=torch.float64,
    std=0.3,
    **fields,
):
    kind, count, side = sink
    torch.manual_seed(0)
    if family in EXPERTS and dtype == torch.float64:
        # torch multiplies groups in narrower types alone
        fields["experts_implementation"] = "eager"
    config = DiffusionLMConfig(
        backbone(family, initializer_range=std),
        sink_kind=kind,
        sink_count=count,
        sink_side=side,
        mask_token_id=MASK,
        **fields,
    )
    model = DiffusionLM(config)
    model.set_attn_implementation(impl)
    return model.to(dtype).eval()


def ragged(batch=3, length=9):
    ids = torch.randint(0, MASK, (batch, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0  # left padding
    mask[2, -2:] = 0  # right padding
    return ids, mask


class TrueFloat64(TorchFunctionMode):
    """Keeps float64 where transformers' RMSNorm, rotary tables and routers go through float32, so
    that 1e-12 can be asked for.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        narrows = (torch.Tensor.to, torch.Tensor.type)
        if func in narrows and args[0].dtype == torch.float64 and args[1:2] == (torch.float32,):
            return args[0]
        if func is torch.nn.functional.softmax and args[0].dtype == torch.float64:
            kwargs = {**kwargs, "dtype": None}
        return func(*args, **kwargs)


def gradients(model, loss):
    """Gradients of a loss by parameter; without those that it does not reach."""
    model.zero_grad()
    loss.backward()
    return {
        name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None
    }


def assert_same_gradients(ours, theirs, tolerance):
    assert ours.keys() == theirs.keys()
    for name, grad in theirs.items():
        # relative to the size of the gradient: sums over positions are not of order one
        assert (ours[name] - grad).abs().max() <= tolerance * max(1.0, grad.abs().max()), name


def compare(model, ids, mask, tolerance):
    """Hold a model to the masked form, in outputs and gradients."""
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    weights = torch.randn(
        real.sum(), VOCAB, dtype=model.dtype, generator=torch.Generator().manual_seed(2)
    )
    with TrueFloat64():
        fast, slow = model(ids, mask).logits[real], masked_form(model, ids, mask)[real]
        fast_grads, slow_grads = (gradients(model, (one * weights).mean()) for one in (fast, slow))
    assert fast.std() > 0.1
    assert (fast - slow).abs().max() <= tolerance * max(1.0, slow.abs().max())
    assert_same_gradients(fast_grads, slow_grads, tolerance)
    if model.config.sink_count:
        assert fast_grads["sink_embeddings"].abs().max() > 0


@pytest.mark.parametrize(("impl", "padded"), [("sdpa", False), ("sdpa", True), ("eager", True)])
@pytest.mark.parametrize("sink", SINKS, ids=lambda s: f"{s[0]}-{s[1]}-{s[2]}")
def test_prefix_equals_the_masked_form(sink, impl, padded):
    ids, mask = ragged()
    mask = mask if padded else None
    compare(build(sink, impl=impl), ids, mask, 1e-12)
    if sink == SINKS[-1]:
        compare(build(sink, impl=impl, dtype=torch.float32, std=0.1), ids, mask, 1e-6)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("gate", ["none", "elementwise"])
def test_every_backbone_and_gate(family, gate):
    ids, mask = ragged()
    compare(build(("token", 2, "front"), family=family, gate=gate), ids, mask, 1e-12)


def test_reentrant_checkpointing_is_refused():
    refused("use_reentrant=False", checkpointed, build(), use_reentrant=True)


class SeenMasks(TorchFunctionMode):
    """Notes the mask and the lengths of every attention call."""

    def __init__(self):
        self.calls = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.nn.functional.scaled_dot_product_attention:
            lengths = args[0].shape[2], args[1].shape[2]
            self.calls.append((*lengths, kwargs.get("attn_mask"), kwargs.get("is_causal")))
        return func(*args, **(kwargs or {}))


def test_no_mask_is_built_without_padding():
    model = build(("token", 2, "front"), dtype=torch.float32)
    ids, mask = ragged()
    with SeenMasks() as seen:
        model(ids)
        model(ids, torch.ones_like(ids))
    text = [call for call in seen.calls if call[0] == 9]
    assert len(text) == 2 * model.config.backbone.num_hidden_layers
    assert all(call[1:3] == (11, None) and not call[3] for call in text)
    with SeenMasks() as seen:
        model(ids, mask)
    assert {call[2].shape for call in seen.calls if call[0] == 9} == {(3, 1, 1, 11)}


@pytest.mark.parametrize("sink", [("none", 0, "front"), ("token", 1, "front")])
@ATTENTION
def test_causal_equals_the_backbone_before_conversion(sink, impl):
    """Without a sink the causal reading is the autoregressive model itself."""
    torch.manual_seed(0)
    ar = LlamaForCausalLM(backbone()).eval()
    kind, count, side = sink
    settings = {"sink_kind": kind, "sink_count": count, "sink_side": side, "mask_token_id": MASK}
    model = DiffusionLM(DiffusionLMConfig(backbone(), **settings)).eval()
    model.load_state_dict(ar.state_dict(), strict=False)
    model.set_attn_implementation(impl)
    ids, _ = ragged()
    difference = (model(ids, causal=True).logits - ar(ids).logits).abs().max()
    assert difference <= 1e-4 if count == 0 else difference > 1e-3


def test_shift_moves_outputs_right_by_one():
    plain, shifted = build(), build(logit_shift=True)
    ids, _ = ragged()
    out = shifted(ids).logits
    assert torch.allclose(out[:, 1:], plain(ids).logits[:, :-1], atol=1e-12)
    assert torch.allclose(out[:, 0], plain(ids).logits[:, 0], atol=1e-12)


def test_a_gate_that_is_new_or_that_a_checkpoint_lacks_starts_open(tmp_path):
    build().save_pretrained(tmp_path)
    config = DiffusionLMConfig.from_pretrained(tmp_path, gate="elementwise", gate_bias=4.0)
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path, config=config)
    for model in (loaded, build(gate="elementwise", gate_bias=4.0)):
        assert len(model.gates) == 2
        for gate in model.gates:
            assert (gate.bias == 4.0).all() and gate.weight.std() > 0


@pytest.mark.parametrize("plain", [True, False])
def test_denoiser_equals_forward_and_computes_the_sink_once(plain):
    model = build(("token", 2, "end"), dtype=torch.float32)
    ids, mask = ragged()
    wanted = torch.rand(ids.shape) < 0.5
    denoiser = model.denoiser(mask, plain=plain)
    with SeenMasks() as seen:
        first = denoiser(ids, wanted)
        second = denoiser(ids, wanted)
    assert torch.equal(first, second)
    expected = model(ids, mask, logits_to_keep=wanted).logits
    torch.testing.assert_close(first, expected, rtol=1e-5, atol=1e-5)
    # the fast decoder is the model's own forward up to rounding, the plain one bit for bit
    assert torch.equal(first, expected) or not plain
    layers = model.config.backbone.num_hidden_layers
    assert len(seen.calls) == 3 * layers  # one pass of the sinks, two of the text


@pytest.mark.parametrize(
    "given, fields, message",
    [
        (backbone(), {"sink_kind": "tokens", "sink_count": 1}, "'token'"),
        (backbone(), {"sink_kind": "token", "sink_count": 3}, "0, 1, 2, 4"),
        (backbone(), {"sink_kind": "token"}, "sink_count"),
        (backbone(), {"sink_side": "left"}, "front, end"),
        pytest.param(
            backbone(),
            {"sink_kind": "kv", "sink_count": 1, "sink_side": "end"},
            "must be 'front'",
            marks=pytest.mark.ring("lab"),
        ),
        (backbone(), {"gate": "sigmoid"}, "none, elementwise"),
        (backbone(), {"mask_token_id": VOCAB}, "vocabulary"),
        (GPT2Config(), {}, "llama, qwen2, qwen3"),
        (None, {}, "backbone"),
        (
            backbone("qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=1),
            {},
            "sliding",
        ),
    ],
)
def test_config_refuses_by_name(given, fields, message):
    refused(message, DiffusionLMConfig, given, **{"mask_token_id": MASK, **fields})


def test_bad_input_is_refused():
    model = build(("token", 1, "front"), dtype=torch.float32)
    ids, mask = ragged()
    for call, message in [
        (lambda: model(torch.zeros(1, 64, dtype=torch.long)), "context is 63"),
        (lambda: model(ids, mask[:, :-1]), "attention_mask must be of shape .* as input_ids"),
        (lambda: model(ids, torch.zeros_like(mask)), "not padding"),
        (lambda: model(ids[:, :0]), "S ≥ 1"),
        (lambda: model(ids, logits_to_keep=mask), "logits_to_keep must be bool"),
    ]:
        refused(message, call)
    with pytest.raises(TypeError, match="label_ids"):
        model(ids, label_ids=ids)
