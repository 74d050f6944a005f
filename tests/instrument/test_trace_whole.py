"""No recording is partial in silence: what cannot be told is refused by name, the rest is that of a
dense twin.
"""

# B batch, K key heads, H query heads, Q queries, S keys, D head dim
from __future__ import annotations

import copy
import math
import random
from dataclasses import dataclass

import pytest
import torch
from probed import IDS
from torch import Tensor, nn

from refusals import refused, refusing
from sinklab.core.attention.visibility import doubtful
from sinklab.core.instrument import trace
from tiny_models import Attends, HandWritten, by_itself, llama


def alibi(heads, queries, keys):
    """The bias of ALiBi, which falls far below -100."""
    distance_QS = torch.arange(keys) - torch.arange(queries)[:, None] - (keys - queries)
    return -(2.0 ** -torch.arange(heads))[:, None, None] * distance_QS.abs().float()


@pytest.mark.parametrize(
    "values", [(0, -1, -1e4), (0, -1e4, -2e4), (3, 0, -65504), (-1, -500), (0, -1e4), (0, -100)]
)
def test_a_mask_in_doubt_is_refused_with_step_and_layer(values):
    mask = (
        torch.tensor([values[i % len(values)] for i in range(6)], dtype=torch.float32)
        .expand(6, 6)
        .clone()
    )
    assert doubtful(mask)
    model, qkv = nn.Sequential(), torch.randn(3, 1, 2, 6, 4)
    model.add_module("attention", Attends())
    model.forward = lambda *given: model.attention(*given)  # type: ignore[method-assign]
    message = (
        r"forward 2, attention: the additive mask could block keys or bias them.*give -inf, "
        r"or a boolean mask"
    )
    with trace(model) as recording:
        model(*qkv)
        refused(message, model, *qkv, mask)
        model(*qkv, torch.zeros(6, 6))
    assert len(recording.received) == 2
    # a constant blocks nothing, a gradual bias neither
    assert not doubtful(torch.full((2, 5, 5), -5000.0)) and not doubtful(alibi(4, 600, 600))
    # what is low may stand before the fall, and not at the first key
    assert doubtful(torch.tensor([-60.0, -105, -40]).expand(3, 3))
    # a padded bias by distance is in doubt too
    assert doubtful(alibi(2, 8, 8) + torch.where(torch.arange(8) < 3, -1e4, 0.0))


def test_a_sibling_that_attends_unseen_is_refused():
    model = by_itself(llama())
    attention = model.model.layers[0].self_attn
    attention.config = copy.deepcopy(attention.config)
    attention.config._attn_implementation = "eager"
    refused = (
        r"model.layers.0.self_attn ran and never called .* as other layers of its class "
        r"LlamaAttention did"
    )
    with refusing(refused), trace(model):
        model(IDS)
    assert not any(module._forward_hooks for module in model.modules())
    # a layer that did not run is no sibling that attends unseen
    part = HandWritten(layers=3)
    with trace(part) as recording:
        part.blocks[1](part.blocks[0](part.embed(IDS)))
    assert recording.layers == ["blocks.0", "blocks.1"]


def compiled_part():
    model = HandWritten()
    model.blocks[1].compile(backend="eager")
    return model


def compiled_forward():
    model = llama()
    model.forward = torch.compile(model.forward, backend="eager")
    return model


@pytest.mark.parametrize(
    "make, name",
    [
        (lambda: torch.compile(HandWritten(), backend="eager"), "HandWritten"),
        (lambda: torch.compile(llama(), backend="eager"), "LlamaForCausalLM"),
        (compiled_forward, "LlamaForCausalLM"),
        (compiled_part, "blocks.1"),
    ],
)
def test_what_is_compiled_is_refused_by_name(make, name):
    with refusing(rf"^{name} is compiled.*_orig_mod"), trace(make()):
        pass


def test_a_mask_that_is_changed_in_place_between_forwards_is_read_again():
    """Layers of one forward share what was found out about a mask; the next forward does not."""
    q, mask = torch.randn(1, 2, 4, 4), torch.ones(1, 1, 4, 4, dtype=torch.bool)
    with trace(model := Attends()) as recording:
        model(q, q, q, attn_mask=mask)
        mask[..., 0] = False
        model(q, q, q, attn_mask=mask)
    assert [seen.tolist() for seen in recording.visible] == [[[4, 4, 4, 4]], [[0, 3, 3, 3]]]
    assert recording.received[1][..., 0].abs().max() == 0


def test_cross_attention_has_no_rows_by_canvas_position():
    q, k = torch.randn(1, 2, 9, 4), torch.randn(1, 2, 3, 4)
    model, message = Attends(), "row_entropy .* 9 queries over 3 keys"
    with refusing(message), trace(model, ("received", "row_entropy")):
        model(q, k, k)


