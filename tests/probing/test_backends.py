"""The way through transformers' attention functions: what is recorded is what the way through SDPA
records.
"""

# B batch, H query heads, K key heads, Q queries, S keys, D head dim
from __future__ import annotations

import copy
import threading

import pytest
import torch
import torch.nn.functional as F
import transformers
from dense_twin import dense, received
from torch import nn
from torch.testing import assert_close
from transformers import masking_utils
from transformers.integrations import flex_attention as flex

from refusals import refused, refusing
from sinklab.core.compat import attention_of, register_route
from sinklab.core.probing import BlockKeys, Positions, TopKeys, intervene, trace
from sinklab.core.probing import backends as ways
from sinklab.core.probing.tap import Tap
from sinklab.core.registry import statistics
from tiny_diffusion import tiny_model
from tiny_models import SIZES, llama

# what torch says on its own first use of FlexAttention without a compiler
pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile:UserWarning"),
]
IDS = torch.randint(1, 30, (2, 10), generator=torch.Generator().manual_seed(1))
LEFT = torch.ones(2, 10, dtype=torch.long)
LEFT[0, :4] = 0
FLEX = pytest.param("flex_attention", marks=pytest.mark.slow)
LAYERS = [f"model.layers.{number}.self_attn" for number in (0, 1)]
ALL = ["received", "value_norm", "row_entropy", "last_row"]
if "massive_activations" in statistics:
    ALL.append("massive_activations")


@pytest.fixture
def by_hooks(monkeypatch):
    """Every model is tapped by hooks and a mode over its whole forward."""
    monkeypatch.setattr("sinklab.core.probing.tap.interface_configs", lambda modules: [])


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


@pytest.mark.parametrize("padded", [False, True])
def test_both_ways_record_the_same(padded, request):
    model, given = llama(), {"attention_mask": LEFT} if padded else {}
    logits, narrow = recorded(model, **given)
    request.getfixturevalue("by_hooks")
    others, wide = recorded(model, **given)
    assert torch.equal(logits, others)
    for name, found in wide.items():
        assert_close(narrow[name], found, rtol=0, atol=0, equal_nan=True)


def test_nothing_but_attention_is_heard_of_a_model_of_transformers(
    monkeypatch,
):
    heard, hear = [], Tap.__torch_function__

    def listen(self, func, *given):
        heard.append(func)
        return hear(self, func, *given)

    monkeypatch.setattr(Tap, "__torch_function__", listen)
    model = llama()
    with trace(model), torch.no_grad():
        assert not model.model.layers[0].self_attn._forward_hooks
        model(IDS)
    assert torch.nn.functional.linear not in heard and len(heard) <= 12 * 2


def test_the_model_keeps_its_attention_and_so_does_its_copy():
    model = llama()
    plain = model(IDS).logits
    with trace(model) as outer:
        with trace(model.model):
            twin = copy.deepcopy(model)
            assert attention_of(model.config) == "sdpa" != model.config._attn_implementation
            model(IDS)
        assert torch.equal(twin(IDS).logits, plain)
        assert torch.equal(model(IDS).logits, plain)
    assert model.config._attn_implementation == "sdpa" and len(outer.received) == 2
    # the copy asks for the same function under the watched name, by which nobody hears of it any
    # more
    assert attention_of(twin.config) == "sdpa" and torch.equal(twin(IDS).logits, plain)
    with trace(twin) as recording:
        twin(IDS)
    assert len(recording.received) == 1


def test_models_that_share_a_config_leave_each_other_alone():
    one = llama()
    two = type(one)(one.config).eval()
    with trace(one) as first:
        with refusing("the model was not run inside"), trace(two):
            one(IDS)
        assert one.config._attn_implementation != "sdpa"
        two(IDS)
        one(IDS)
    assert one.config._attn_implementation == "sdpa"
    assert len(first.received) == 2


class Twin:
    """Received attention and visible queries of every layer in double precision, from the states
    that enter it.
    """

    def __init__(self, model, given, causal):
        real_BS = given.get("attention_mask", torch.ones_like(IDS)).bool()
        may_BQS = real_BS[:, None] & real_BS[:, :, None]
        if causal:
            may_BQS = may_BQS.tril()
        double = copy.deepcopy(model).double()
        double.set_attn_implementation("sdpa")
        _, seen = dense(double, lambda: double(IDS, **given))
        self.real_BS = real_BS
        self.received = [received(a, real_BS) for a in seen.maps]
        self.entropy = [torch.special.entr(a).sum(-1) for a in seen.maps]
        self.visible_BS = may_BQS.sum(1)

    def check(self, recording):
        for received_BLHS in recording.received:
            for layer, expected_BHS in enumerate(self.received):
                assert (received_BLHS[:, layer].double() - expected_BHS).abs().max() < 1e-5
        for entropy_BLHS in recording.row_entropy:
            for layer, expected_BHS in enumerate(self.entropy):
                off_BSH = (entropy_BLHS[:, layer] - expected_BHS).abs().transpose(1, 2)
                assert off_BSH[self.real_BS].max() < 1e-4
        assert torch.equal(recording.visible[0].long(), self.visible_BS)


