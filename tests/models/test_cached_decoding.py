"""Sessions of the model's denoiser: the lean road, the decoder's own, and the slow twin give the
same numbers.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from cached_twin import TwinSession
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from sinklab.core.attention import watching
from sinklab.core.models import DiffusionLM, DiffusionLMConfig
from sinklab.core.sampling import Canvas, EvenQuota, Factor, Threshold, denoise, guided
from sinklab.extras.fast import decoder as fast
from sinklab.extras.fast import onednn
from sinklab.lab.caching import DualCache, PrefixCache
from tiny_diffusion import tiny_model

# B batch, S canvas, M wanted, V vocabulary

MASK = 40
CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
VARIANTS = {
    "llama": {},
    "heads of their own": {"kv_heads": 4},
    "one key head": {"kv_heads": 1},
    "qwen2": {"kind": "qwen2"},
    "qwen3": {"kind": "qwen3"},
    "one layer": {"layers": 1},
    "sink": {"sink_kind": "token", "sink_count": 1},
    "two sinks at the end": {"sink_kind": "token", "sink_count": 2, "sink_side": "end"},
    "four zero sinks": {"sink_kind": "zero", "sink_count": 4},
    "gate": {"gate": "elementwise"},
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
}


def build(kind="llama", kv_heads=2, layers=3, dtype=torch.float64, **settings):
    backbone = CONFIGS[kind](
        vocab_size=MASK + 1,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        head_dim=8,
        max_position_embeddings=64,
        initializer_range=0.3,
    )
    torch.manual_seed(1)
    model = DiffusionLM(DiffusionLMConfig(backbone, mask_token_id=MASK, **settings))
    for name, parameter in model.named_parameters():
        # Norms and biases start at one and zero, where a mistake with them does not show.
        if name.endswith(("norm.weight", "bias")):
            nn.init.normal_(parameter, mean=1.0, std=0.3)
    return model.to(dtype).eval()


def canvas(batch=1, padding=(0, 4, 1), length=20, masks=12):
    """Ids with masks at the end, and an attention mask when rows are padded on the left."""
    ids_BS = torch.randint(0, MASK, (batch, length))
    ids_BS[:, -masks:] = MASK
    if batch == 1:
        return ids_BS, None
    return ids_BS, torch.arange(length) >= torch.tensor(padding[:batch])[:, None]


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


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 3e-5)])
def test_both_roads_equal_the_slow_twin(variant, batch, dtype, tolerance):
    model = build(dtype=dtype, **VARIANTS[variant])
    ids_BS, attention_BS = canvas(batch)
    calls = script(ids_BS)
    twin, quick, plain = (
        TwinSession(model, attention_BS),
        *(model.denoiser(attention_BS).begin() for _ in range(2)),
    )
    expected = [twin(*call) for call in calls]
    agree([quick(*call) for call in calls], expected, tolerance)
    with watching(model):
        agree([plain(*call) for call in calls], expected, tolerance)


@pytest.mark.parametrize("variant", ["qwen2", "gate and sink, qwen3"])
def test_the_lean_road_by_onednn_equals_the_slow_twin(variant, monkeypatch):
    """Weights here are too small for it to be worth it."""
    calls, own = [], onednn._onednn() or F.linear
    monkeypatch.setattr(onednn, "WORTHWHILE_WEIGHT", 0)
    monkeypatch.setattr(onednn, "_onednn", lambda: lambda *call: calls.append(call) or own(*call))
    test_both_roads_equal_the_slow_twin(variant, 3, torch.float32, 3e-5)
    # six evaluations of three layers with q, k, v, o, gate, up and down, and the head
    assert len(calls) == 6 * (3 * (7 if variant == "qwen2" else 6) + 1)


def road(model, attention_BS=None):
    """Which road a session takes for a full evaluation and a window, and its logits."""
    ids_BS, _ = canvas()
    wanted_BS = wanted_at(ids_BS, 8, 14)
    session = model.denoiser(attention_BS).begin()
    taken, own = [], fast.FastDecoder.__call__

    def spy(self, *args, **options):
        taken.append("lean")
        return own(self, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fast.FastDecoder, "__call__", spy)
        logits = [session(ids_BS, wanted_BS), session(ids_BS, wanted_BS, slice(8, 14))]
    torch.testing.assert_close(logits[0], logits[1])
    torch.testing.assert_close(logits[0], model.denoiser()(ids_BS, wanted_BS))
    return taken


def test_the_lean_road_is_the_default():
    assert road(build()) == ["lean", "lean"]
    assert road(build(gate="elementwise", sink_kind="token", sink_count=1)) == ["lean", "lean"]


def hooked(module):
    module.register_forward_hook(lambda *_: None)


def patched(module):
    forward = module.forward
    module.forward = lambda *args, **kwargs: forward(*args, **kwargs)


class OtherNorm(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.weight = norm.weight

    def forward(self, x):
        return self.weight * torch.tanh(x)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: hooked(model.model.layers[1]),
        lambda model: hooked(model.model.layers[2].mlp.down_proj),
        lambda model: model.model.layers[0].self_attn.register_forward_pre_hook(lambda *_: None),
        lambda model: patched(model.model.layers[0]),
        lambda model: model.set_attn_implementation("eager"),
        lambda model: model.train(),
        lambda model: setattr(
            model.model.layers[1],
            "input_layernorm",
            OtherNorm(model.model.layers[1].input_layernorm),
        ),
        lambda model: setattr(model.model, "norm", OtherNorm(model.model.norm)),
    ],
)
def test_what_the_lean_road_does_not_know_takes_the_decoders_own(change):
    model = build()
    change(model)
    assert road(model) == []


def test_what_is_compiled_is_called_as_it_is():
    model = build()
    assert fast.FastDecoder(model).is_faithful()
    model.model.layers[1].compile(backend="eager")
    assert not fast.FastDecoder(model).is_faithful()


def test_the_lean_road_is_taken_again_when_a_hook_has_gone():
    model = build()
    decoder = fast.FastDecoder(model)
    handle = model.model.layers[1].register_forward_hook(lambda *_: None)
    assert [decoder.is_faithful() for _ in range(2)] == [False, False]
    handle.remove()
    assert [decoder.is_faithful() for _ in range(2)] == [True, True]
    with nn.modules.module.register_module_forward_pre_hook(lambda *_: None):
        assert not decoder.is_faithful()
    assert decoder.is_faithful()


def test_a_hook_that_comes_later_is_seen():
    model = build()
    ids_BS, _ = canvas()
    wanted_BS = wanted_at(ids_BS, 8, 14)
    session = model.denoiser().begin()
    session(ids_BS, wanted_BS)
    shapes = []
    model.model.layers[-1].mlp.register_forward_hook(
        lambda _, args, out: shapes.append(out.shape[1])
    )
    session(ids_BS, wanted_BS, slice(8, 14))
    assert shapes == [6]


class Adapter(nn.Module):
    """A projection with something added, as adapters do it."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.extra = nn.Linear(base.in_features, base.out_features, bias=False).to(base.weight)

    def forward(self, x):
        return self.base(x) + self.extra(x)


