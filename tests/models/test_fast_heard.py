"""A trace that need not be exact hears the fast decoder: the numbers of the model's own forward,
its slow twin.
"""

import pytest
import torch
from test_cached_decoding import MASK, VARIANTS, build
from torch.testing import assert_close

from sinklab.core.attention import watching
from sinklab.core.instrument import intervene, trace
from sinklab.core.registry import statistics
from sinklab.core.subject import Canvas, denoise
from sinklab.extras.fast import decoder
from sinklab.lab.measures import MaskSinks

EVERY = tuple(statistics)
ROWS = {torch.float64: [[5, 6, 7, 8, 9, 10], [11, 12, 13], [4]], torch.float32: [[5, 6, 7, 8]]}
TOLERANCES = {torch.float64: 2e-6, torch.float32: 1e-5}
"""of a recording, which is float32"""


@pytest.fixture
def taken(monkeypatch):
    """Evaluations by the fast decoder, each with whether it was heard."""
    calls, own = [], decoder.FastDecoder.__call__

    def spy(self, *args, **options):
        calls.append(options.get("heard") is not None)
        return own(self, *args, **options)

    monkeypatch.setattr(decoder.FastDecoder, "__call__", spy)
    return calls


def traced(
    model, prompts=((5, 6, 7, 8),), cache=None, names=("received",), new_tokens=4, **options
):
    canvas = Canvas.from_prompts(
        [list(one) for one in prompts], new_tokens=new_tokens, mask_id=MASK, pad_id=0
    )
    denoiser = model.denoiser(canvas.attention_BS)
    with trace(model, names, canvas=canvas, **options) as recording:
        steps = list(denoise(denoiser, canvas, cache=cache, block_length=2))
    return recording, steps


def agree(ours, theirs, tolerance):
    assert ours.layers == theirs.layers and ours.statistics == theirs.statistics
    pairs = [(ours.values(name), theirs.values(name)) for name in ours.statistics]
    pairs += [
        (getattr(ours, name), getattr(theirs, name))
        for name in ("visible_by_layer", "positions", "columns", "query_state", "key_state")
    ]
    for mine, other in pairs:
        assert len(mine) == len(other)
        for one, two in zip(mine, other, strict=True):
            assert_close(one, two, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize(
    "variant, dtype",
    [
        *((variant, torch.float64) for variant in VARIANTS),
        *((variant, torch.float32) for variant in ("qwen2", "gated logits")),
    ],
)
def test_every_statistic_is_that_of_the_models_own_forward(variant, dtype, taken):
    model = build(dtype=dtype, **VARIANTS[variant])
    how = {"names": EVERY, "new_tokens": 2}
    own, own_steps = traced(model, ROWS[dtype], **how)
    assert not taken
    fast, fast_steps = traced(model, ROWS[dtype], **how, exact=False)
    agree(fast, own, TOLERANCES[dtype])
    for one, other in zip(fast_steps, own_steps, strict=True):
        assert torch.equal(one.ids_BS, other.ids_BS)
    assert len(taken) == len(fast_steps) and all(taken)


@pytest.mark.parametrize("cache", ["prefix", "dual"])
@pytest.mark.parametrize("variant", ["sink", "shifted"])
def test_under_a_cache_too(cache, variant, taken):
    model = build(**VARIANTS[variant])
    own, _ = traced(model, cache=cache, names=("received", "row_entropy", "massive_activations"))
    fast, steps = traced(model, cache=cache, names=own.statistics, exact=False)
    agree(fast, own, 2e-6)
    assert len(taken) == len(steps)


def test_the_models_own_forward_is_kept_for_whoever_asks_for_it(taken):
    model = build(dtype=torch.float32)
    own, _ = traced(model)
    with trace(model), trace(model, exact=False) as both:
        traced(model, exact=False)
    assert all(torch.equal(*pair) for pair in zip(own.received, both.received, strict=True))
    with watching(model):
        traced(model, exact=False)
    with watching(model.model.layers[1]):
        traced(model, exact=False)
    with intervene(model, MaskSinks(k=1)):
        traced(model, exact=False)
    handle = model.model.layers[0].register_forward_hook(lambda *_: None)
    traced(model, exact=False)
    handle.remove()
    assert not taken
    traced(model, exact=False)
    assert taken and all(taken)
    # nobody listens any more
    list(denoise(model, Canvas.from_prompts([[5]], new_tokens=2, mask_id=MASK, pad_id=0)))
    assert not any(taken[-2:])