@pytest.fixture
def uncompiled(monkeypatch):
    """FlexAttention without a compiler of C++, which takes a minute."""
    monkeypatch.setattr(flex.WrappedFlexAttention, "__call__", lambda self: flex.flex_attention)
    made = masking_utils.create_block_mask
    monkeypatch.setattr(
        masking_utils, "create_block_mask", lambda *given, _compile, **named: made(*given, **named)
    )


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("base", ["sdpa", "eager", FLEX])
def test_backends(base, causal, padded, kv_heads, uncompiled):
    model = llama(causal=causal, kv_heads=kv_heads)
    given = {"attention_mask": LEFT} if padded else {}
    twin = Twin(model, given, causal)
    model.set_attn_implementation(base)
    with torch.no_grad():
        plain = model(IDS, **given).logits
        with trace(model, ("received", "row_entropy")) as recording:
            assert torch.equal(model(IDS, **given).logits, plain)
        assert torch.equal(model(IDS, **given).logits, plain)
    assert model.config._attn_implementation == base and recording.layers == LAYERS
    twin.check(recording)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("base", ["eager", FLEX])
def test_edits(base, padded, uncompiled):
    model, given = llama(), {"attention_mask": LEFT} if padded else {}
    logits, gone = [], []
    for name in ("sdpa", base):
        model.set_attn_implementation(name)
        with (
            intervene(
                model, BlockKeys(TopKeys(2)), BlockKeys(Positions((5,)), when="now", heads=(1, 2))
            ) as log,
            torch.no_grad(),
        ):
            model(IDS, **given)
            logits.append(model(IDS, **given).logits[LEFT.bool()])
        gone.append([removal.columns_BLHM for removal in log.removals])
        with torch.no_grad():
            untouched = model(IDS, **given).logits[LEFT.bool()]
        assert (untouched - logits[-1]).abs().max() > 1e-2
    assert all(torch.equal(one, other) for one, other in zip(*gone, strict=True))
    assert_close(*logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "settings", [{}, {"sink": 2}, {"block_length": 4}, {"sink": 2, "block_length": 4}]
)
@pytest.mark.parametrize("base", ["eager", FLEX])
def test_our_own_models_whatever_their_backend(base, settings, uncompiled):
    """The pass of the sinks alone is not seen, blocks and padding are."""
    found = []
    for name in ("sdpa", base):
        model = tiny_model(**settings)
        model.model.set_attn_implementation(name)
        with torch.no_grad(), trace(model) as recording:
            logits = model(IDS, attention_mask=LEFT).logits
            assert torch.equal(model(IDS, attention_mask=LEFT).logits, logits)
        assert recording.prefix == settings.get("sink", 0) and len(recording.received) == 2
        found.append((logits[LEFT.bool()], recording.received[1], recording.visible[1]))
    for one, other in zip(*found, strict=True):
        assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_a_backend_that_does_otherwise_is_refused(monkeypatch):
    """The first call of a module is held to its slow twin."""
    from transformers import AttentionInterface

    eager = ways._eager

    def off(module, q, k, v, mask, **options):
        out, weights = eager[type(module)](module, q, k, v, mask, **options)
        return out * 1.001, weights

    AttentionInterface.register("off_by_little", off)
    model = llama(attention="eager")
    model.config._attn_implementation = "off_by_little"
    with (
        refusing("off_by_little gives is not"),
        trace(model),
        torch.no_grad(),
    ):
        model(IDS)
    assert model.config._attn_implementation == "off_by_little"


@pytest.mark.parametrize(
    "kind, settings, option",
    [("Gemma2", {}, "softcap"), ("GptOss", {"num_local_experts": 2}, "s_aux")],
)
def test_what_no_mask_says_is_refused_by_name(kind, settings, option):
    sizes = SIZES | {"vocab_size": 50, "head_dim": 8, "pad_token_id": 0}
    config = getattr(transformers, f"{kind}Config")(**sizes, **settings)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    model.set_attn_implementation("eager")
    with refusing(rf"{kind}Attention .*'{option}'"), trace(model):
        model(IDS)


