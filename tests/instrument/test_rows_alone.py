"""A row of a padded batch is what it is alone: what is written, received and visible, under every
cache and edit.
"""

# B batch, L layers, H heads, K keys, S canvas
import itertools

import pytest
import torch
from torch.testing import assert_close

from refusals import refused
from sinklab.core.instrument import BlockKeys, SinkKeys, intervene, trace
from sinklab.core.sinks import Excess
from sinklab.core.subject import Canvas, denoise
from sinklab.lab.caching import DualCache, PrefixCache
from sinklab.lab.measures import MaskSinks, WindowAttention
from tiny_diffusion import tiny_model

MODELS = {
    "plain": {},
    "sinks in front": {"sink": 2},
    "sinks at the end": {"sink": 2, "sink_side": "end"},
    "keys and values": {"sink_kind": "kv", "sink_count": 1},
    "gate": {"gate": "elementwise"},
    "shift": {"sink": 1, "logit_shift": True},
}
CACHES = {"none": None, "prefix": PrefixCache(), "dual": DualCache()}
EDITS = {
    "none": (),
    "strongest": (MaskSinks(2),),
    "carried": (MaskSinks(1, when="kept"),),
    "by rule": (BlockKeys(SinkKeys(Excess(0.2))),),
    "window": (WindowAttention(2),),
}
TEXTS = [[5, 6, 7, 8, 9, 10], [14]]
NEW = 4


def padded(side, texts, mask_id):
    """Texts with masks behind them, padded on one side, and the columns that are each row's own."""
    rows = [[*text, *[mask_id] * NEW] for text in texts]
    width = max(map(len, rows))
    gaps = [width - len(row) for row in rows]
    owns = [slice(gap, width) if side == "left" else slice(0, width - gap) for gap in gaps]
    ids_BS, real_BS = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width)
    for row, (ids, own) in enumerate(zip(rows, owns, strict=True)):
        ids_BS[row, own], real_BS[row, own] = torch.tensor(ids), 1
    return Canvas.infill(ids_BS, mask_id=mask_id, attention_BS=real_BS), owns


def decoded(model, canvas, cache, edit):
    """The canvas after every step, what was received at each, and what the edits removed."""
    with intervene(model, *EDITS[edit]) as log, trace(model) as recording:
        block_length = None if cache == "none" else 2
        steps = list(denoise(model, canvas, cache=CACHES[cache], block_length=block_length))
    return [step.ids_BS for step in steps], recording, log.removals


PLACES = [*itertools.product(("left",), CACHES), ("right", "none")]
CASES = [
    (kind, *PLACES[row % 4], edit)
    for row, (kind, edit) in enumerate(zip(MODELS, itertools.cycle(("none", "strongest"))))
]
CASES += [
    ("sinks in front", "left", cache, edit)
    for edit, cache in {"carried": "dual", "by rule": "none", "window": "prefix"}.items()
]


@pytest.mark.parametrize("kind, side, cache, edit", CASES)
def test_a_row_of_a_padded_batch_is_what_it_is_alone(kind, side, cache, edit):
    model = tiny_model(**MODELS[kind])
    mask_id = model.config.mask_token_id
    canvas, owns = padded(side, TEXTS, mask_id)
    written, recording, removals = decoded(model, canvas, cache, edit)
    prefix = recording.prefix
    for row, (text, own) in enumerate(zip(TEXTS, owns, strict=True)):
        alone, heard, removed = decoded(model, padded(side, [text], mask_id)[0], cache, edit)
        columns_K = [*range(prefix), *range(prefix + own.start, prefix + own.stop)]
        for step in range(NEW):
            assert torch.equal(written[step][row, own], alone[step][0]), (row, step)
            received_LHK, visible_K = recording.received[step][row], recording.visible[step][row]
            assert_close(received_LHK[..., columns_K], heard.received[step][0], rtol=0, atol=1e-5)
            assert torch.equal(visible_K[columns_K], heard.visible[step][0]), (row, step)
            padding_K = [key for key in range(len(visible_K)) if key not in columns_K]
            assert not received_LHK[..., padding_K].any() and not visible_K[padding_K].any()
        for one, other in zip(removals, removed, strict=True):
            assert_close(one["removed"][row], other["removed"][0], rtol=0, atol=1e-5)
            assert_close(one["left"][row], other["left"][0])


@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_a_cache_refuses_rows_that_are_padded_on_the_right(cache):
    """Blocks of the rows would stand in columns of their own."""
    model = tiny_model()
    canvas, _ = padded("right", TEXTS, model.config.mask_token_id)
    refused(
        "block 0, in columns 1 to 7",
        denoise,
        model,
        canvas,
        cache=CACHES[cache],
        block_length=2,
    )
