"""What `MaskSinks` offers beyond the top k of the step before, each against dense float64 attention
edited by hand.
"""

# B batch, L layers, H heads, S keys
from __future__ import annotations

import itertools

import pytest
import torch
from dense_twin import dense, received, top
from probed import EXACT, IDS, PADDED, TEXTS, padding
from torch.testing import assert_close

from refusals import refused, refusing
from sinklab.core.instrument import BlockKeys, SinkKeys, TopKeys, intervene, trace
from sinklab.core.registry import selectors
from sinklab.core.sinks import Excess
from sinklab.lab.measures import MaskSinks, Random
from tiny_models import HandWritten, llama


def by_hand(model, choose, is_zeroed, **given):
    """The same run with dense attention: `choose(layer, received, gone before)` says what the next
    forward loses.
    """
    logits, gone = [], {}
    for ids in TEXTS:

        def hide(layer, _, gone=gone):
            return gone.get(layer)

        def zero(layer, _, gone=gone):
            return gone[layer].squeeze(2) if gone else None

        edits, zeroed = ((), zero) if is_zeroed else ((hide,), None)
        out, twin = dense(model, lambda ids=ids: model(ids, **given), *edits, zeroed=zeroed)
        logits.append(out.logits)
        gone = {
            layer: choose(layer, received(a, given.get("attention_mask")), gone.get(layer))
            for layer, a in enumerate(twin.maps)
        }
    return logits


def strongest(k):
    return lambda layer, a_BHS, gone: top(a_BHS, k)


def above(layer, a_BHS, gone):
    queries_BH1 = a_BHS.sum(-1, keepdim=True).round()
    return (a_BHS > 1 + 0.5 * (queries_BH1 - 1) / queries_BH1).unsqueeze(2)


def carried(limit):
    def choose(layer, a_BHS, gone):
        if gone is None:
            gone = torch.zeros_like(a_BHS, dtype=torch.bool).unsqueeze(2)
        room = min(2, limit - int(gone[0, 0].sum()))
        return gone | top(a_BHS.masked_fill(gone.squeeze(2), -1.0), room)

    return choose


def of_two_heads(layer, a_BHS, gone):
    heads = torch.tensor([False, True, False, True])[:, None, None]
    return top(a_BHS, 2) & heads if layer == 1 else None


CHOICES = {
    "three": (MaskSinks(3), strongest(3)),
    "values": (MaskSinks(3, how="zero_value"), strongest(3)),
    "epsilon": (BlockKeys(SinkKeys(Excess(0.5))), above),
    "carried": (MaskSinks(2, when="kept", limit=5), carried(5)),
    "two heads": (MaskSinks(2, layers=1, heads=(1, 3)), of_two_heads),
}


@pytest.mark.parametrize("name, padded", [*zip(CHOICES, itertools.cycle([False, True]))])
def test_a_closed_loop_is_that_of_dense_attention(name, padded):
    (edit, choose), (given, real_BS) = CHOICES[name], padding(padded)
    model = llama().double()
    with torch.no_grad(), intervene(model, edit) as log:
        ours = [model(ids, **given).logits for ids in TEXTS]
    theirs = by_hand(model, choose, name == "values", **given)
    for one, other in zip(ours, theirs, strict=True):
        assert_close(one[real_BS], other[real_BS], **EXACT)
    assert [removal.forward for removal in log.removals] == [1, 2, 3]


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"k": 0}, "k must be at least 1.* 0"),
        ({"k": 1, "limit": 3}, "limit=3 with when=None"),
        ({"k": 1, "when": "closed_loop"}, "now, previous, clean, kept"),
        ({"k": 1, "how": "masked"}, "'mask'"),
        ({"k": 1, "heads": ()}, "heads"),
        ({"k": 1, "queries": "late"}, "'late'"),
        ({"k": 1, "queries": "from3", "how": "zero_value"}, "how='zero_value'"),
    ],
)
def test_fields_that_make_no_sense_are_refused(fields, message):
    refused(message, MaskSinks, **fields)


@pytest.mark.parametrize(
    "model, edit, message",
    [
        (llama(), MaskSinks(1, layers=2), "0 … 1"),
        (llama(), MaskSinks(1, heads=4), "0 … 3"),
        (HandWritten(), MaskSinks(1, layers=-1), r"config\.num_hidden_layers"),
        (HandWritten(), MaskSinks(12), "all 12 keys of"),
        (llama(), BlockKeys(Random(TopKeys(6))), "^6 keys .* row 0 .* has 2 "),
        (HandWritten(), MaskSinks, "object of class Intervention"),
    ],
)
def test_what_a_model_has_not_is_refused(model, edit, message):
    given = {"attention_mask": PADDED} if hasattr(model, "config") else {}
    with refusing(message), intervene(model, edit):
        model(IDS, **given)
        model(IDS, **given)


def test_a_layer_counted_from_the_last_is_refused_where_others_attend_than_the_config_says():
    model = llama()
    # as a hybrid model, in which one of three does not attend
    model.config.num_hidden_layers = 3
    edit = MaskSinks(1, when="now", layers=-2)
    with refusing("-2 .* of 3 .* 2 attended"), intervene(model, edit):
        model(IDS)


@pytest.mark.parametrize("limit", [None, 3])
def test_kept_keys_of_an_autoregressive_memory_grow_up_to_the_limit(limit):
    model = llama(causal=True)
    edit = MaskSinks(2, when="kept", scores="last_row", limit=limit)
    with intervene(model, edit) as log, trace(model) as recording:
        model.generate(IDS, max_new_tokens=5, do_sample=False, attention_mask=torch.ones_like(IDS))
    gone = [int(removal["keys"].min()) for removal in log.removals]
    assert gone == ([2, 4, 6, 8] if limit is None else [2, 3, 3, 3])
    for removal, row in zip(log.removals, recording.received[1:], strict=True):
        assert (
            row.gather(-1, removal.columns_BLHM.clamp(min=0)) * (removal.columns_BLHM >= 0) == 0
        ).all()
        left = torch.full_like(removal["left"], row.shape[-1]) - removal["keys"]
        assert_close(removal["left"], left)
    # a full set chose nothing, which is no choice of nothing
    unknown = [removal["held"].isnan() for removal in log.removals]
    assert [bool(one.any()) for one in unknown] == [limit is not None and n > 1 for n in range(4)]
    assert all(one.all() or not one.any() for one in unknown)


def test_a_limit_holds_for_selectors_that_do_not_heed_it(monkeypatch):
    monkeypatch.setattr(selectors, "_classes", {**selectors})

    @selectors.register("first")
    def first(call, k=1):
        """As many keys as it is told, from the left."""
        return call.eligible_BHS & (call.eligible_BHS.cumsum(-1) <= k)

    edit = BlockKeys("first:k=4", when="kept", limit=3)
    with torch.no_grad(), trace(model := llama()) as clean:
        model(TEXTS[0])
    with torch.no_grad(), intervene(model, edit) as log:
        for ids in TEXTS:
            model(ids)
    assert [removal["keys"].unique().tolist() for removal in log.removals] == [[3]] * 3
    # of the four it chose, those that receive most
    of_LHM = clean.received[0][0, :, :, :4].topk(3).indices.sort(-1).values
    blocked_LHM = log.removals[0].columns_BLHM[0].sort(-1).values
    assert_close(blocked_LHM[:1, :, -3:], of_LHM[:1])