def test_adapters_keep_working_on_the_lean_road():
    model = build(gate="elementwise")
    before = model(canvas()[0]).logits
    for layer in model.model.layers:
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(layer.self_attn, name, Adapter(getattr(layer.self_attn, name)))
        layer.mlp.down_proj = Adapter(layer.mlp.down_proj)
    assert not torch.allclose(before, model(canvas()[0]).logits)
    assert road(model) == ["lean", "lean"]


class Counted(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base, self.rows = base, []

    def forward(self, x):
        self.rows.append(x.shape[:-1].numel())
        return self.base(x)


def test_only_what_is_asked_for_is_computed():
    model = build()
    ids_BS, _ = canvas()
    wanted_BS = wanted_at(ids_BS, 8, 14)
    wanted_BS[:, 9:11] = False
    model.lm_head = Counted(model.lm_head)
    for layer in model.model.layers:
        layer.mlp = Counted(layer.mlp)
        layer.self_attn.q_proj = Counted(layer.self_attn.q_proj)
        layer.self_attn.k_proj = Counted(layer.self_attn.k_proj)
    session = model.denoiser().begin()
    session(ids_BS, wanted_BS)
    store = session.memory.store
    buffers = [tensor.data_ptr() for tensor in (*store._keys, *store._values)]
    session(ids_BS, wanted_BS, slice(8, 14))
    assert model.lm_head.rows == [4, 4]
    assert [layer.mlp.rows for layer in model.model.layers] == [[20, 6], [20, 6], [4, 4]]
    assert [layer.self_attn.q_proj.rows for layer in model.model.layers] == [
        [20, 6],
        [20, 6],
        [4, 4],
    ]
    assert [layer.self_attn.k_proj.rows for layer in model.model.layers] == [[20, 6]] * 3
    assert buffers == [tensor.data_ptr() for tensor in (*store._keys, *store._values)]


@pytest.mark.parametrize("variant", ["llama", "qwen3", "two sinks at the end", "gate", "shifted"])
def test_a_row_of_a_batch_equals_the_row_alone(variant):
    model = build(**VARIANTS[variant])
    ids_BS, attention_BS = canvas(3)
    calls = script(ids_BS)
    together = model.denoiser(attention_BS).begin()
    logits = [together(*call) for call in calls]
    for row, shift in enumerate((0, 4, 1)):
        alone = model.denoiser().begin()
        for (ids_BS, wanted_BS, columns), logits_MV in zip(calls, logits, strict=True):
            if isinstance(columns, torch.Tensor):
                # Column 2 is padding in the second row: it has no counterpart there.
                columns = columns[columns >= shift] - shift
            elif columns is not None:
                columns = slice(columns.start - shift, columns.stop - shift)
            mine_MV = alone(
                ids_BS[row : row + 1, shift:], wanted_BS[row : row + 1, shift:], columns
            )
            row_M = wanted_BS.nonzero()[:, 0]
            torch.testing.assert_close(mine_MV, logits_MV[row_M == row], rtol=0, atol=1e-10)


PROMPTS = [[5, 6, 7, 8, 9, 10], [11, 12, 13], []]


def written(model, prompts, **settings):
    start = Canvas.from_prompts(prompts, new_tokens=9, mask_id=MASK, pad_id=0)
    padding = None if bool(start.attention_BS.all()) else start.attention_BS
    steps = list(denoise(model.denoiser(padding), start, block_length=4, **settings))
    return steps[-1].ids_BS[:, -9:], len(steps)


@pytest.mark.parametrize("schedule", [EvenQuota(), Threshold(0.6), Factor(0.9)])
@pytest.mark.parametrize("cache", [PrefixCache(), DualCache(), DualCache(refresh_every=2)])
@pytest.mark.parametrize(
    "variant", ["llama", "gate and sink, qwen3", "two sinks at the end", "shifted"]
)
def test_unequal_prompts_are_written_as_each_alone(variant, cache, schedule):
    model = build(**VARIANTS[variant])
    together_BN, evaluations = written(model, PROMPTS, cache=cache, schedule=schedule)
    alone = [written(model, [prompt], cache=cache, schedule=schedule) for prompt in PROMPTS]
    assert torch.equal(together_BN, torch.cat([row_BN for row_BN, _ in alone]))
    # Rows that are done wait for the others.
    assert evaluations >= max(count for _, count in alone)
    assert len({tuple(row) for row in together_BN.tolist()}) == 3


@pytest.mark.parametrize("schedule", [EvenQuota(), Threshold(0.6)])
@pytest.mark.parametrize("cache", [PrefixCache(refresh_every=1), DualCache(refresh_every=1)])
@pytest.mark.parametrize("variant", ["llama", "sink", "shifted"])
def test_a_refresh_at_every_step_is_no_cache(variant, cache, schedule):
    model = build(**VARIANTS[variant])
    assert torch.equal(
        written(model, PROMPTS, cache=cache, schedule=schedule)[0],
        written(model, PROMPTS, schedule=schedule)[0],
    )


def test_a_cache_is_not_the_same_as_none():
    model = build()
    results = [
        written(model, PROMPTS, cache=cache)[0] for cache in (None, PrefixCache(), DualCache())
    ]
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(results, 2))


