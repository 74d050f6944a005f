"""Windows: masks over a cache that keeps every key; a cache that drops keys is refused."""

# B batch, L layers, H heads, Q queries, S keys

import pytest
import torch
from torch.testing import assert_close
from transformers import DynamicCache

from refusals import refused, refusing
from sinklab.core.instrument import BlockKeys, Positions, TopKeys, intervene, trace
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
    if kind in ("Gemma3", "Cohere2"):
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
    "kind, attention",
    [
        ("Mistral", "sdpa"),
        pytest.param("Qwen2", "eager", marks=pytest.mark.ring("lab")),
        ("Gemma3", "sdpa"),
    ],
)
def test_every_step_is_the_last_row_of_a_pass_over_the_whole_text(kind, attention):
    model = windowed(kind, attention)
    with trace(model, ("received",)) as recording:
        ids_BS = generated(model)
    assert torch.equal(ids_BS, generated(model))
    for step, received in enumerate(recording.received):
        text_BS = ids_BS[:, : PROMPT + step]
        with trace(model, ("last_row", "received")) as alone:
            whole(model, text_BS)
        keys = text_BS.shape[1]
        expected = alone.received[0] if step == 0 else alone.last_row[0]
        assert_close(received[..., :keys], expected, rtol=1e-4, atol=1e-5)
        assert not received[..., keys:].nansum()
        assert recording.columns[step].tolist() == (
            list(range(PROMPT)) if step == 0 else [keys - 1]
        )
        assert recording.prefix == 0
        if step:
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


@pytest.mark.parametrize(
    "kind, removal, attention",
    [
        ("Mistral", "mask", "sdpa"),
        pytest.param("Gemma3", "zero_value", "eager", marks=pytest.mark.ring("lab")),
    ],
)
def test_a_position_stays_hidden_as_long_as_it_is_there(kind, removal, attention):
    model = windowed(kind, attention)
    with (
        intervene(model, BlockKeys(Positions((4,)), when="now", how=removal)) as log,
        trace(model) as recording,
    ):
        ids_BS = generated(model)
    for record in log.removals:
        assert set(record.columns_BLHM.unique().tolist()) <= {4, -1}
    for step in range(1, STEPS):
        text_BS = ids_BS[:, : PROMPT + step]
        with (
            intervene(model, BlockKeys(Positions((4,)), when="now", how=removal)),
            trace(model, ("last_row",)) as alone,
        ):
            whole(model, text_BS)
        keys = text_BS.shape[1]
        assert_close(recording.received[step][..., :keys], alone.last_row[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["Qwen2", "Gemma3"])
def test_several_tokens_behind_a_window_stand_at_their_positions(kind):
    model, text_BS = windowed(kind), torch.cat([IDS, IDS[:, 2:6]], 1)
    with trace(model, ("row_entropy",)) as alone:
        whole(model, text_BS)
    cache = DynamicCache()
    with torch.no_grad(), trace(model, ("received", "row_entropy")) as recording:
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
    every = torch.ones(2, 1, 1, 1) * 4
    assert_close(recording.received[1].nansum(-1, keepdim=True), every.expand(2, 2, 4, 1))


def test_the_first_token_taken_once_is_no_other_token_later():
    model = windowed("Mistral")
    edit = BlockKeys(TopKeys(1), when="kept", limit=1)
    with intervene(model, edit) as log, trace(model) as recording:
        generated(model, attention_mask=torch.ones_like(IDS))
    first = log.removals[0].columns_BLHM
    for record in log.removals:
        assert torch.equal(record.columns_BLHM, first)
    received = torch.from_numpy(recording.array("received")[1:])
    taken = first.amax(-1)[None, ..., None].expand(len(received), -1, -1, -1, -1)
    assert not received.gather(-1, taken).nansum()


def test_a_prompt_longer_than_the_window_loses_what_was_chosen_in_it():
    model = windowed("Mistral")
    with intervene(model, BlockKeys(TopKeys(1))) as log:
        generated(model)
    assert len(log.removals) == STEPS - 1


def test_a_cache_that_does_not_say_which_keys_it_keeps_is_refused():
    from transformers.cache_utils import DynamicLayer

    class FirstAndLast(DynamicLayer):
        seen = 0

        def update(self, key_states, value_states, *args, **kwargs):
            keys, values = super().update(key_states, value_states)
            self.seen += key_states.shape[-2]
            self.keys, self.values = (
                torch.cat([x[:, :, :1], x[:, :, -3:]], 2) for x in (keys, values)
            )
            return (keys, values) if key_states.shape[-2] > 1 else (self.keys, self.values)

        def get_seq_length(self):
            return self.seen

        def get_mask_sizes(self, query_length):
            return min(self.seen, 4) + query_length, 0

    model = windowed("Mistral")
    model.config.sliding_window = None
    cache = DynamicCache()
    cache.layer_class_to_replicate = FirstAndLast
    with trace(model), torch.no_grad():
        model(IDS, past_key_values=cache)
        refused(
            "seen 8 positions and gives 4",
            model,
            IDS[:, :1],
            past_key_values=cache,
            attention_mask=torch.ones(2, 4),
        )
