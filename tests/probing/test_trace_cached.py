"""Traces and interventions in a run with a cache: every layer is heard, with all its keys, in every
evaluation.
"""

import pytest
import torch
from probed import canvas_of
from torch.testing import assert_close

from sinklab.core.probing import trace
from sinklab.core.sampling import denoise
from sinklab.extras.fast import decoder
from sinklab.lab.caching import DualCache, PrefixCache
from tiny_diffusion import tiny_model

NEW, BLOCK, CANVAS = 6, 3, 12
QUERIES = {PrefixCache(): [12, 6, 6, 12, 3, 3], DualCache(): [12, 3, 3, 12, 3, 3]}
LAYERS = ["model.layers.0.self_attn", "model.layers.1.self_attn"]


def decoding(model, cache):
    canvas = canvas_of(model)
    return denoise(model.denoiser(canvas.attention_BS), canvas, cache=cache, block_length=BLOCK)


@pytest.mark.parametrize("sinks", [0, 2])
@pytest.mark.parametrize("cache", QUERIES)
def test_every_layer_and_key_is_seen_at_every_step(cache, sinks):
    model = tiny_model(sinks)
    untraced = list(decoding(model, cache))
    with trace(model, ("received", "value_norm", "row_entropy")) as recording:
        traced = list(decoding(model, cache))
    assert recording.layers == LAYERS
    assert recording.prefix == sinks
    assert [part.shape for part in recording.received] == [(2, 2, 4, sinks + CANVAS)] * NEW
    assert [part.shape[-1] for part in recording.row_entropy] == QUERIES[cache]
    for received, queries in zip(recording.received, QUERIES[cache], strict=True):
        # every query gives away a mass of 1, those of padding none
        real_B1 = torch.tensor([[queries], [queries - 3 if queries == CANVAS else queries]])
        assert_close(
            received.sum(-1), real_B1[..., None].expand(2, 2, 4).float(), rtol=0, atol=1e-4
        )
        assert (received[1, :, :, sinks : sinks + 3] == 0).all()
    # sinks and prompt are remembered, the block is not: one of its tokens is new
    first, second = recording.value_norm[:2]
    block = sinks + CANVAS - NEW
    assert torch.equal(first[..., :block], second[..., :block])
    assert not torch.equal(first[..., block : block + BLOCK], second[..., block : block + BLOCK])
    for one, other in zip(untraced, traced, strict=True):
        assert torch.equal(one.ids_BS, other.ids_BS)
        assert_close(one.confidence_BS, other.confidence_BS, equal_nan=True)


def test_the_lean_road_is_left_for_the_length_of_the_block(monkeypatch):
    model, taken, own = tiny_model(1), [], decoder.FastDecoder.__call__

    def spy(self, *args, **options):
        taken.append(True)
        return own(self, *args, **options)

    monkeypatch.setattr(decoder.FastDecoder, "__call__", spy)
    steps = decoding(model, DualCache())
    next(steps)
    with trace(model):
        next(steps)
        next(steps)
    next(steps)
    assert len(taken) == 2