@dataclass(frozen=True)
class Case:
    """One random attention call: its arguments, and who is real and may see whom."""

    q_BHQD: Tensor
    k_BKSD: Tensor
    v_BKSD: Tensor
    options: dict
    may_BHQS: Tensor
    bias: Tensor | float
    real_BQ: Tensor

    def dense(self):
        """Received attention and visible queries, in double precision."""
        groups = self.q_BHQD.shape[1] // self.k_BKSD.shape[1]
        k_BHSD = self.k_BKSD.double().repeat_interleave(groups, 1)
        scale = self.options.get("scale") or self.q_BHQD.shape[-1] ** -0.5
        scores = self.q_BHQD.double() @ k_BHSD.transpose(-1, -2) * scale + self.bias
        real_BHQS = self.may_BHQS & self.real_BQ[:, None, :, None]
        map_BHQS = torch.softmax(scores.masked_fill(~real_BHQS, -math.inf), -1).nan_to_num()
        return map_BHQS.sum(-2), real_BHQS.sum(-2).amax(1)


FLOORS = (-math.inf, torch.finfo(torch.float32).min, -1e9)


def drawn(seed):
    """A call of random shape: a whole canvas, one with sink columns, a chunk of a growing or of a
    static cache.
    """
    rng, made = random.Random(seed), torch.Generator().manual_seed(seed)
    batch, kv, groups, dim = (
        rng.randint(1, 3),
        rng.randint(1, 3),
        rng.randint(1, 3),
        rng.choice((1, 4, 8)),
    )
    kind, queries = rng.choice(("canvas", "prefix", "growing", "static")), rng.randint(1, 9)
    causal = kind == "static" or rng.random() < 0.5
    before = {"canvas": 0, "prefix": rng.randint(1, 3)}.get(kind, rng.randint(0, 6))
    room = rng.randint(1, 5) if kind == "static" else 0
    keys, heads = before + queries + room, kv * groups
    there_BS = torch.ones(batch, keys, dtype=torch.bool)
    padding = (
        rng.choice(("none", "left", "right")) if kind != "static" else rng.choice(("none", "left"))
    )
    first = before if kind == "prefix" else 0
    for row in range(batch):
        # each row keeps a real query
        count = rng.randint(
            0, queries - 1 if padding == "right" or kind != "growing" or not before else before
        )
        if padding == "left":
            there_BS[row, first : first + count] = False
        elif padding == "right":
            there_BS[row, keys - count :] = False
    there_BS[:, before + queries :] = False
    may_BHQS = there_BS[:, None, None].expand(batch, 1, queries, keys)
    if causal:
        may_BHQS = may_BHQS & torch.ones(queries, keys, dtype=torch.bool).tril(before)
    q = torch.randn(batch, heads, queries, dim, generator=made)
    k, v = (torch.randn(batch, kv, keys, dim, generator=made) for _ in range(2))
    real_BQ, bias = there_BS[:, before : before + queries], 0.0
    options = {"enable_gqa": kv != heads}
    if rng.random() < 0.3:
        options["scale"] = rng.choice((0.1, 1.0))
    if causal and kind == "canvas" and padding == "none":
        options["is_causal"] = True
    elif not (may_BHQS.all() and rng.random() < 0.7):
        mask = may_BHQS if causal or rng.random() < 0.5 else may_BHQS.clone()
        mask = mask.expand(batch, heads, queries, keys) if rng.random() < 0.3 else mask
        form = rng.choice(("bool", "additive", "graded"))
        if form != "bool":
            bias = 3 * alibi(heads, queries, keys) if form == "graded" else 0.0
            floor = -math.inf if form == "graded" else rng.choice(FLOORS)
            mask = torch.zeros(mask.shape).masked_fill(~mask, floor) + bias
        options["attn_mask"] = mask
    return Case(q, k, v, options, may_BHQS.expand(batch, heads, -1, -1), bias, real_BQ)


def test_random_calls_are_those_of_a_dense_twin():
    model, seen = Attends(), set()
    for seed in range(100):
        case = drawn(seed)
        call = (case.q_BHQD, case.k_BKSD, case.v_BKSD)
        plain = model(*call, **case.options)
        with trace(model) as recording:
            out = model(*call, **case.options)
        assert torch.equal(plain.nan_to_num(), out.nan_to_num()), seed
        received_BHS, visible_BS = case.dense()
        message = f"case {seed}"
        found = recording.received[0][:, 0].double()
        assert torch.allclose(found, received_BHS, rtol=2e-5, atol=2e-5), message
        assert torch.equal(recording.visible[0].long(), visible_BS), message
        seen.add(
            (case.options.get("is_causal"), "attn_mask" in case.options, bool(case.real_BQ.all()))
        )
    assert len(seen) >= 4
