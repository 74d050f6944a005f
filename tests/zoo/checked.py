"""What a trace and an edit say of a model, held to dense float64 sums over the q, k and mask that
its calls were given.

Nothing here asks the package under test for anything but its records.
"""

# B batch, H heads, Q queries, S keys of a call, T positions of the text so far, D head dim
from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from architectures import HEADS, VOCABULARY
from torch import Tensor, nn
from torch.testing import assert_close

from sinklab.core.instrument import intervene, trace
from sinklab.lab.measures import MaskSinks
from tiny_models import checkpointed

REAL = F.scaled_dot_product_attention
ROWS, LENGTH, STEPS, PADS = 2, 10, 4, 3
WAYS = ("left", "right", "half", "steps", "checkpoint", "edit")
"""Ways to run a model: padded left or right, in bfloat16, generating with a cache, a backward pass
under gradient checkpointing, and losing the strongest key of every head; all but "right" with
padding on the left.
"""


@dataclass
class Call:
    """One attention call, in float64."""

    map_BHQS: Tensor
    may_BHQS: Tensor
    real_BQ: Tensor
    """False for queries that are padding."""


class Spy:
    """Stands in the place of SDPA and notes every call; where it edits, each head loses its
    strongest key.
    """

    def __init__(self, model, real_BT, edits=False):
        self.calls = []
        self.real_BT, self.edits = real_BT, edits
        self.past = 0
        model.register_forward_hook(self._ends, with_kwargs=True)

    def _ends(self, module, args, kwargs, output):
        self.past += kwargs["input_ids"].shape[1]

    def __call__(
        self,
        query,
        key,
        value,
        attn_mask=None,
        dropout_p=0.0,
        is_causal=False,
        scale=None,
        enable_gqa=False,
    ):
        call, bias = self._read(query, key, attn_mask, is_causal, scale)
        if torch._C._current_graph_task_id() == -1:
            self.calls.append(call)
        if not self.edits:
            return REAL(
                query,
                key,
                value,
                attn_mask,
                dropout_p,
                is_causal,
                scale=scale,
                enable_gqa=enable_gqa,
            )
        keys, real_B1Q1 = key.shape[2], call.real_BQ[:, None, :, None]
        received_BHS = (call.map_BHQS * real_B1Q1).sum(2)
        seen_B1S = (call.may_BHQS & real_B1Q1).any(2).any(1, keepdim=True)
        blocked_BH1S = (
            F.one_hot(received_BHS.masked_fill(~seen_B1S, -1).argmax(-1), keys).bool().unsqueeze(2)
        )
        stays_BHQS = call.may_BHQS & ~blocked_BH1S
        # a query that would lose all it sees keeps it, and one that sees nothing is padding
        stays_BHQS = torch.where(stays_BHQS.any(-1, keepdim=True), stays_BHQS, call.may_BHQS)
        stays_BHQS = stays_BHQS | ~stays_BHQS.any(-1, keepdim=True)
        mask = bias.to(query).expand(stays_BHQS.shape).masked_fill(~stays_BHQS, -math.inf)
        return REAL(query, key, value, mask, scale=scale, enable_gqa=query.shape[1] != key.shape[1])

    def _read(self, query, key, mask, is_causal, scale):
        """The call, and what its mask adds to scores."""
        q, k = query.detach().double(), key.detach().double()
        groups = HEADS // k.shape[1] if k.shape[1] else 1
        if self.past and groups > 1 and q.shape[1:3] == (k.shape[1], groups):
            # one token: the query heads of one key head stand where queries do
            q = q.flatten(1, 2).unsqueeze(2)
            mask = mask if mask is None else mask[:, :1, :1]
        queries, keys = q.shape[2], k.shape[2]
        may, bias = torch.ones(1, 1, queries, keys, dtype=torch.bool), torch.zeros(())
        may = may.tril() if is_causal else may
        if mask is not None and mask.dtype == torch.bool:
            may = may & mask
        elif mask is not None:
            may, bias = may & (mask > -1e8), mask.detach().double().clamp(min=-1e8)
        score = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-1, -2)
        score = score * (q.shape[-1] ** -0.5 if scale is None else scale) + bias
        may = may.expand_as(score)
        map_BHQS = score.masked_fill(~may, -math.inf).softmax(-1).nan_to_num()
        real_BQ = self.real_BT[:, self.past : self.past + queries]
        return Call(map_BHQS, may, real_BQ), bias


