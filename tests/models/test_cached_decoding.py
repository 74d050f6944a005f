"""Sessions of the model's denoiser: the lean road, the decoder's own, and the slow twin give the
same numbers.
"""

import pytest
import torch
from cached_twin import TwinSession
from torch import nn
from torch.testing import assert_close
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from refusals import refused
from sinklab.core.attention import watching
from sinklab.core.subject import DiffusionLM, DiffusionLMConfig
from sinklab.extras.fast import decoder as fast
from tiny_models import SIZES

# B batch, S canvas, M wanted, V vocabulary

MASK = 40
CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
VARIANTS = {
    "llama": {},
    "one key head": {"kv_heads": 1},
    "qwen2": {"kind": "qwen2"},
    "one layer": {"layers": 1},
    "sink": {"sink_kind": "token", "sink_count": 1},
    "two sinks at the end": {"sink_kind": "token", "sink_count": 2, "sink_side": "end"},
    "two sinks of keys and values": {"sink_kind": "kv", "sink_count": 2},
    "gate and sink, qwen3": {
        "kind": "qwen3",
        "gate": "elementwise",
        "gate_bias": 1.0,
        "sink_kind": "token",
        "sink_count": 1,
    },
    "shifted": {"logit_shift": True},
    "shifted qwen2 with a sink": {
        "kind": "qwen2",
        "logit_shift": True,
        "sink_kind": "zero",
        "sink_count": 1,
    },
    "gated logits": {"sink_kind": "logit", "sink_count": 2, "gate": "elementwise"},
    "causal, shifted, a sink": {
        "attention": "causal",
        "logit_shift": True,
        "sink_kind": "token",
        "sink_count": 1,
    },
    "first alone": {"attention": "first_alone"},
}


def build(kind="llama", kv_heads=2, layers=3, dtype=torch.float64, **settings):
    sizes = {"num_hidden_layers": layers, "num_key_value_heads": kv_heads, "head_dim": 8}
    backbone = CONFIGS[kind](vocab_size=MASK + 1, **SIZES | sizes)
    torch.manual_seed(1)
    model = DiffusionLM(DiffusionLMConfig(backbone, mask_token_id=MASK, **settings))
    for name, parameter in model.named_parameters():
        # Norms and biases start at one and zero, where a mistake with them does not show.
        if name.endswith(("norm.weight", "bias", "sink_values")):
            nn.init.normal_(parameter, mean=1.0, std=0.3)
    return model.to(dtype).eval()


def canvas(batch=1):
    """Ids with masks at the end, an attention mask when rows are padded on the left, and the first
    half of the masks.
    """
    ids_BS, attention_BS = torch.randint(0, MASK, (batch, 20)), None
    ids_BS[:, -12:] = MASK
    if batch > 1:
        attention_BS = torch.arange(20) >= torch.tensor([0, 4, 1][:batch])[:, None]
    return ids_BS, attention_BS, wanted_at(ids_BS, 8, 14)


def wanted_at(ids_BS, start, stop):
    wanted_BS = ids_BS == MASK
    wanted_BS[:, :start] = False
    wanted_BS[:, stop:] = False
    return wanted_BS


def script(ids_BS):
    """What a cached decoder does: (ids, wanted, columns) with tokens committed in between, in every
    form of columns.
    """
    calls = []
    start, length = int((ids_BS[0] == MASK).nonzero()[0]), ids_BS.shape[1]
    for columns in (
        None,
        slice(start, start + 6),
        slice(start, start + 6),
        slice(start + 1, length),
        "tensor",
        None,
    ):
        wanted_BS = wanted_at(ids_BS, start, start + 6)
        if columns == "tensor":
            columns = torch.tensor([2, *range(start, start + 6), length - 1])
        calls.append((ids_BS, wanted_BS, columns))
        # Rows commit at different places, so that they want different columns.
        ids_BS = ids_BS.clone()
        for row in wanted_BS.any(1).nonzero()[:, 0].tolist():
            place = wanted_BS[row].nonzero()[row % 2 and -1, 0]
            ids_BS[row, place] = torch.randint(0, MASK, ())
        if isinstance(columns, slice) and columns.start > start:
            ids_BS[:, length - 1] = 3
        if len(calls) == 2:
            # From here on the first column is filled in all rows, and the block goes on without it.
            ids_BS[:, start] = 5
    return calls


