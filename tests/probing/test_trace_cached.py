"""Traces and interventions in a run with a cache: every layer is heard, with all its keys, in every
evaluation.
"""

from __future__ import annotations

import pytest
import torch

from sinklab.core.attention import watching
from sinklab.core.probing import MaskSinks, intervene, trace
from sinklab.core.sampling import Canvas, denoise
from sinklab.extras.fast import decoder
from sinklab.lab.caching import DualCache, PrefixCache
from tiny_diffusion import tiny_model

PROMPTS = [[5, 6, 7, 8, 9, 10], [11, 12, 13]]
NEW, BLOCK, CANVAS = 6, 3, 12
QUERIES = {PrefixCache(): [12, 6, 6, 12, 3, 3], DualCache(): [12, 3, 3, 12, 3, 3]}
LAYERS = ["model.layers.0.self_attn", "model.layers.1.self_attn"]


def canvas(model, prompts=PROMPTS):
    return Canvas.from_prompts(
        prompts, new_tokens=NEW, mask_id=model.config.mask_token_id, pad_id=0
    )


def decoding(model, cache, prompts=PROMPTS):
    start = canvas(model, prompts)
    real_BS = None if bool(start.attention_BS.all()) else start.attention_BS
    return denoise(model.denoiser(real_BS), start, cache=cache, block_length=BLOCK)


@pytest.mark.parametrize("sinks", [0, 2])
@pytest.mark.parametrize("cache", QUERIES)
def test_every_layer_and_key_is_seen_at_every_step(cache, sinks):
    model = tiny_model(sinks)
    with trace(model, ("received", "value_norm", "row_entropy")) as recording:
        for step in decoding(model, cache):
            recording.mark(step)
    assert recording.layers == LAYERS
    assert recording.prefix == sinks
    assert recording.forwards_per_step == [1] * NEW
    assert [part.shape for part in recording.received] == [(2, 2, 4, sinks + CANVAS)] * NEW
    assert [part.shape[-1] for part in recording.row_entropy] == QUERIES[cache]
    for received, queries in zip(recording.received, QUERIES[cache], strict=True):
        # every query gives away a mass of 1, those of padding none
        real_B1 = torch.tensor([[queries], [queries - 3 if queries == CANVAS else queries]])
        torch.testing.assert_close(
            received.sum(-1), real_B1[..., None].expand(2, 2, 4).float(), rtol=0, atol=1e-4
        )
        assert (received[1, :, :, sinks : sinks + 3] == 0).all()


@pytest.mark.parametrize("cache", QUERIES)
def test_without_marks_every_evaluation_is_a_step(cache):
    model = tiny_model(1)
    with trace(model) as recording:
        steps = list(decoding(model, cache))
    assert len(recording.received) == len(steps) == NEW


@pytest.mark.parametrize("cache", QUERIES)
def test_remembered_values_are_those_of_the_full_evaluation(cache):
    model = tiny_model(1)
    with trace(model, ("value_norm",)) as recording:
        list(decoding(model, cache))
    first, second = recording.value_norm[:2]
    # sink and prompt are remembered, the block is not: one of its tokens is new
    assert torch.equal(first[..., :7], second[..., :7])
    assert not torch.equal(first[..., 7:10], second[..., 7:10])


@pytest.mark.parametrize("cache", QUERIES)
def test_a_trace_does_not_change_what_is_written(cache):
    model = tiny_model(1)
    untraced = list(decoding(model, cache))
    with trace(model):
        traced = list(decoding(model, cache))
    assert torch.equal(untraced[-1].ids_BS, traced[-1].ids_BS)
    for one, other in zip(untraced, traced, strict=True):
        torch.testing.assert_close(one.confidence_BS, other.confidence_BS, equal_nan=True)


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


@pytest.mark.parametrize("cache", QUERIES)
def test_an_intervention_reaches_every_layer_of_every_evaluation(cache):
    model = tiny_model(1)
    with watching(model):
        plain = list(decoding(model, cache))
    with intervene(model, MaskSinks(k=1)) as log, trace(model) as recording:
        edited = []
        for step in decoding(model, cache):
            recording.mark(step)
            edited.append(step)
    assert log.forwards == NEW
    assert log.prefix == 1
    assert len(log.removals) == NEW - 1
    assert all(removal.layers == tuple(LAYERS) for removal in log.removals)
    for removal, received in zip(log.removals, recording.received[1:], strict=True):
        assert (received.gather(-1, removal.columns_BLHM) == 0).all()
    assert torch.equal(plain[0].confidence_BS.nan_to_num(), edited[0].confidence_BS.nan_to_num())
    assert not torch.allclose(
        plain[1].confidence_BS.nan_to_num(), edited[1].confidence_BS.nan_to_num()
    )