@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_guidance_remembers_both_sides_apart(cache):
    model = build(sink_kind="token", sink_count=1)
    start = Canvas.from_prompts(PROMPTS[:2], new_tokens=8, mask_id=MASK, pad_id=0)
    guide = guided(model.denoiser(start.attention_BS), 1.5, start.prompt_BS, MASK)
    lean_ids = [step.ids_BS for step in denoise(guide, start, cache=cache, block_length=4)]
    with watching(model):
        plain_ids = [step.ids_BS for step in denoise(guide, start, cache=cache, block_length=4)]
    assert all(map(torch.equal, lean_ids, plain_ids))
    unguided = [
        step.ids_BS
        for step in denoise(model.denoiser(start.attention_BS), start, cache=cache, block_length=4)
    ]
    assert not torch.equal(unguided[-1], lean_ids[-1])


def test_long_canvases_go_through_the_mlp_in_pieces(monkeypatch):
    model = build()
    ids_BS, attention_BS = canvas(3)
    wanted_BS = wanted_at(ids_BS, 8, 14)
    expected = model.denoiser(attention_BS).begin()(ids_BS, wanted_BS)
    widths, silu = [], F.silu

    def spy(x, **options):
        widths.append(x.shape[1])
        return silu(x, **options)

    monkeypatch.setattr(fast, "_PIECE", 7)
    monkeypatch.setattr(fast.F, "silu", spy)
    torch.testing.assert_close(model.denoiser(attention_BS).begin()(ids_BS, wanted_BS), expected)
    assert widths == [7, 7, 6, 7, 7, 6, 6]