def agree(ours, theirs, tolerance):
    for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert one.shape == other.shape
        difference = (one.double() - other.double()).abs().max().item()
        assert difference < tolerance, f"call {index} is off by {difference}"


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    "batch, dtype, tolerance",
    [(3, torch.float64, 1e-12), (1, torch.float32, 3e-5)],
)
def test_both_roads_equal_the_slow_twin(variant, batch, dtype, tolerance):
    model = build(dtype=dtype, **VARIANTS[variant])
    ids_BS, attention_BS, _ = canvas(batch)
    calls = script(ids_BS)
    twin, quick, plain = (
        TwinSession(model, attention_BS),
        *(model.denoiser(attention_BS).begin() for _ in range(2)),
    )
    expected = [twin(*call) for call in calls]
    agree([quick(*call) for call in calls], expected, tolerance)
    with watching(model):
        agree([plain(*call) for call in calls], expected, tolerance)


def road(model, attention_BS=None):
    """Which road a session takes for a full evaluation and a window, and its logits."""
    ids_BS, _, wanted_BS = canvas()
    session = model.denoiser(attention_BS).begin()
    taken, own = [], fast.FastDecoder.__call__

    def spy(self, *args, **options):
        taken.append("lean")
        return own(self, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fast.FastDecoder, "__call__", spy)
        logits = [session(ids_BS, wanted_BS), session(ids_BS, wanted_BS, slice(8, 14))]
    assert_close(logits[0], logits[1])
    assert_close(logits[0], model.denoiser()(ids_BS, wanted_BS))
    return taken


def hooked(module):
    module.register_forward_hook(lambda *_: None)


def patched(module):
    forward = module.forward
    module.forward = lambda *args, **kwargs: forward(*args, **kwargs)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: hooked(model.model.layers[1]),
        lambda model: hooked(model.model.layers[2].mlp.down_proj),
        lambda model: model.model.layers[0].self_attn.register_forward_pre_hook(lambda *_: None),
        lambda model: patched(model.model.layers[0]),
        lambda model: model.set_attn_implementation("eager"),
        lambda model: model.train(),
    ],
)
def test_what_the_lean_road_does_not_know_takes_the_decoders_own(change):
    model = build()
    change(model)
    assert road(model) == []


def test_the_lean_road_is_taken_again_when_a_hook_has_gone():
    model = build()
    decoder, (ids_BS, _, wanted_BS), shapes = fast.FastDecoder(model), canvas(), []
    session = model.denoiser().begin()
    session(ids_BS, wanted_BS)
    handle = model.model.layers[1].register_forward_hook(
        lambda _, args, out: shapes.append(args[0].shape[1])
    )
    assert [decoder.is_faithful() for _ in range(2)] == [False, False]
    # a hook that comes later is seen
    session(ids_BS, wanted_BS, slice(8, 14))
    assert shapes == [6]
    handle.remove()
    assert [decoder.is_faithful() for _ in range(2)] == [True, True]
    with nn.modules.module.register_module_forward_pre_hook(lambda *_: None):
        assert not decoder.is_faithful()
    model.model.layers[1].compile(backend="eager")
    assert not fast.FastDecoder(model).is_faithful()


