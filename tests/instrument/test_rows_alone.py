"""A row of a padded batch is what it is alone: what is written, received and visible, under every
cache and edit.
"""

# L layers, H heads, K keys
import pytest
import torch
from probed import canvas_of, decoded
from torch.testing import assert_close

from sinklab.core.instrument import BlockKeys, SinkKeys
from sinklab.core.sinks import Excess
from sinklab.lab.caching import DualCache, PrefixCache
from sinklab.lab.measures import MaskSinks, WindowAttention
from tiny_diffusion import tiny_model

TEXTS = [[5, 6, 7, 8, 9, 10], [14]]
NEW = 4
CASES = [
    ({}, None, ()),
    ({"sink": 2}, PrefixCache(), (MaskSinks(2),)),
    ({"sink": 2, "sink_side": "end"}, DualCache(), ()),
    ({"sink_kind": "kv", "sink_count": 1}, None, (MaskSinks(2),)),
    ({"gate": "elementwise"}, None, ()),
    ({"sink": 1, "logit_shift": True}, PrefixCache(), (MaskSinks(2),)),
    ({"sink": 2}, DualCache(), (MaskSinks(1, when="kept"),)),
    ({"sink": 2}, None, (BlockKeys(SinkKeys(Excess(0.2))),)),
    ({"sink": 2}, PrefixCache(), (WindowAttention(2),)),
]


@pytest.mark.parametrize("settings, cache, edits", CASES)
def test_a_row_of_a_padded_batch_is_what_it_is_alone(settings, cache, edits):
    model = tiny_model(**settings)

    def run(texts):
        canvas = canvas_of(model, texts, NEW)
        return decoded(model, canvas, *edits, cache=cache, block_length=2)

    written, recording, log = run(TEXTS)
    for row, text in enumerate(TEXTS):
        alone, heard, alone_log = run([text])
        own = len(text) + NEW
        gap = written[0].ids_BS.shape[1] - own
        is_own_K = torch.arange(recording.prefix + gap + own)
        is_own_K = (is_own_K < recording.prefix) | (is_own_K >= recording.prefix + gap)
        for step in range(NEW):
            assert torch.equal(written[step].ids_BS[row, gap:], alone[step].ids_BS[0])
            received_LHK, visible_K = recording.received[step][row], recording.visible[step][row]
            assert_close(received_LHK[..., is_own_K], heard.received[step][0], rtol=0, atol=1e-5)
            assert torch.equal(visible_K[is_own_K], heard.visible[step][0])
            assert not received_LHK[..., ~is_own_K].any() and not visible_K[~is_own_K].any()
        for one, other in zip(log.removals, alone_log.removals, strict=True):
            assert_close(one["removed"][row], other["removed"][0], rtol=0, atol=1e-5)
            assert_close(one["left"][row], other["left"][0])