def test_another_attention_backend_is_taken_up():
    model = build()
    ids_BS, attention_BS = canvas(3)
    wanted_BS = wanted_at(ids_BS, 8, 14)
    session = model.denoiser(attention_BS).begin()
    expected = session(ids_BS, wanted_BS)
    model.set_attn_implementation("eager")
    # transformers' eager softmax is in float32
    torch.testing.assert_close(session(ids_BS, wanted_BS), expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(
        session(ids_BS, wanted_BS, slice(8, 14)), expected, rtol=0, atol=1e-4
    )


@pytest.mark.parametrize("variant", ["qwen2", "gate and sink, qwen3"])
def test_bfloat16_is_as_exact_on_the_lean_road(variant):
    exact = build(**VARIANTS[variant])
    rounded = build(**VARIANTS[variant]).to(torch.bfloat16)
    exact.load_state_dict(rounded.state_dict())
    ids_BS, attention_BS = canvas(2)
    calls = script(ids_BS)
    truth, quick, plain = (
        model.denoiser(attention_BS).begin() for model in (exact, rounded, rounded)
    )
    true_MV = torch.cat([truth(*call) for call in calls])
    quick_MV = torch.cat([quick(*call) for call in calls])
    with watching(rounded):
        plain_MV = torch.cat([plain(*call) for call in calls])
    assert quick_MV.dtype == torch.bfloat16
    lean_error, plain_error = (
        (value.double() - true_MV).pow(2).mean().sqrt() for value in (quick_MV, plain_MV)
    )
    assert lean_error < 1.2 * plain_error


@pytest.mark.parametrize("variant", ["qwen3", "gate and sink, qwen3"])
def test_autocast(variant):
    model = build(dtype=torch.float32, **VARIANTS[variant])
    ids_BS, attention_BS = canvas(2)
    calls = script(ids_BS)
    truth, quick, plain = (model.denoiser(attention_BS).begin() for _ in range(3))
    true_MV = torch.cat([truth(*call) for call in calls])
    with torch.autocast("cpu", torch.bfloat16):
        quick_MV = torch.cat([quick(*call) for call in calls])
        with watching(model):
            plain_MV = torch.cat([plain(*call) for call in calls])
    assert quick_MV.dtype == plain_MV.dtype == torch.bfloat16
    assert (quick_MV - true_MV).pow(2).mean() < 1.5 * (plain_MV - true_MV).pow(2).mean()


def test_a_plain_or_watched_denoiser_is_the_models_own_forward_bit_for_bit():
    model = build(dtype=torch.float32, sink_kind="token", sink_count=1)
    ids_BS, attention_BS = canvas(3)
    wanted_BS = wanted_at(ids_BS, 8, 14)
    with torch.inference_mode():
        expected = model(ids_BS, attention_BS, logits_to_keep=wanted_BS).logits
    assert torch.equal(model.denoiser(attention_BS, plain=True)(ids_BS, wanted_BS), expected)
    with watching(model):
        assert torch.equal(model.denoiser(attention_BS)(ids_BS, wanted_BS), expected)
    torch.testing.assert_close(
        model.denoiser(attention_BS)(ids_BS, wanted_BS), expected, rtol=0, atol=3e-5
    )


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_fast_evaluation_without_memory_is_the_models_own(variant, batch):
    model = build(**VARIANTS[variant])
    ids_BS, attention_BS = canvas(batch)
    quick, plain = model.denoiser(attention_BS), model.denoiser(attention_BS, plain=True)
    assert (quick.is_fast, plain.is_fast) == (True, False)
    for wanted_BS in (
        wanted_at(ids_BS, 8, 14),
        torch.zeros_like(ids_BS, dtype=torch.bool),
        ids_BS == MASK,
    ):
        torch.testing.assert_close(
            quick(ids_BS, wanted_BS), plain(ids_BS, wanted_BS), rtol=0, atol=1e-12
        )


@pytest.mark.parametrize(
    "variant", ["llama", "gate and sink, qwen3", "two sinks at the end", "shifted"]
)
def test_padding_is_not_computed_wherever_it_stands(variant):
    ids_BS, left_BS = canvas(3)
    wanted_BS = wanted_at(ids_BS, 8, 14)
    wanted_BS[1, 9:11] = False
    holes_BS = left_BS.clone()
    holes_BS[0, 16:] = holes_BS[2, 3:6] = False
    alike_BS = (torch.arange(20) > 2).expand(3, -1)
    for attention_BS in (left_BS, left_BS.flip(1), holes_BS, alike_BS):
        model = build(**VARIANTS[variant])
        expected = model.denoiser(attention_BS, plain=True)(ids_BS, wanted_BS)
        quick = model.denoiser(attention_BS)
        # the sinks' own pass
        quick.geometry(ids_BS, wanted_BS)
        for layer in model.model.layers:
            layer.self_attn.k_proj = Counted(layer.self_attn.k_proj)
        for _ in range(2):
            torch.testing.assert_close(quick(ids_BS, wanted_BS), expected, rtol=0, atol=1e-12)
        assert [layer.self_attn.k_proj.rows for layer in model.model.layers] == [
            [int(attention_BS.sum())] * 2
        ] * 3


def test_nothing_wanted_gives_no_rows_and_fills_the_memory():
    model = build()
    ids_BS, _ = canvas()
    session = model.denoiser().begin()
    assert session(ids_BS, torch.zeros_like(ids_BS, dtype=torch.bool)).shape == (0, MASK + 1)
    wanted_BS = wanted_at(ids_BS, 8, 14)
    torch.testing.assert_close(
        session(ids_BS, wanted_BS, slice(8, 14)), model.denoiser()(ids_BS, wanted_BS)
    )
    assert session(ids_BS, torch.zeros_like(wanted_BS), slice(8, 14)).shape == (0, MASK + 1)


@pytest.mark.parametrize("change", ["sinks", "backbone"])
def test_a_new_denoiser_sees_new_weights(change):
    model = build(sink_kind="token", sink_count=1)
    ids_BS, _ = canvas()
    wanted_BS = wanted_at(ids_BS, 8, 14)
    before = model.denoiser().begin()(ids_BS, wanted_BS)
    with torch.no_grad():
        (
            model.sink_embeddings if change == "sinks" else model.model.layers[0].mlp.up_proj.weight
        ).mul_(2)
    session = model.denoiser().begin()
    with torch.no_grad():
        expected = model(ids_BS, logits_to_keep=wanted_BS).logits
    assert not torch.allclose(before, expected)
    torch.testing.assert_close(session(ids_BS, wanted_BS), expected)
    torch.testing.assert_close(session(ids_BS, wanted_BS, slice(8, 14)), expected)


def test_an_interrupted_gated_forward_leaves_nothing_behind():
    model = build(gate="elementwise")
    ids_BS, _ = canvas()
    wanted_BS = wanted_at(ids_BS, 8, 14)
    expected = model.denoiser()(ids_BS, wanted_BS)
    model.model.layers[1].self_attn.k_proj.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model.denoiser()(ids_BS, wanted_BS)
    model.model.layers[1].self_attn.k_proj._forward_pre_hooks.clear()
    torch.testing.assert_close(model.denoiser().begin()(ids_BS, wanted_BS), expected)


class TestRefusals:
    def setup_method(self):
        self.model = build(sink_kind="token", sink_count=1)
        self.ids_BS, _ = canvas()
        self.wanted_BS = wanted_at(self.ids_BS, 8, 14)
        self.session = self.model.denoiser().begin()

    def test_the_first_evaluation_is_full(self):
        with pytest.raises(ValueError, match="columns=None first"):
            self.session(self.ids_BS, self.wanted_BS, slice(8, 14))

    def test_another_canvas(self):
        self.session(self.ids_BS, self.wanted_BS)
        with pytest.raises(ValueError, match=r"\(1, 20\) and is \(1, 19\)"):
            self.session(self.ids_BS[:, 1:], self.wanted_BS[:, 1:], slice(8, 14))
        self.session(self.ids_BS[:, 1:], self.wanted_BS[:, 1:])
        self.session(self.ids_BS[:, 1:], self.wanted_BS[:, 1:], slice(7, 13))

    @pytest.mark.parametrize(
        "columns", [slice(8, 13), slice(9, 14), torch.tensor([8, 9, 11, 12, 13])]
    )
    def test_wanted_outside_the_columns(self, columns):
        self.session(self.ids_BS, self.wanted_BS)
        with pytest.raises(ValueError, match="lie in the columns that run"):
            self.session(self.ids_BS, self.wanted_BS, columns)

    def test_after_a_failure_everything_is_computed_again(self):
        self.session(self.ids_BS, self.wanted_BS)
        handle = self.model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            self.session(self.ids_BS, self.wanted_BS, slice(8, 14))
        handle.remove()
        with pytest.raises(ValueError, match="but nothing is"):
            self.session(self.ids_BS, self.wanted_BS, slice(8, 14))

    def test_wanted_of_another_shape_or_type(self):
        with pytest.raises(ValueError, match="denoiser must be bool of shape"):
            self.session(self.ids_BS, self.wanted_BS[:, 1:])
        with pytest.raises(ValueError, match=r"but is int64 of shape"):
            self.model.denoiser()(self.ids_BS, self.wanted_BS.long())

    def test_a_canvas_longer_than_the_context(self):
        ids_BS = torch.full((1, 64), MASK)
        with pytest.raises(ValueError, match="text has 64 tokens"):
            self.session(ids_BS, ids_BS == MASK)

    def test_a_row_of_padding(self):
        session = self.model.denoiser(torch.zeros_like(self.ids_BS)).begin()
        with pytest.raises(ValueError, match="row needs at least one token"):
            session(self.ids_BS, self.wanted_BS)


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("cache", [None, "prefix", "dual"])
def test_an_empty_prompt_in_a_batch_is_predicted_as_it_is_alone(
    plain: bool, cache: str | None
) -> None:
    """Where logits are shifted, what stands in front of its first position is padding."""
    model = tiny_model(logit_shift=True).double()
    prompts = [[], [5, 6, 7, 8], [9, 10]]

    def written(*some: list[int]) -> torch.Tensor:
        canvas = Canvas.from_prompts(
            some, new_tokens=6, mask_id=model.config.mask_token_id, pad_id=0
        )
        denoiser = model.denoiser(
            None if canvas.attention_BS.all() else canvas.attention_BS, plain=plain
        )
        wanted_BS = canvas.ids_BS == canvas.mask_id
        if cache is None:
            return denoiser(canvas.ids_BS, wanted_BS).view(len(some), 6, -1)
        session, start = denoiser.begin(), canvas.ids_BS.shape[1] - 6
        session(canvas.ids_BS, wanted_BS)
        columns = slice(start, start + 3) if cache == "dual" else slice(start, start + 6)
        wanted_BS[:, columns.stop :] = False
        return session(canvas.ids_BS, wanted_BS, columns).view(
            len(some), -1, model.config.vocab_size
        )

    together = written(*prompts)
    for row, prompt in enumerate(prompts):
        torch.testing.assert_close(together[row], written(prompt)[0], rtol=1e-9, atol=1e-10)