class Counted(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base, self.rows = base, []

    def forward(self, x):
        self.rows.append(x.shape[:-1].numel())
        return self.base(x)


def test_only_what_is_asked_for_is_computed():
    model = build()
    ids_BS, _, wanted_BS = canvas()
    wanted_BS[:, 9:11] = False
    model.lm_head = Counted(model.lm_head)
    for layer in model.model.layers:
        layer.mlp = Counted(layer.mlp)
        layer.self_attn.q_proj = Counted(layer.self_attn.q_proj)
        layer.self_attn.k_proj = Counted(layer.self_attn.k_proj)
    session = model.denoiser().begin()
    session(ids_BS, wanted_BS)
    store = session.store
    buffers = [tensor.data_ptr() for tensor in (*store._keys, *store._values)]
    session(ids_BS, wanted_BS, slice(8, 14))
    assert model.lm_head.rows == [4, 4]
    for layer, rows in zip(model.model.layers, [[20, 6], [20, 6], [4, 4]], strict=True):
        assert layer.mlp.rows == layer.self_attn.q_proj.rows == rows
        assert layer.self_attn.k_proj.rows == [20, 6]
    assert buffers == [tensor.data_ptr() for tensor in (*store._keys, *store._values)]


@pytest.mark.parametrize("is_cast", [False, True])
@pytest.mark.parametrize("variant", ["qwen2", "gate and sink, qwen3"])
def test_bfloat16_is_as_exact_on_the_lean_road(variant, is_cast):
    exact, rounded = build(**VARIANTS[variant]), build(dtype=torch.float32, **VARIANTS[variant])
    if not is_cast:
        rounded = rounded.to(torch.bfloat16)
    exact.load_state_dict(rounded.state_dict())
    ids_BS, attention_BS, _ = canvas(2)
    calls = script(ids_BS)
    truth, quick, plain = (
        model.denoiser(attention_BS).begin() for model in (exact, rounded, rounded)
    )
    true_MV = torch.cat([truth(*call) for call in calls])
    with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
        quick_MV = torch.cat([quick(*call) for call in calls])
        with watching(rounded):
            plain_MV = torch.cat([plain(*call) for call in calls])
    assert quick_MV.dtype == plain_MV.dtype == torch.bfloat16
    lean_error, plain_error = (
        (value.double() - true_MV).pow(2).mean().sqrt() for value in (quick_MV, plain_MV)
    )
    assert lean_error < 1.25 * plain_error


@pytest.mark.parametrize("variant", ["gate and sink, qwen3", "two sinks at the end", "shifted"])
def test_padding_changes_nothing_wherever_it_stands(variant):
    ids_BS, left_BS, wanted_BS = canvas(3)
    wanted_BS[1, 9:11] = False
    holes_BS = left_BS.clone()
    holes_BS[0, 16:] = holes_BS[2, 3:6] = False
    model = build(**VARIANTS[variant])
    for attention_BS in (left_BS, left_BS.flip(1), holes_BS):
        expected = model.denoiser(attention_BS, plain=True)(ids_BS, wanted_BS)
        found = model.denoiser(attention_BS)(ids_BS, wanted_BS)
        assert_close(found, expected, rtol=0, atol=1e-12)


def part(ids_BS):
    """The columns of the canvas but the first."""
    return ids_BS[:, 1:]


@pytest.mark.parametrize(
    "is_begun, call, message",
    [
        (False, lambda ids, wanted: (ids, wanted, slice(8, 14)), "columns=None"),
        (True, lambda ids, wanted: (part(ids), part(wanted), slice(8, 14)), r"20\) .*1, 19\)"),
        (True, lambda ids, wanted: (ids, wanted, slice(8, 13)), "columns"),
        (True, lambda ids, wanted: (ids, wanted, torch.tensor([8, 9, 11, 12, 13])), "columns"),
        (False, lambda ids, wanted: (ids, part(wanted)), "bool of shape"),
    ],
)
def test_an_evaluation_that_cannot_be_is_refused(is_begun, call, message):
    ids_BS, _, wanted_BS = canvas()
    session = build(sink_kind="token", sink_count=1).denoiser().begin()
    if is_begun:
        session(ids_BS, wanted_BS)
    refused(message, session, *call(ids_BS, wanted_BS))
    # another canvas may begin
    session(part(ids_BS), part(wanted_BS))
    session(part(ids_BS), part(wanted_BS), slice(7, 13))


def test_after_a_failure_everything_is_computed_again():
    model = build(sink_kind="token", sink_count=1)
    ids_BS, _, wanted_BS = canvas()
    call, session = (ids_BS, wanted_BS), model.denoiser().begin()
    session(*call)
    handle = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        session(*call, slice(8, 14))
    handle.remove()
    refused("nothing", session, *call, slice(8, 14))
    padding = model.denoiser(torch.zeros_like(ids_BS)).begin()
    refused("one token", padding, *call)
