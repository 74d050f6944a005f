"""Windows: masks over a cache that keeps every key; a cache that drops keys is refused."""

# B batch, L layers, H heads, Q queries, S keys

import pytest
import torch
from torch.testing import assert_close
from transformers import DynamicCache

from refusals import refusing
from sinklab.core.instrument import BlockKeys, Positions, intervene, trace
from tiny_models import NO_ENDS, SIZES

WINDOW, STEPS, PROMPT = 5, 6, 7


def windowed(kind, attention="sdpa"):
    import transformers

    options = {
        "vocab_size": 40,
        "sliding_window": WINDOW,
        "attn_implementation": attention,
    }
    if kind == "Qwen2":
        options |= {"use_sliding_window": True, "max_window_layers": 1, "layer_types": None}
    if kind == "Gemma3":
        options |= {"layer_types": ["sliding_attention", "full_attention"], "head_dim": 8}
    name = "Gemma3Text" if kind == "Gemma3" else kind
    config = getattr(transformers, f"{name}Config")(**SIZES | NO_ENDS | options)
    torch.manual_seed(1)
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


IDS = torch.randint(1, 40, (2, PROMPT), generator=torch.Generator().manual_seed(3))
PADDED = torch.ones_like(IDS)
PADDED[0, :2] = 0


def generated(model, **options):
    """Text written with a cache that keeps every key."""
    options = {
        "attention_mask": PADDED,
        "max_new_tokens": STEPS,
        "do_sample": False,
        "past_key_values": DynamicCache(),
    } | options
    with torch.no_grad():
        return model.generate(IDS, **options)


def whole(model, ids_BS):
    """A pass without a cache over this text."""
    real_BS = torch.cat([PADDED, torch.ones(2, ids_BS.shape[1] - PROMPT, dtype=torch.long)], 1)
    position_ids = (real_BS.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        return model(ids_BS, attention_mask=real_BS, position_ids=position_ids, use_cache=False)


@pytest.mark.parametrize(
    "kind, edits",
    [("Mistral", ()), ("Gemma3", ()), ("Mistral", (BlockKeys(Positions((4,)), when="now"),))],
)
def test_every_step_is_the_last_row_of_a_pass_over_the_whole_text(kind, edits):
    model = windowed(kind)
    with intervene(model, *edits) as log, trace(model, ("received",)) as recording:
        ids_BS = generated(model)
    for record in log.removals:
        assert set(record.columns_BLHM.unique().tolist()) <= {4, -1}
    with intervene(model, *edits):
        assert torch.equal(ids_BS, generated(model))
    for step, received in enumerate(recording.received):
        text_BS = ids_BS[:, : PROMPT + step]
        with intervene(model, *edits), trace(model, ("last_row", "received")) as alone:
            whole(model, text_BS)
        keys = text_BS.shape[1]
        expected = alone.received[0] if step == 0 else alone.last_row[0]
        assert_close(received[..., :keys], expected, rtol=1e-4, atol=1e-5)
        assert not received[..., keys:].nansum()
        assert recording.columns[step].tolist() == (
            list(range(PROMPT)) if step == 0 else [keys - 1]
        )
        assert recording.prefix == 0
        if step and not edits:
            seen = recording.visible_by_layer[step][..., :keys].nan_to_num()
            assert torch.equal(seen > 0, (expected > 0).any(2))


@pytest.mark.parametrize("kind, cache", [("Mistral", "dynamic"), ("Gemma3", "static")])
@pytest.mark.parametrize("watch", [trace, lambda model: intervene(model, allow_idle=True)])
def test_a_cache_that_drops_keys_is_refused_once_it_does(kind, cache, watch):
    model = windowed(kind)
    options = {"past_key_values": None, "cache_implementation": cache, "disable_compile": True}
    with refusing(r"self_attn: .*SlidingWindowLayer .*use_cache=False"), watch(model):
        generated(model, **options)
    with watch(model):
        generated(model, past_key_values=None, use_cache=False)
        generated(model, **options, max_new_tokens=1)


def test_a_block_opened_behind_a_filled_cache_knows_where_the_text_begins():
    model, cache = windowed("Qwen2"), DynamicCache()
    with torch.no_grad():
        model(IDS, past_key_values=cache)
        with intervene(model, BlockKeys(Positions((4,)), when="now")) as log, trace(model) as seen:
            model(IDS[:, :1], past_key_values=cache)
    assert seen.prefix == 0 and seen.columns[0].tolist() == [PROMPT]
    assert log.removals[0].columns_BLHM.unique().tolist() == [4]


@pytest.mark.parametrize("kind", ["Qwen2", "Gemma3"])
def test_several_tokens_behind_a_window_stand_at_their_positions(kind):
    model, text_BS = windowed(kind), torch.cat([IDS, IDS[:, 2:6]], 1)
    with trace(model, ("row_entropy",)) as alone:
        whole(model, text_BS)
    cache = DynamicCache()
    with torch.no_grad(), trace(model, ("row_entropy",)) as recording:
        position_ids = (PADDED.cumsum(1) - 1).clamp(min=0)
        model(IDS, attention_mask=PADDED, position_ids=position_ids, past_key_values=cache)
        real_BS = torch.cat([PADDED, torch.ones(2, 4, dtype=torch.long)], 1)
        position_ids = (real_BS.cumsum(1) - 1)[:, PROMPT:]
        model(
            text_BS[:, PROMPT:],
            attention_mask=real_BS,
            position_ids=position_ids,
            past_key_values=cache,
        )
    assert recording.columns[1].tolist() == [7, 8, 9, 10]
    expected = torch.from_numpy(alone.array("row_entropy"))[0, ..., PROMPT:]
    assert_close(recording.row_entropy[1], expected, rtol=1e-4, atol=1e-5)