@contextmanager
def spied(model, real_BT, edits=False):
    spy = Spy(model, real_BT, edits)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", spy)
        yield spy


def held(architecture, way):
    """ "right", or "refused: …" and "does not run: …" with what was said; an AssertionError where
    numbers are wrong.
    """
    if way == "steps" and architecture.kind == "encoder":
        return "does not run: an encoder"
    model, other = architecture.model(), architecture.model()
    if way == "half":
        model, other = model.bfloat16(), other.bfloat16()
    generator = torch.Generator().manual_seed(2)
    real_BT = torch.ones(ROWS, LENGTH, dtype=torch.long)
    real_BT[1, slice(-PADS, None) if way == "right" else slice(0, PADS)] = 0
    ids_BT = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=generator) * real_BT
    given = {"input_ids": ids_BT, "attention_mask": real_BT}
    every_BT = torch.cat([real_BT, torch.ones(ROWS, STEPS, dtype=torch.long)], 1).bool()
    edits = way == "edit"
    try:
        with spied(other, every_BT, edits) as spy:
            expected = _run(other, way, given)
    except Exception as error:
        return f"does not run: {type(error).__name__}: {str(error).splitlines()[0][:90]}"
    try:
        if edits:
            with intervene(model, MaskSinks(k=1, when="now"), measure=False):
                found = _run(model, way, given)
        else:
            with trace(model) as recording:
                found = _run(model, way, given)
    except ValueError as error:
        return f"refused: {error}"
    assert spy.calls, "attention was recorded that no call made"
    if edits:
        real_BQ = real_BT.bool()
        assert_close(found[0][real_BQ], expected[0][real_BQ], rtol=1e-3, atol=1e-4)
        return "right"
    for one, two in zip(found, expected, strict=True):
        assert torch.equal(one, two), "the model gives something else while it is traced"
    compare(recording, spy.calls)
    return "right"


def _run(model, way, given):
    """What the model gives: logits or states, generated ids, or gradients."""
    if way == "steps":
        with torch.no_grad():
            return [
                model.generate(**given, max_new_tokens=STEPS, min_new_tokens=STEPS, do_sample=False)
            ]
    if way != "checkpoint":
        with torch.no_grad():
            return [model(**given)[0]]
    for module in model.modules():
        for name, number in vars(module).items():
            if isinstance(number, float) and "drop" in name:
                setattr(module, name, 0.0)
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    checkpointed(model)(**given)[0].float().square().mean().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def compare(recording, calls):
    """Hold what was recorded to the calls, in their order."""
    waiting = iter(calls)
    for received_BLHT, visible_BLT in zip(
        recording.received, recording.visible_by_layer, strict=True
    ):
        for layer in range(received_BLHT.shape[1]):
            call = next(waiting)
            real_B1Q1 = call.real_BQ[:, None, :, None]
            expected_BHT = (call.map_BHQS * real_B1Q1).sum(2)
            count_BT = (call.may_BHQS & real_B1Q1).sum(2).amax(1)
            room = received_BLHT.shape[-1] - expected_BHT.shape[-1]
            found_BHT, seen_BT = received_BLHT[:, layer], visible_BLT[:, layer].nan_to_num()
            assert room >= 0 and torch.equal(seen_BT.long(), F.pad(count_BT, (0, room))), (
                "visible queries"
            )
            found_BHT = found_BHT[:, : expected_BHT.shape[1]].nan_to_num().double()
            assert_close(found_BHT, F.pad(expected_BHT, (0, room)), rtol=1e-4, atol=1e-4)
    assert next(waiting, None) is None, "a call was not recorded"