class FlashLike:
    """What a kernel of flash attention is given and gives: padding by row, the rest by name."""

    window: int | None = None

    def __call__(
        self,
        module,
        q,
        k,
        v,
        mask,
        **options,
    ):
        queries, keys = q.shape[2], k.shape[2]
        causal = options.get("is_causal")
        seen = ways._of_flash(
            mask, q, keys, module.is_causal if causal is None else causal, self.window
        )
        seen = torch.ones(1, 1, queries, keys, dtype=torch.bool) if seen is None else seen
        out = F.scaled_dot_product_attention(
            q, k, v, seen, scale=options["scaling"], enable_gqa=True
        )
        return out.nan_to_num().transpose(1, 2), None


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_a_kernel_that_is_told_of_padding_alone(causal, padded):
    """As flash attention is; none of its own ran."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register("flash_like", FlashLike())
    AttentionMaskInterface.register(
        "flash_like", AttentionMaskInterface._global_mapping["flash_attention_2"]
    )
    model, given = llama(causal=causal), {"attention_mask": LEFT} if padded else {}
    twin = Twin(model, given, causal)
    model.config._attn_implementation = "flash_like"
    for layer in model.model.layers:
        layer.self_attn.is_causal = causal
    with torch.no_grad(), trace(model, ("received", "row_entropy")) as recording:
        model(IDS, **given)
    twin.check(recording)
    with (
        refusing("flash_like takes no mask"),
        intervene(model, BlockKeys(Positions((3,)), when="now")),
        torch.no_grad(),
    ):
        model(IDS, **given)


def test_who_sees_whom_by_padding_and_window():
    q, real_BS = torch.zeros(2, 1, 3, 4), torch.ones(2, 5)
    real_BS[0, 0] = 0
    for causal in (False, True):
        for window in (None, 2):
            found_BQS = ways._of_flash(real_BS, q, 5, causal, window).expand(2, 1, 3, 5)[:, 0]
            for row in range(2):
                for query in range(3):
                    for key in range(5):
                        behind = query + 2 - key
                        may = bool(real_BS[row, key]) and (not causal or behind >= 0)
                        may = may and (window is None or -window < behind < window)
                        assert bool(found_BQS[row, query, key]) == may
    assert ways._of_flash(None, q, 5, False, None) is None


def test_another_thread_is_refused_and_one_attention_may_be_tapped_twice():
    model, said = llama(attention="eager"), []

    def run():
        try:
            model.model.layers[0](
                torch.randn(1, 3, 32),
                position_embeddings=(torch.ones(1, 3, 8), torch.zeros(1, 3, 8)),
            )
        except ValueError as error:
            said.append(str(error))

    with trace(model) as outer, trace(model.model) as inner:
        model(IDS)
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert len(said) == 1 and "runs the model or a part of it" in said[0]
    assert len(outer.received) == len(inner.received) == 1
    assert torch.equal(outer.received[0], inner.received[0]) and not ways._taps


def test_attention_that_does_not_say_whether_it_is_causal_is_as_to_transformers():
    q, k = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4, 8)
    for module, expected in ((nn.Module(), True), (nn.Module(), False)):
        if not expected:
            module.is_causal = False
        assert ways.read("sdpa", module, (q, k, k, None), {}, {})["is_causal"] is expected
    assert ways.read("sdpa", nn.Module(), (q[:, :, :1], k, k, None), {}, {})["is_causal"] is False


def test_names_of_kernels_have_no_slash():
    register_route("hub/kernel", lambda *given, **options: None)
    model = llama()
    model.config._attn_implementation_internal = "hub/kernel"
    with trace(model, allow_empty=True):
        assert (
            "/" not in model.config._attn_implementation
            and attention_of(model.config) == "hub/kernel"
        )
    assert model.config._attn_implementation == "hub/kernel"


@pytest.mark.parametrize("cross", [False, True])
def test_attention_within_a_function_of_torch_is_seen(cross):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x, y):
            return self.attention(x, y, y, need_weights=False)[0]

    torch.manual_seed(0)
    model, x = Model().eval(), torch.randn(2, 5, 8)
    y = torch.randn(2, 7, 8) if cross else x
    plain = model(x, y)
    with trace(model) as recording:
        assert torch.equal(model(x, y), plain)
    heads = model.attention(x, y, y, average_attn_weights=False)[1]
    assert_close(recording.received[0][:, 0], heads.sum(-2))
    with intervene(model, BlockKeys(Positions((1,)), when="now")):
        assert not torch.equal(model(x, y), plain)
    with (
        refusing(r"mha.set_fastpath_enabled"),
        trace(model),
        torch.no_grad(),
    ):
        model(x, y)


def test_a_forward_that_is_not_seen_is_refused():
    model = llama()
    with trace(model) as recording:
        model(IDS)
        model.set_attn_implementation("eager")
        refused("forward 2 made no attention", model, IDS)
    assert len(recording.received) == 1 and model.config._attn_implementation == "eager"
